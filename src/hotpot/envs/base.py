"""What an environment is: the interface users implement, and the declaration that makes it loadable.

Owns :class:`Environment`, :class:`Demonstrator`, :class:`EnvironmentSpec` and :class:`BoundEnvironment`. Knows nothing
of models, prompts as tokens, or where episodes run.

Invariants: an environment is single-use (one ``reset``, ``step`` until done, ``close``); the same task, seed and
actions give the same observations; a task is a pure function of parameters, split, seed and index; nothing is shared
between two environments, so any number may run in threads.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from hotpot.errors import EnvironmentSpecError
from hotpot.types import Action, Message, Observation, Split, StepResult, Task
from hotpot.versions import Version

ParamsT = TypeVar("ParamsT", bound=BaseModel)


class Environment(ABC):
    """One episode's world. Single-use; used by one thread at a time, not always the same one."""

    @abstractmethod
    def reset(self, task: Task, seed: int) -> Observation:
        """Set the task up and return the opening messages (user messages, never the system prompt) and the tools.

        ``seed`` feeds whatever is random in the world. Raises EnvironmentFailure where infrastructure breaks.
        """

    @abstractmethod
    def step(self, action: Action) -> StepResult:
        """Carry one action out.

        Whatever the model wrote (a malformed call, a wrong name, a wrong argument) is answered with an error message
        and ``tool_error``; it never raises. Raises EnvironmentFailure where infrastructure breaks.
        """

    def close(self) -> None:
        """Give back what the episode holds. Called once, also after a failure; it may be called without a reset."""
        return


class Demonstrator(ABC):
    """A scripted agent for the warm start, made for one task and one episode. Deterministic given (task, seed)."""

    @abstractmethod
    def act(self, observation: tuple[Message, ...]) -> Action:
        """Return the next action, given the messages that are new since the last one (first: the opening messages)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec(Generic[ParamsT]):
    """Declaration of an environment, found under the entry point group ``hotpot.environments``.

    All callables are top-level functions or classes of ``package``: their files are what the version hashes.
    """

    name: str
    """Name of the environment and of its entry point."""
    declared: str
    """Version the author declares; the fingerprint follows it in the version string."""
    params: type[ParamsT]
    """Closed, frozen pydantic model of the parameters (``extra="forbid"``), each with a default."""
    package: str
    """Import name of the folder (or single module) that defines the environment, its tools and its data."""
    reward_package: str
    """Import name of the package with the reward function; versioned apart, also where it lies inside ``package``."""
    system_prompt: Callable[[ParamsT], str]
    """Return the system prompt."""
    make: Callable[[ParamsT], Environment]
    """Return a fresh environment for one episode."""
    task: Callable[[ParamsT, Split, int, int], Task]
    """Return task ``(params, split, seed, index)``: an endless stream per split, pure in its arguments, O(1)."""
    verify: Callable[[ParamsT, Task], None]
    """Prove without a model that the task's own answer is right; raises EnvironmentSpecError where it isn't."""
    demonstrator: Callable[[ParamsT, Task, int], Demonstrator] | None = None
    """Return a demonstrator for one episode of a task under a seed; None where there is none."""
    held_apart: Callable[[ParamsT, Task], Iterable[str]] | None = None
    """Return the keys of a task that may occur in one split only; None where only whole tasks are kept apart."""
    reward_declared: str = "1"
    """Version the author declares for the reward function."""
    runs_on: tuple[str, ...] = ()
    """Distributions (or the runtime sqlite3) whose exact versions belong to the environment's version."""
    shares: tuple[str, ...] = ()
    """Further packages or modules whose files belong to the environment's version."""
    prompt_file: str | None = None
    """File of the system prompt inside ``package``; left out of the environment's version, as it is the prompt's."""
    reward_params: tuple[str, ...] | None = None
    """Parameters that only the reward function reads: they belong to the reward's version and not to the
    environment's. None: every parameter belongs to both."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_.-]*", self.name):
            raise EnvironmentSpecError(
                f"environment name {self.name!r} must be lower-case letters, digits and _ . - after a letter"
            )
        if self.params.model_config.get("extra") != "forbid" or not self.params.model_config.get("frozen"):
            raise EnvironmentSpecError(
                f"params of environment {self.name!r} must be a closed, frozen model; "
                "set model_config = ConfigDict(extra='forbid', frozen=True)"
            )
        unknown = set(self.reward_params or ()) - self.params.model_fields.keys()
        if unknown:
            raise EnvironmentSpecError(
                f"reward_params of environment {self.name!r} names {sorted(unknown)}, which are no parameters of it"
            )

    def definers(self) -> tuple[object, ...]:
        """Return the functions and classes that make the environment up."""
        optional = (self.demonstrator, self.held_apart)
        required = (self.params, self.system_prompt, self.make, self.task, self.verify)
        return (*required, *(part for part in optional if part is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundEnvironment:
    """An environment with its parameters filled in and its versions computed; what every other part is handed."""

    spec: EnvironmentSpec[Any]
    params: BaseModel
    env_version: Version
    reward_version: Version

    @property
    def name(self) -> str:
        """Name of the environment."""
        return self.spec.name

    def system_prompt(self) -> str:
        """Return the environment's own system prompt."""
        return self.spec.system_prompt(self.params)

    def make(self) -> Environment:
        """Return a fresh environment for one episode."""
        return self.spec.make(self.params)

    def task(self, split: Split, seed: int, index: int) -> Task:
        """Return task number ``index`` (from 0, endless) of the stream ``(split, seed)``."""
        if index < 0:
            raise EnvironmentSpecError(f"task index {index} is negative; streams count from 0")
        return self.spec.task(self.params, split, seed, index)

    def verify(self, task: Task) -> None:
        """Raise EnvironmentSpecError unless the task's own answer is right."""
        self.spec.verify(self.params, task)

    def demonstrator(self, task: Task, seed: int) -> Demonstrator | None:
        """Return a demonstrator for one episode, or None where the environment has none."""
        make = self.spec.demonstrator
        return None if make is None else make(self.params, task, seed)
