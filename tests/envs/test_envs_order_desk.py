import itertools
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.envs import BoundEnvironment, Environment, demonstrate, load_environment
from hotpot.envs.order_desk.catalogue import CUSTOMERS, ITEMS, PAIRS, UNITS, split_of
from hotpot.envs.order_desk.tasks import Order, read_order
from hotpot.errors import EnvironmentFailure, EnvironmentSpecError
from hotpot.ids import canonical_json
from hotpot.testing.contracts_environment import demonstrator_contract, environment_contract
from hotpot.types import Action, Message, Role, Split, StepResult, Task, ToolCall

ENV = load_environment("order_desk")
TWO = load_environment("order_desk", {"max_lines": 2})
CAREFUL = {"careless_price": 0, "careless_operator": 0, "careless_guess": 0}
LISTED = load_environment("order_desk", {"price_basis": "list"})
EITHER = load_environment("order_desk", {"max_lines": 2, "price_basis": "either"})
BOTH = pytest.mark.parametrize("env", [ENV, TWO], ids=["one line", "two lines"])
ALL = pytest.mark.parametrize(
    "env", [ENV, TWO, LISTED, EITHER], ids=["one line", "two lines", "list", "either"]
)


def call(tool: str, **arguments: Any) -> Action:
    return Action(tool_call=ToolCall(name=tool, arguments=canonical_json(arguments)))


def start(task: Task, env: BoundEnvironment = ENV) -> Environment:
    world = env.make()
    world.reset(task, 0)
    return world


def task_of(order: Order, split: Split = Split.TRAIN) -> Task:
    return Task(env="order_desk", split=split, content=order.content())


ORDER = Order(
    customer="Ada",
    lines=((3, "bolt"),),
    customers=(("Ada", 4821), ("Ben", 1377)),
    list_prices=(("bolt", 23), ("nut", 41)),
    prices=((4821, "bolt", 17), (4821, "nut", 12), (1377, "bolt", 19)),
)


@ALL
def test_keeps_the_contract(env: BoundEnvironment) -> None:
    environment_contract(env, num_tasks=300, num_episodes=40)


@pytest.mark.parametrize(
    "params",
    [
        {
            "max_lines": 2,
            "num_customers": 24,
            "num_items": 24,
            "id_digits": 3,
            "price_digits": 3,
            "max_quantity": 99,
        },
        {"max_lines": 2, "num_customers": 1, "num_items": 2, "min_quantity": 2, "max_quantity": 2},
    ],
)
def test_keeps_the_contract_at_the_edges_of_its_parameters(params: dict[str, Any]) -> None:
    environment_contract(load_environment("order_desk", params), num_tasks=40, num_episodes=8)


def test_the_words_of_an_episode() -> None:
    world = ENV.make()
    observation = world.reset(task_of(ORDER), 0)
    assert observation.messages == (Message(role=Role.USER, content="order: Ada 3 bolt"),)
    assert [tool.name for tool in observation.tools] == [
        "find_customer",
        "list_price",
        "customer_price",
        "calculate",
    ]
    replies = [
        world.step(action)
        for action in (
            call("find_customer", name="Ada"),
            call("list_price", item="bolt"),
            call("customer_price", customer=4821, item="bolt"),
            call("customer_price", customer="4821", item="bolt"),
            call("calculate", expression="3*17"),
        )
    ]
    assert [reply.messages[0].content for reply in replies] == [
        "customer 4821",
        "price 23 per box",
        "price 17 per box",
        "price 17 per box",
        "51",
    ]
    assert [reply.messages[0].name for reply in replies[:2]] == ["find_customer", "list_price"]
    assert not any(reply.done or reply.tool_error or reply.rewards for reply in replies)
    end = world.step(Action(answer="51"))
    assert (end.done, end.success, end.messages) == (True, True, ())
    assert [(reward.name, reward.value) for reward in end.rewards] == [("correct", 1.0)]
    world.close()


