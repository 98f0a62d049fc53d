"""The world of ``stock_count``: one shelf, two tools, one answer."""

import json
from random import Random
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from hotpot.envs import Demonstrator, Environment, Toolbox, clip, error_reply
from hotpot.errors import EnvironmentFailure, EnvironmentSpecError, ToolError
from hotpot.ids import canonical_json, sha256_hex
from hotpot.types import Action, Message, Observation, Role, Split, StepResult, Task, ToolCall
from stock_count.reward import judge

ITEMS = {Split.TRAIN: ("bolt", "nut", "screw", "hinge"), Split.HOLDOUT: ("bracket", "dowel")}
"""The items of each split: a hold-out item is never asked for in training."""


class StockParams(BaseModel):
    """Parameters: closed, frozen, each with a default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    most: Annotated[int, Field(ge=10)] = 99
    """Largest number of pieces on the shelf."""


class Shelf:
    """What the tools read. The first docstring line of a tool is what the model is told."""

    def __init__(self, item: str, stock: int, reserved: int) -> None:
        self.item, self.stock, self.reserved = item, stock, reserved

    def on_shelf(self, item: str) -> str:
        """count the pieces of an item

        item: the item's name
        """
        return f"{self._known(item).stock} on the shelf"

    def set_aside(self, item: str) -> str:
        """count the pieces set aside for other customers

        item: the item's name
        """
        return f"{self._known(item).reserved} set aside"

    def _known(self, item: str) -> "Shelf":
        if item != self.item:
            raise ToolError(f"no item {clip(item)}")
        return self


TOOLBOX = Toolbox(Shelf.on_shelf, Shelf.set_aside)


class StockCount(Environment):
    """One episode. Single-use: reset, step until the answer, close."""

    def __init__(self) -> None:
        self._shelf: Shelf | None = None
        self._over = False

    def reset(self, task: Task, seed: int) -> Observation:  # noqa: ARG002 - nothing here is random
        """Fill the shelf and ask."""
        if self._shelf is not None:
            raise EnvironmentFailure("a stock count is single-use; make a fresh one")
        self._shelf = read(task)
        question = Message(role=Role.USER, content=f"how many {self._shelf.item} are free?")
        return Observation(messages=(question,), tools=TOOLBOX.specs)

    def step(self, action: Action) -> StepResult:
        """Judge an answer, run a tool call, refuse anything else with an error message."""
        if self._shelf is None or self._over:
            raise EnvironmentFailure("a step needs a stock count that runs; reset a fresh one")
        if action.answer is not None:
            self._over = True
            rewards = judge(action.answer, self._shelf.stock - self._shelf.reserved)
            return StepResult(messages=(), rewards=rewards, done=True, success=rewards[0].value == 1.0)
        call = action.tool_call
        reply = (
            error_reply(clip(action.malformed or "")) if call is None else TOOLBOX.run(call, on=self._shelf)
        )
        name = "" if call is None else clip(call.name)
        return StepResult(
            messages=(Message(role=Role.TOOL, content=reply.text, name=name),), tool_error=reply.error
        )


class Clerk(Demonstrator):
    """A scripted agent for the warm start: asks both counts, and is careless in one episode of three."""

    def __init__(self, params: StockParams, task: Task, seed: int) -> None:  # noqa: ARG002 - nothing to set
        self._item = read(task).item
        self._careless = Random(f"{task.task_id} {seed}").random() < 1 / 3
        self._seen: list[int] = []

    def act(self, observation: tuple[Message, ...]) -> Action:
        """Return the next action, from what the messages say."""
        words = observation[-1].content.split()
        if words[0].isdigit():
            self._seen.append(int(words[0]))
        if len(self._seen) == 2:
            return Action(answer=str(self._seen[0] - self._seen[1]))
        if self._seen and self._careless:
            return Action(answer=str(self._seen[0]))
        tool = "set_aside" if self._seen else "on_shelf"
        return Action(tool_call=ToolCall(name=tool, arguments=canonical_json({"item": self._item})))


def system_prompt(_params: StockParams) -> str:
    """Return what the model is told before the task."""
    return "answer how many pieces are free: those on the shelf less those set aside."


def make(_params: StockParams) -> StockCount:
    """Return a fresh environment for one episode."""
    return StockCount()


def task(params: StockParams, split: Split, seed: int, index: int) -> Task:
    """Return task ``index`` of the stream ``(split, seed)``: a pure function of its arguments."""
    rng = Random(int(sha256_hex(f"stock_count\n{split.value}\n{seed}\n{index}")[:16], 16))
    items = ITEMS[split]
    stock = 10 + int(rng.random() * (params.most - 9))
    content = {
        "item": items[int(rng.random() * len(items))],
        "stock": stock,
        "reserved": 1 + int(rng.random() * (stock - 1)),
    }
    return Task(env="stock_count", split=split, content=canonical_json(content))


def read(task: Task) -> Shelf:
    """Return the shelf that a task describes."""
    content = json.loads(task.content)
    return Shelf(content["item"], content["stock"], content["reserved"])


def verify(_params: StockParams, task: Task) -> None:
    """Work the answer out through the tools and hand it in: it must be accepted."""
    shelf = read(task)
    answer = int(shelf.on_shelf(shelf.item).split()[0]) - int(shelf.set_aside(shelf.item).split()[0])
    world = StockCount()
    world.reset(task, 0)
    if not world.step(Action(answer=str(answer))).success:
        raise EnvironmentSpecError(f"task {task.task_id}: its own answer {answer} is not accepted")
    if shelf.item not in ITEMS[task.split]:
        raise EnvironmentSpecError(f"task {task.task_id}: {shelf.item} is of the other split")


def held_apart(_params: StockParams, task: Task) -> tuple[str, ...]:
    """Return the keys of a task that may occur in one split only."""
    return (read(task).item,)
