"""Tasks of ``order_desk``: drawing them, writing and reading their content, and what the right total is.

Every task draws its own customer ids, list prices and customer prices, so nothing in it can be memorised. An order is
priced at the prices agreed with the customer, unless it says ``at list price``. Invariants: a task is a pure function of
(params, split, seed, index); a customer's price differs from the list price; the right total differs from every careless
one; a training task, its database included, holds no held-out pair.
"""

import itertools
import json
from dataclasses import dataclass
from random import Random

from hotpot.envs.order_desk.catalogue import CUSTOMERS, ITEMS, ITEMS_OF, PAIRS
from hotpot.envs.order_desk.params import OrderDeskParams
from hotpot.errors import EnvironmentSpecError
from hotpot.ids import canonical_json, sha256_hex
from hotpot.types import Split, Task

NAME = "order_desk"
"""Name of the environment."""

AT_LIST_PRICE = " at list price"
"""The words that end an order to be priced at list prices."""

_MAX_DRAWS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The content of a task, read.

    ``lines`` are (quantity, item); ``customers`` (name, id); ``list_prices`` (item, price); ``prices`` (customer id,
    item, price). All prices are whole numbers. ``at_list``: the list prices are the right ones, not the customer's.
    """

    customer: str
    lines: tuple[tuple[int, str], ...]
    customers: tuple[tuple[str, int], ...]
    list_prices: tuple[tuple[str, int], ...]
    prices: tuple[tuple[int, str, int], ...]
    at_list: bool = False

    def instruction(self) -> str:
        """Return the order in the customer's words: ``order: Ada 3 bolt and 2 nut``, or ``… at list price``."""
        lines = " and ".join(f"{quantity} {item}" for quantity, item in self.lines)
        return f"order: {self.customer} {lines}{AT_LIST_PRICE if self.at_list else ''}"

    def total(self) -> int:
        """Return the right total: quantity times the right price, summed over the lines."""
        return sum(quantity * right for quantity, right, _ in self._priced())

    def careless_totals(self) -> frozenset[int]:
        """Return every total a careless agent gets: the wrong price on some lines, or ``+`` for ``*`` on some lines."""
        options = [(q * right, q * other, q + right, q + other) for q, right, other in self._priced()]
        wrong = itertools.islice(
            itertools.product(*options), 1, None
        )  # the first choice is right on every line
        return frozenset(sum(choice) for choice in wrong)

    def content(self) -> str:
        """Return the canonical JSON of the task; ``at_list`` stands in it only where it holds."""
        told = {"at_list": True} if self.at_list else {}
        return canonical_json(
            {
                "customer": self.customer,
                "lines": self.lines,
                "customers": self.customers,
                "list_prices": self.list_prices,
                "prices": self.prices,
                **told,
            }
        )

    def _priced(self) -> list[tuple[int, int, int]]:
        """Return (quantity, right price, the other price) of each line."""
        number = dict(self.customers)[self.customer]
        own = {item: price for holder, item, price in self.prices if holder == number}
        listed = dict(self.list_prices)
        right, other = (listed, own) if self.at_list else (own, listed)
        return [(quantity, right[item], other[item]) for quantity, item in self.lines]


def draw_task(params: OrderDeskParams, split: Split, seed: int, index: int) -> Task:
    """Return task ``index`` of the stream ``(split, seed)``; pure, O(1)."""
    rng = Random(int(sha256_hex(f"{NAME}\n{split.value}\n{seed}\n{index}")[:16], 16))
    for _ in range(_MAX_DRAWS):
        order = _draw(params, split, rng)
        if order.total() not in order.careless_totals():
            return Task(env=NAME, split=split, content=order.content())
    raise EnvironmentSpecError(
        f"no order with a total of its own in {_MAX_DRAWS} draws; widen the prices of {params}"
    )


def read_order(task: Task) -> Order:
    """Read a task's content. Raises EnvironmentSpecError for content of another form."""
    try:
        data = json.loads(task.content)
        return Order(
            customer=data["customer"],
            lines=tuple((quantity, item) for quantity, item in data["lines"]),
            customers=tuple((name, number) for name, number in data["customers"]),
            list_prices=tuple((item, price) for item, price in data["list_prices"]),
            prices=tuple((number, item, price) for number, item, price in data["prices"]),
            at_list=data.get("at_list", False) is True,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise EnvironmentSpecError(
            f"task {task.task_id} is no order of {NAME!r}: {type(error).__name__}: {error}; draw tasks with its spec"
        ) from error


def held_apart(_params: OrderDeskParams, task: Task) -> tuple[str, ...]:
    """Return the (customer, item) pairs in a task that may occur in one split only, as text.

    A training task's are all pairs in its database; a hold-out task's are the ordered ones.
    """
    order = read_order(task)
    if task.split is Split.HOLDOUT:
        return tuple(f"{order.customer} {item}" for _, item in order.lines)
    names = {number: name for name, number in order.customers}
    return tuple(f"{names[number]} {item}" for number, item, _ in order.prices)


def _draw(params: OrderDeskParams, split: Split, rng: Random) -> Order:
    customer, item = PAIRS[split][_below(rng, len(PAIRS[split]))]
    ordered = [item]
    others = [other for other in ITEMS_OF[split][customer] if other != item]
    if params.max_lines == 2 and others and _below(rng, 2):
        ordered.append(others[_below(rng, len(others))])
    quantities = params.max_quantity - params.min_quantity + 1
    lines = tuple((params.min_quantity + _below(rng, quantities), item) for item in ordered)
    names = _fill(rng, [customer], CUSTOMERS, params.num_customers)
    items = _fill(rng, ordered, ITEMS, params.num_items)
    lowest_id = 10 ** (params.id_digits - 1)
    ids = _distinct(rng, lowest_id, 10 * lowest_id, len(names))
    customers = tuple(zip(names, ids, strict=True))
    low, high = 10 ** (params.price_digits - 1) + 1, 10**params.price_digits
    list_prices = {item: low + _below(rng, high - low) for item in items}
    prices = tuple(
        (number, item, _other_price(rng, low, high, list_prices[item]))
        for name, number in customers
        for item in items
        if split is Split.HOLDOUT or item in ITEMS_OF[Split.TRAIN][name]
    )
    # The last draw, and only where both are possible: what else is drawn is the same for every basis.
    at_list = bool(_below(rng, 2)) if params.price_basis == "either" else params.price_basis == "list"
    return Order(
        customer=customer,
        lines=lines,
        customers=customers,
        list_prices=tuple(list_prices.items()),
        prices=prices,
        at_list=at_list,
    )


def _below(rng: Random, bound: int) -> int:
    """Return a number in [0, bound), from the one method of Random whose stream Python promises to keep."""
    return int(rng.random() * bound)


def _fill(rng: Random, chosen: list[str], pool: tuple[str, ...], count: int) -> list[str]:
    """Return ``count`` distinct names with ``chosen`` among them, in alphabetical order."""
    rest = [name for name in pool if name not in chosen]
    picked = list(chosen)
    while len(picked) < count:
        picked.append(rest.pop(_below(rng, len(rest))))
    return sorted(picked)


def _distinct(rng: Random, low: int, high: int, count: int) -> list[int]:
    found: dict[int, None] = {}
    while len(found) < count:
        found[low + _below(rng, high - low)] = None
    return list(found)


def _other_price(rng: Random, low: int, high: int, taken: int) -> int:
    """Return a price in [low, high) that is not ``taken``."""
    price = low + _below(rng, high - low - 1)
    return price + 1 if price >= taken else price