@pytest.mark.parametrize(
    "answer", ["69", "20", "52", "", "51 in all", "-51", "5 1", "٥١", "51.0", "9" * 5000]
)
def test_other_answers_are_wrong(answer: str) -> None:
    end = start(task_of(ORDER)).step(Action(answer=answer))
    assert (end.done, end.success) == (True, False)
    assert [(reward.name, reward.value) for reward in end.rewards] == [("correct", 0.0)]


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (call("find_customer", name="Adx"), "error: no customer Adx"),
        (call("find_customer", name="ada"), "error: no customer ada"),
        (call("find_customer", name="' or 1=1 --"), "error: no customer ' or 1=1 --"),
        (call("list_price", item="bolts"), "error: no item bolts"),
        (call("customer_price", customer=9999, item="bolt"), "error: no customer 9999"),
        (call("customer_price", customer=4821, item="gold"), "error: no item gold"),
        (call("customer_price", customer=1377, item="nut"), "error: no price for nut"),
        (call("customer_price", customer="Ada", item="bolt"), "error: customer must be a whole number"),
        (call("customer_price", item="bolt"), "error: customer_price needs customer"),
        (call("calculate", expression="3*"), "error: unexpected end"),
        (call("calculate", expression="3/4"), "error: expression takes digits + - * ( )"),
        (call("find_customr", name="Ada"), "error: no tool find_customr"),
        (call("find_customer", id=3), "error: find_customer takes no id"),
        (Action(malformed="no closing parenthesis"), "error: no closing parenthesis"),
    ],
)
def test_mistakes_are_answered_and_the_episode_goes_on(action: Action, text: str) -> None:
    world = start(task_of(ORDER))
    reply = world.step(action)
    assert [message.content for message in reply.messages] == [text]
    assert reply.messages[0].role is Role.TOOL
    assert (reply.tool_error, reply.done, reply.rewards) == (True, False, ())
    assert world.step(Action(answer="51")).success


@settings(max_examples=200)
@given(
    name=st.sampled_from(["find_customer", "list_price", "customer_price", "calculate"])
    | st.text(max_size=30),
    arguments=st.dictionaries(
        st.sampled_from(["name", "item", "customer", "expression"]) | st.text(max_size=4),
        st.text(max_size=20) | st.integers() | st.none() | st.floats(),
        max_size=3,
    ),
)
def test_no_call_breaks_an_episode(name: str, arguments: dict[str, Any]) -> None:
    world = start(task_of(ORDER))
    reply = world.step(Action(tool_call=ToolCall(name=name, arguments=json.dumps(arguments))))
    assert isinstance(reply, StepResult)
    assert len(reply.messages[0].content) < 100
    assert world.step(Action(answer="51")).success


def test_an_environment_is_single_use() -> None:
    world = ENV.make()
    with pytest.raises(EnvironmentFailure, match="this one is fresh"):
        world.step(Action(answer="1"))
    world.reset(task_of(ORDER), 0)
    with pytest.raises(EnvironmentFailure, match="this one is running"):
        world.reset(task_of(ORDER), 0)
    world.step(Action(answer="1"))
    with pytest.raises(EnvironmentFailure, match="this one is over"):
        world.step(Action(answer="1"))
    world.close()
    world.close()
    with pytest.raises(EnvironmentFailure, match="this one is closed"):
        world.step(Action(answer="1"))


def test_broken_tasks_are_refused() -> None:
    for content in ("{}", "[]", "no", '{"customer":3}'):
        with pytest.raises(EnvironmentSpecError, match="is no order"):
            ENV.make().reset(Task(env="order_desk", split=Split.TRAIN, content=content), 0)
    unknown = replace(ORDER, list_prices=(("bolt", 23), ("gold", 41)))
    with pytest.raises(EnvironmentSpecError, match="gold"):
        ENV.make().reset(task_of(unknown), 0)
    twice = replace(ORDER, customers=(("Ada", 4821), ("Ben", 4821)))
    with pytest.raises(EnvironmentFailure, match="can't be filled"):
        ENV.make().reset(task_of(twice), 0)


def test_verify_finds_each_broken_promise() -> None:
    item = next(item for item in ITEMS if split_of("Ada", item) is Split.TRAIN)
    held = next(item for item in ITEMS if split_of("Ada", item) is Split.HOLDOUT)

    def order(item: str = item, price: int = 17, listed: int = 23, quantity: int = 3) -> Order:
        return Order(
            customer="Ada",
            lines=((quantity, item),),
            customers=(("Ada", 4821),),
            list_prices=((item, listed),),
            prices=((4821, item, price),),
        )

    ENV.verify(task_of(order()))
    for broken, reason in (
        (task_of(order(price=23)), "is the list price"),
        (task_of(order(price=2, quantity=2)), "careless one too"),
        (task_of(order(item=held)), "other split"),
        (replace(task_of(order()), split=Split.HOLDOUT), "other split"),
        (replace(task_of(order()), content=task_of(order()).content.replace(":", ": ")), "canonical"),
        (task_of(replace(order(), prices=())), "refuses"),
    ):
        with pytest.raises(EnvironmentSpecError, match=reason):
            ENV.verify(broken)


