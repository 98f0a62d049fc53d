"""The careless demonstrator of ``order_desk``: the right procedure with three bad habits, right one time in five.

Each habit is drawn once per episode, independently: the list price instead of the customer's (the other way round where
the order says ``at list price``), ``+`` instead of ``*``, and a made-up number instead of a calculation. It reads what it
acts on from the messages, as a model must.
"""

import re
from random import Random

from hotpot.envs.base import Demonstrator
from hotpot.envs.order_desk.params import OrderDeskParams
from hotpot.envs.order_desk.tasks import AT_LIST_PRICE
from hotpot.ids import canonical_json, sha256_hex
from hotpot.types import Action, Message, Task, ToolCall

_ORDER = re.compile(r"order: (?P<customer>\S+) (?P<lines>.+)")


class CarelessDemonstrator(Demonstrator):
    """One episode's demonstrator; its habits and its guess are fixed by (task, seed)."""

    def __init__(self, params: OrderDeskParams, task: Task, seed: int) -> None:
        self._rng = Random(int(sha256_hex(f"demonstrator\n{task.task_id}\n{seed}")[:16], 16))
        self._takes_other_price = self._rng.random() < params.careless_price
        self._adds = self._rng.random() < params.careless_operator
        self._guesses = self._rng.random() < params.careless_guess
        self._customer, self._at_list = "", False
        self._lines: list[tuple[int, str]] = []
        self._prices: list[int] = []
        self._asked = ""

    def act(self, observation: tuple[Message, ...]) -> Action:
        """Return the next action: find the customer, read each line's price, calculate, answer."""
        text = observation[-1].content
        if text.startswith("error:"):
            return Action(answer="0")
        if not self._asked:
            return self._read_order(text)
        if self._asked == "calculate":
            return Action(answer=text)
        if self._asked == "find_customer":
            self._customer = text.removeprefix("customer ")
        else:
            self._prices.append(int(text.split()[1]))
        if len(self._prices) < len(self._lines):
            return self._ask_price(self._lines[len(self._prices)][1])
        if self._guesses:
            return Action(answer=self._guess())
        sign = "+" if self._adds else "*"
        terms = (
            f"{quantity}{sign}{price}" for (quantity, _), price in zip(self._lines, self._prices, strict=True)
        )
        return self._ask("calculate", expression="+".join(terms))

    def _read_order(self, text: str) -> Action:
        match = _ORDER.fullmatch(text)
        if match is None:
            return Action(answer="0")
        self._at_list = text.endswith(AT_LIST_PRICE)
        for line in match["lines"].removesuffix(AT_LIST_PRICE).split(" and "):
            quantity, item = line.split()
            self._lines.append((int(quantity), item))
        return self._ask("find_customer", name=match["customer"])

    def _ask_price(self, item: str) -> Action:
        if self._takes_other_price != self._at_list:
            return self._ask("list_price", item=item)
        return self._ask("customer_price", customer=int(self._customer), item=item)

    def _guess(self) -> str:
        """Return a number with as many digits as the product of what was read."""
        worth = sum(quantity * price for (quantity, _), price in zip(self._lines, self._prices, strict=True))
        low = 10 ** (len(str(worth)) - 1)
        return str(low + int(self._rng.random() * 9 * low))

    def _ask(self, tool: str, **arguments: str | int) -> Action:
        self._asked = tool
        return Action(tool_call=ToolCall(name=tool, arguments=canonical_json(arguments)))
