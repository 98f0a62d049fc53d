"""A tiny environment that a tiny policy can play after a second of warm start: for tests of whole loops.

``coin`` asks what a coin shows; ``peek()`` tells; the answer is ``heads`` or ``tails``. The demonstrator peeks and then
says either at random, so half of the episodes succeed and every group is likely to carry signal. With patience it
peeks again and again, and with padding behind what that tells its contexts get full.
"""

from collections.abc import Mapping
from random import Random
from typing import Any

from pydantic import BaseModel, ConfigDict

from hotpot.envs import (
    BoundEnvironment,
    Demonstrator,
    Environment,
    EnvironmentSpec,
    Toolbox,
    bind,
    error_reply,
)
from hotpot.errors import EnvironmentSpecError
from hotpot.ids import canonical_json, sha256_hex
from hotpot.types import Action, Message, Observation, Reward, Role, Split, StepResult, Task, ToolCall

FACES = ("heads", "tails")


class CoinParams(BaseModel):
    """How the coin is asked about, and what a wrong answer is worth."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    question: str = "coin"
    """What the agent is asked; another question makes another version of the environment."""
    wrong: float = 0.0
    """Reward of a wrong answer; a right one gets 1."""
    patience: float = 0.0
    """The demonstrator's chance to peek once more after each peek."""
    padding: int = 0
    """Dots behind what a peek tells."""


class Coin:
    """What the tool looks at."""

    def __init__(self, face: str) -> None:
        self.face = face

    def peek(self) -> str:
        """Look at the coin."""
        return self.face


TOOLBOX = Toolbox(Coin.peek)


class CoinEnvironment(Environment):
    """One coin, one answer."""

    def __init__(self, params: CoinParams) -> None:
        self._coin = Coin("")
        self._question = params.question
        self._wrong = params.wrong
        self._padding = "." * params.padding

    def reset(self, task: Task, seed: int) -> Observation:  # noqa: ARG002 - the task holds all there is
        """Lay the coin down."""
        self._coin = Coin(_face(task))
        return Observation(messages=(Message(role=Role.USER, content=self._question),), tools=TOOLBOX.specs)

    def step(self, action: Action) -> StepResult:
        """Answer a peek, or judge the answer."""
        if action.answer is not None:
            right = action.answer.strip() == self._coin.face
            rewards = (Reward(name="right", value=1.0 if right else self._wrong),)
            return StepResult(messages=(), rewards=rewards, done=True, success=right)
        call = action.tool_call
        reply = error_reply("malformed") if call is None else TOOLBOX.run(call, on=self._coin)
        content = reply.text + self._padding
        message = Message(role=Role.TOOL, content=content, name="" if call is None else call.name[:20])
        return StepResult(messages=(message,), tool_error=reply.error)


class CoinDemonstrator(Demonstrator):
    """Peeks, then says a face at random."""

    def __init__(self, params: CoinParams, task: Task, seed: int) -> None:
        self._rng = Random(f"{task.task_id} {seed}")
        self._patience = params.patience
        self._peeked = False

    def act(self, observation: tuple[Message, ...]) -> Action:  # noqa: ARG002 - it is careless: it does not look
        """Return the next action."""
        if self._peeked and not (self._patience and self._rng.random() < self._patience):
            return Action(answer=self._rng.choice(FACES))
        self._peeked = True
        return Action(tool_call=ToolCall(name="peek", arguments="{}"))


def coin_environment(params: Mapping[str, Any] | None = None) -> BoundEnvironment:
    """Return the bound environment."""
    return bind(SPEC, params)


def _face(task: Task) -> str:
    return FACES[int(sha256_hex(task.content)[:8], 16) % 2]


def _system_prompt(_params: CoinParams) -> str:
    return "say what the coin shows."


def _make(params: CoinParams) -> CoinEnvironment:
    return CoinEnvironment(params)


def _task(_params: CoinParams, split: Split, seed: int, index: int) -> Task:
    return Task(env="coin", split=split, content=canonical_json([split, seed, index]))


def _verify(params: CoinParams, task: Task) -> None:
    environment = CoinEnvironment(params)
    environment.reset(task, 0)
    if not environment.step(Action(answer=_face(task))).success:
        raise EnvironmentSpecError(f"task {task.task_id}: its own answer is not accepted")


SPEC = EnvironmentSpec(
    name="coin",
    declared="1",
    params=CoinParams,
    package=__name__,
    reward_package=__name__,
    reward_params=("wrong",),
    system_prompt=_system_prompt,
    make=_make,
    task=_task,
    verify=_verify,
    demonstrator=CoinDemonstrator,
)