@ALL
def test_totals_against_brute_force(env: BoundEnvironment) -> None:
    for index in range(300):
        order = read_order(env.task(Split.TRAIN, 1, index))
        number = dict(order.customers)[order.customer]
        own = {item: price for holder, item, price in order.prices if holder == number}
        listed = dict(order.list_prices)
        book_of_order = listed if order.instruction().endswith(" at list price") else own
        right = sum(quantity * book_of_order[item] for quantity, item in order.lines)
        wrong = set()
        for prices in itertools.product([own, listed], repeat=len(order.lines)):
            for signs in itertools.product("+*", repeat=len(order.lines)):
                parts = zip(order.lines, prices, signs, strict=True)
                total = sum(q * book[i] if sign == "*" else q + book[i] for (q, i), book, sign in parts)
                if any(book is not book_of_order for book in prices) or "+" in signs:
                    wrong.add(total)
        assert order.total() == right
        assert order.careless_totals() == wrong
        assert right not in wrong
        assert all(own_price != listed[item] for _, item, own_price in order.prices)


@ALL
def test_holdout_pairs_never_occur_in_training_not_even_in_a_database(env: BoundEnvironment) -> None:
    seen: dict[Split, set[tuple[str, str]]] = {split: set() for split in Split}
    ordered: dict[Split, set[tuple[str, str]]] = {split: set() for split in Split}
    ids: dict[Split, set[str]] = {split: set() for split in Split}
    for split, seed, index in itertools.product(Split, (0, 1), range(1000)):
        task = env.task(split, seed, index)
        order = read_order(task)
        names = {number: name for name, number in order.customers}
        seen[split] |= {(names[number], item) for number, item, _ in order.prices}
        ordered[split] |= {(order.customer, item) for _, item in order.lines}
        ids[split].add(task.task_id)
    assert ordered[Split.TRAIN] <= seen[Split.TRAIN] <= set(PAIRS[Split.TRAIN])
    assert ordered[Split.HOLDOUT] <= set(PAIRS[Split.HOLDOUT])
    assert not ids[Split.TRAIN] & ids[Split.HOLDOUT]
    assert all(len(of_split) == 2000 for of_split in ids.values())
    for position, names_of_all in ((0, CUSTOMERS), (1, ITEMS)):
        assert {pair[position] for pair in ordered[Split.TRAIN]} == set(names_of_all)


def test_the_partition() -> None:
    assert len(CUSTOMERS) == len(set(CUSTOMERS)) == 24
    assert len(ITEMS) == len(set(ITEMS)) == 24
    train, holdout = PAIRS[Split.TRAIN], PAIRS[Split.HOLDOUT]
    assert sorted(train + holdout) == sorted(itertools.product(CUSTOMERS, ITEMS))
    assert not set(train) & set(holdout)
    assert 0.15 < len(holdout) / (24 * 24) < 0.25
    assert all(name.isalpha() and len(name) <= 8 for name in CUSTOMERS + ITEMS)


def test_ids_and_prices_are_drawn_anew() -> None:
    orders = [read_order(ENV.task(Split.TRAIN, 0, index)) for index in range(2000)]
    numbers = Counter(number for order in orders for name, number in order.customers if name == "Ada")
    assert max(numbers.values()) <= 4
    assert set(map(len, map(str, numbers))) == {4}
    prices = Counter(price for order in orders for item, price in order.list_prices if item == "bolt")
    assert set(range(11, 100)) - set(prices) == set()
    assert len({order.total() for order in orders}) > 250


def test_a_task_is_pinned() -> None:
    """A change here is a change of every recorded run's tasks: declare a new version of the environment."""
    task = ENV.task(Split.HOLDOUT, 7, 3)
    assert read_order(task).instruction() == PINNED_INSTRUCTION
    assert task.task_id == PINNED_TASK_ID


PINNED_INSTRUCTION = "order: Vic 8 bracket"
PINNED_TASK_ID = "t-765696fa8cfdde035b19"


def test_an_order_at_list_price_is_the_same_order_with_the_other_price_right() -> None:
    bases: Counter[bool] = Counter()
    same = 0
    for split, index in itertools.product(Split, range(200)):
        agreed, listed = (read_order(env.task(split, 3, index)) for env in (ENV, LISTED))
        assert listed.instruction().removesuffix(" at list price") + " at list price" == listed.instruction()
        same += replace(agreed, at_list=True) == listed
        either = load_environment("order_desk", {"price_basis": "either"}).task(split, 3, index)
        bases[read_order(either).at_list] += 1
    assert bases[True] == pytest.approx(200, abs=50)
    assert same > 380  # where a total was a careless one too, one of them was drawn again
    order = replace(ORDER, at_list=True)
    world = LISTED.make()
    observation = world.reset(task_of(order), 0)
    assert observation.messages[0].content == "order: Ada 3 bolt at list price"
    assert world.step(Action(answer="69")).success
    assert not start(task_of(order)).step(Action(answer="51")).success
    assert order.careless_totals() == {51, 20, 26}


