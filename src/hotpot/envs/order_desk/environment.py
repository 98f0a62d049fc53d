"""The environment ``order_desk``: one order, a database of its own, four tools, one answer."""

import sqlite3

from hotpot.envs.base import Environment
from hotpot.envs.order_desk.catalogue import SYSTEM_PROMPT, UNITS, split_of
from hotpot.envs.order_desk.database import TOOLBOX, Desk
from hotpot.envs.order_desk.params import OrderDeskParams
from hotpot.envs.order_desk.reward import judge
from hotpot.envs.order_desk.tasks import Order, draw_task, read_order
from hotpot.envs.tools import ToolReply, clip, error_reply
from hotpot.errors import EnvironmentFailure, EnvironmentSpecError
from hotpot.ids import canonical_json
from hotpot.types import Action, Message, Observation, Role, Split, StepResult, Task, ToolCall

MAX_REASON_CHARS = 60
"""The reason why an action was malformed is repeated to the model up to this length."""


class OrderDesk(Environment):
    """One episode at the desk. Single-use: reset, step until the answer, close."""

    def __init__(self) -> None:
        self._desk: Desk | None = None
        self._total = 0
        self._state = "fresh"  # -> running -> over; any of them -> closed

    def reset(self, task: Task, seed: int) -> Observation:  # noqa: ARG002 - nothing in this world is random
        """Fill the database and return the order; see :class:`Environment`."""
        if self._state != "fresh":
            raise EnvironmentFailure(
                f"an order desk is single-use and this one is {self._state}; make a fresh one"
            )
        order = read_order(task)
        try:
            self._total = order.total()
            self._desk = open_desk(order)
        except sqlite3.Error as error:
            raise EnvironmentFailure(
                f"the database of task {task.task_id} can't be filled: {error}"
            ) from error
        except KeyError as error:
            raise EnvironmentSpecError(
                f"task {task.task_id} names {error}, which its own rows or the catalogue lack; draw tasks with the spec"
            ) from error
        self._state = "running"
        return Observation(
            messages=(Message(role=Role.USER, content=order.instruction()),), tools=TOOLBOX.specs
        )

    def step(self, action: Action) -> StepResult:
        """Answer a tool call, refuse a malformed one, or judge the answer; see :class:`Environment`."""
        if self._state != "running" or self._desk is None:
            raise EnvironmentFailure(f"a step needs a running order desk and this one is {self._state}")
        if action.answer is not None:
            self._state = "over"
            verdict = judge(action.answer, self._total)
            return StepResult(messages=(), rewards=verdict.rewards, done=True, success=verdict.success)
        if action.tool_call is None:
            return _tool_result("", error_reply(clip(action.malformed or "", MAX_REASON_CHARS)))
        return _tool_result(action.tool_call.name, TOOLBOX.run(action.tool_call, on=self._desk))

    def close(self) -> None:
        """Close the database."""
        self._state = "closed"
        if self._desk is not None:
            self._desk.close()
            self._desk = None


def open_desk(order: Order) -> Desk:
    """Return a desk whose database holds the order's rows, with the catalogue's units. KeyError: an unknown item."""
    return Desk(
        customers=order.customers,
        items=tuple((item, price, UNITS[item]) for item, price in order.list_prices),
        prices=order.prices,
    )


def make(_params: OrderDeskParams) -> OrderDesk:
    """Return a fresh desk; the parameters shape tasks only."""
    return OrderDesk()


def system_prompt(_params: OrderDeskParams) -> str:
    """Return the system prompt, the same for all parameters."""
    return SYSTEM_PROMPT


def task(params: OrderDeskParams, split: Split, seed: int, index: int) -> Task:
    """Return task ``index`` of the stream ``(split, seed)``."""
    return draw_task(params, split, seed, index)


def verify(_params: OrderDeskParams, task: Task) -> None:
    """Recompute the answer through the real tools on the real database, and check what the task promises.

    Raises EnvironmentSpecError where the totals differ, a careless total is right, a customer's price is the list
    price, or the order stands on the wrong side of the split.
    """
    order = read_order(task)
    desk = open_desk(order)
    try:
        number = _ask(desk, "find_customer", name=order.customer).split()[1]
        parts = []
        for quantity, item in order.lines:
            own = _ask(desk, "customer_price", customer=int(number), item=item).split()[1]
            listed = _ask(desk, "list_price", item=item).split()[1]
            _require(task, own != listed, f"the customer's price of {item} is the list price {listed}")
            parts.append(f"{quantity}*{listed if order.at_list else own}")
        total = int(_ask(desk, "calculate", expression="+".join(parts)))
    finally:
        desk.close()
    _require(task, total == order.total(), f"the tools come to {total}, the content to {order.total()}")
    _require(task, total not in order.careless_totals(), f"the right total {total} is a careless one too")
    _require(task, task.content == order.content(), "the content is not in canonical form")
    for _, item in order.lines:
        _require(
            task,
            split_of(order.customer, item) is task.split,
            f"{order.customer} {item} is of the other split",
        )


def _ask(desk: Desk, tool: str, **arguments: str | int) -> str:
    reply = TOOLBOX.run(ToolCall(name=tool, arguments=canonical_json(arguments)), on=desk)
    if reply.error:
        raise EnvironmentSpecError(
            f"tool {tool} refuses {arguments}: {reply.text}; the task's rows don't fit its order"
        )
    return reply.text


def _require(task: Task, holds: bool, fault: str) -> None:  # noqa: FBT001 - reads as an assertion
    if not holds:
        raise EnvironmentSpecError(f"task {task.task_id}: {fault}; draw tasks with the spec")


def _tool_result(tool: str, reply: ToolReply) -> StepResult:
    message = Message(role=Role.TOOL, content=reply.text, name=clip(tool))
    return StepResult(messages=(message,), tool_error=reply.error)
