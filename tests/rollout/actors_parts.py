"""An environment that does what a task or an action tells it to, and actors of every kind over it.

Its actions are answers: a word, or a word and a number (``sleep 0.01``). It keeps a file for each environment that is open,
in the folder that the task names, and hangs until there is a file ``release`` in it.
"""

import asyncio
import ctypes
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from hotpot.config import ActorsSection
from hotpot.envs import BoundEnvironment, Environment, EnvironmentSpec, bind
from hotpot.ids import canonical_json
from hotpot.rollout.actors import Actors, Call, CallKind, InlineActors, ProcessActors, Reply, ThreadActors
from hotpot.types import Action, Message, Observation, Reward, Role, Split, StepResult, Task

LONGEST_S = 60.0
"""Longest time that anything here hangs, whatever goes wrong."""


class UnrulyParams(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    greeting: str = "hello"


class Verbose(StepResult):
    """A subclass, which the boundary refuses."""

    note = "rides along"


class Unruly(Environment):
    def __init__(self, params: UnrulyParams) -> None:
        self._greeting = params.greeting
        self._folder = Path()
        self._mark: Path | None = None
        self._closes = ""

    def reset(self, task: Task, seed: int) -> Observation:
        folder, told, self._closes = task.content.split("|")
        self._folder = Path(folder)
        self._mark = self._folder / f"open-{uuid.uuid4().hex}"
        self._mark.touch()
        self._do(told)
        return Observation(
            messages=(Message(role=Role.USER, content=f"{self._greeting} {seed} é\n\x00"),), tools=()
        )

    def step(self, action: Action) -> StepResult:
        told = action.answer or ""
        if told == "done":
            rewards = (Reward(name="right", value=0.1 + 0.2), Reward(name="steps", value=2))
            return StepResult(messages=(), rewards=rewards, done=True, success=True)
        self._do(told)
        kind = Verbose if told == "subclass" else StepResult
        return kind(messages=(Message(role=Role.TOOL, content=f"did {told}", name="told"),))

    def close(self) -> None:
        if self._mark is not None:
            self._mark.unlink()
        self._do(self._closes)

    def _do(self, told: str) -> None:
        word, _, rest = told.partition(" ")
        DEEDS[word](self._folder, rest)


def hang(folder: Path, _: str) -> None:
    (folder / "hanging").touch()
    until = time.monotonic() + LONGEST_S
    while not (folder / "release").exists() and time.monotonic() < until:
        time.sleep(0.01)


def scream(_folder: Path, _: str) -> None:
    raise OSError("the tool server is down")


def cancel(_folder: Path, _: str) -> None:
    raise asyncio.CancelledError


def hold(_folder: Path, _: str) -> None:
    """Hang in C code that never lets another thread run."""
    ctypes.PyDLL(None).sleep(int(LONGEST_S))


def garble(_folder: Path, _: str) -> None:
    """Write to every file that is open, as a program might that thinks they are its own."""
    for number in range(3, 64):
        try:
            os.write(number, b"garbage" * 100)
        except OSError:
            continue


DEEDS: dict[str, Callable[[Path, str], object]] = {
    "": lambda _folder, _: None,
    "raise": scream,
    "exit": lambda _folder, _: sys.exit(3),
    "cancel": cancel,
    "subclass": lambda _folder, _: None,
    "print": lambda _folder, text: print(text, flush=True),  # noqa: T201 (it is what is tested)
    "sleep": lambda _folder, seconds: time.sleep(float(seconds)),
    "hang": hang,
    "die": lambda _folder, _: os._exit(3),
    "kill": lambda _folder, _: os.kill(os.getpid(), signal.SIGKILL),
    "garble": garble,
    "hold": hold,
}


def _prompt(_params: UnrulyParams) -> str:
    return "obey."


def _task(_params: UnrulyParams, split: Split, _seed: int, index: int) -> Task:
    return Task(env="unruly", split=split, content=canonical_json(index))


def _verify(_params: UnrulyParams, _task: Task) -> None:
    return


UNRULY = EnvironmentSpec(
    name="unruly",
    declared="1",
    params=UnrulyParams,
    package=__name__,
    reward_package=__name__,
    system_prompt=_prompt,
    make=Unruly,
    task=_task,
    verify=_verify,
)


def unruly() -> BoundEnvironment:
    return bind(UNRULY, {})


@dataclass(slots=True)
class Caller:
    """Makes calls of one kind of actors, and sees to it that each is answered once."""

    actors: Actors
    folder: Path

    def open(self, attempt: str = "a0", told: str = "", *, closing: str = "", actor: str = "actor-0") -> None:
        task = Task(env="unruly", split=Split.TRAIN, content=f"{self.folder}|{told}|{closing}")
        self._begin(CallKind.OPEN, attempt, actor, task=task)

    def step(self, attempt: str = "a0", told: str = "", *, actor: str = "actor-0") -> None:
        self._begin(CallKind.STEP, attempt, actor, action=Action(answer=told))

    def close(self, attempt: str = "a0", *, actor: str = "actor-0") -> None:
        self._begin(CallKind.CLOSE, attempt, actor)

    def _begin(self, kind: CallKind, attempt: str, actor: str, **what: object) -> None:
        self.actors.begin(
            Call(kind=kind, attempt_id=attempt, environment="unruly", actor_id=actor, seed=7, **what)  # type: ignore[arg-type]
        )

    def replies(self, count: int = 1) -> list[Reply]:
        """Return the next ``count`` replies; fails where fewer or more come."""
        found: list[Reply] = []
        until = time.monotonic() + LONGEST_S
        while len(found) < count and time.monotonic() < until:
            found += self.actors.ready(1.0)
        assert len(found) == count, found
        return found

    def reply(self) -> Reply:
        return self.replies()[0]

    def failure(self) -> str:
        """Return the reason of the one failure that comes."""
        reply = self.reply()
        assert reply.failure is not None, reply
        return str(reply.failure)

    def num_open(self) -> int:
        return len(list(self.folder.glob("open-*")))

    def hang(self, attempt: str = "a0") -> None:
        """Have the environment hang in a step, and return when it does."""
        self.step(attempt, "hang")
        assert eventually((self.folder / "hanging").exists)

    def release(self) -> None:
        (self.folder / "release").touch()


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + LONGEST_S
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def settings(**changed: object) -> ActorsSection:
    return ActorsSection.model_validate({"actors_per_group": 2, "call_timeout_s": 30.0} | changed)


def make_actors(kind: str, **changed: object) -> Actors:
    if kind == "inline":
        return InlineActors({"unruly": unruly().make}, settings(**changed))
    if kind == "processes":
        return ProcessActors({"unruly": unruly()}, settings(**changed), beat_s=0.1)
    return ThreadActors({"unruly": unruly().make}, settings(**changed))


def calling(kind: str, folder: Path, **changed: object) -> Iterator[Caller]:
    caller = Caller(make_actors(kind, **changed), folder)
    try:
        yield caller
    finally:
        caller.release()
        caller.actors.close()