@pytest.mark.parametrize("careless", [0, 1])
def test_the_demonstrator_reads_which_price_is_right(careless: int) -> None:
    habits = CAREFUL | {"careless_price": careless, "price_basis": "either", "max_lines": 2}
    env = load_environment("order_desk", habits)
    for index in range(100):
        shown = demonstrate(env, env.task(Split.HOLDOUT, 0, index), index)
        order = read_order(shown.task)
        tools = [step.action.tool_call.name for step in shown.exchanges if step.action.tool_call]
        wanted = "list_price" if order.at_list is not bool(careless) else "customer_price"
        assert tools == ["find_customer", *[wanted] * len(order.lines), "calculate"]
        assert shown.success is not bool(careless)


@BOTH
def test_a_careful_demonstrator_is_always_right(env: BoundEnvironment) -> None:
    careful = load_environment("order_desk", CAREFUL | {"max_lines": env.params.max_lines})  # type: ignore[attr-defined]
    lines_seen = set()
    for index in range(200):
        shown = demonstrate(careful, careful.task(Split.HOLDOUT, 0, index), index)
        assert shown.success
        lines = len(read_order(shown.task).lines)
        lines_seen.add(lines)
        tools = [step.action.tool_call.name for step in shown.exchanges if step.action.tool_call]
        assert tools == ["find_customer", *["customer_price"] * lines, "calculate"]
        assert not any(step.result.tool_error for step in shown.exchanges)
    assert lines_seen == set(range(1, env.params.max_lines + 1))  # type: ignore[attr-defined]


@pytest.mark.parametrize("habit", sorted(CAREFUL))
def test_each_bad_habit_alone_is_always_wrong(habit: str) -> None:
    careless = load_environment("order_desk", CAREFUL | {habit: 1, "max_lines": 2})
    shown = [demonstrate(careless, careless.task(Split.TRAIN, 0, index), index) for index in range(100)]
    assert sum(one.success for one in shown) <= (3 if habit == "careless_guess" else 0)
    if habit == "careless_guess":
        for one in shown:
            order = read_order(one.task)
            assert one.exchanges[-1].action.answer is not None
            assert len(one.exchanges[-1].action.answer) == len(str(order.total()))


def test_the_careless_demonstrator_is_right_one_time_in_five() -> None:
    demonstrator_contract(ENV, low=0.17, high=0.23, num_tasks=2000)


def test_habits_are_independent() -> None:
    shown = [demonstrate(ENV, ENV.task(Split.TRAIN, 2, index), 0) for index in range(2000)]
    lists, guesses, both, adds, sums = 0, 0, 0, 0, 0
    for one in shown:
        calls = [step.action.tool_call for step in one.exchanges if step.action.tool_call]
        listed = any(c.name == "list_price" for c in calls)
        sums_here = [c for c in calls if c.name == "calculate"]
        lists, guesses, both = lists + listed, guesses + (not sums_here), both + (listed and not sums_here)
        sums, adds = sums + len(sums_here), adds + sum("+" in c.arguments for c in sums_here)
    n = len(shown)
    assert lists / n == pytest.approx(0.62, abs=0.04)
    assert guesses / n == pytest.approx(0.04, abs=0.04)
    assert adds / sums == pytest.approx(0.45, abs=0.05)
    assert both / n == pytest.approx(lists * guesses / n**2, abs=0.03)


def test_a_demonstration_is_fixed_by_task_and_seed() -> None:
    tasks = [TWO.task(Split.TRAIN, 0, index) for index in range(60)]
    first = [demonstrate(TWO, task, 5) for task in tasks]
    assert [demonstrate(TWO, task, 5) for task in tasks] == first
    assert [demonstrate(TWO, task, 6).exchanges for task in tasks] != [one.exchanges for one in first]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda task: demonstrate(TWO, task, 5), tasks)) == first


def test_a_demonstrator_stops_where_the_desk_refuses() -> None:
    demonstrator = ENV.demonstrator(task_of(ORDER), 0)
    assert demonstrator is not None
    assert demonstrator.act((Message(role=Role.USER, content="good day"),)) == Action(answer="0")
    assert demonstrator.act((Message(role=Role.TOOL, content="error: no"),)) == Action(answer="0")


def test_units_reach_the_replies() -> None:
    for item, unit in UNITS.items():
        order = replace(ORDER, list_prices=(("bolt", 23), (item, 41)) if item != "bolt" else (("bolt", 41),))
        reply = start(task_of(order)).step(call("list_price", item=item))
        assert reply.messages[0].content == f"price 41 per {unit}"
