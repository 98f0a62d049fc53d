"""What is asked of an actor, and what comes back: one call of an environment at a time for each episode.

Owns the records and the protocol :class:`Actors`. Knows no tokens, no engine, no ledger.

::

    collector ──Call──► actors (inline, threads, processes) ──Reply──► collector
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from hotpot.errors import EnvironmentFailure
from hotpot.types import Action, Observation, StepResult, Task


class CallKind(StrEnum):
    """What an environment is asked for."""

    OPEN = "open"
    """Make it and reset it."""
    STEP = "step"
    CLOSE = "close"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the environment of attempt ``attempt_id``; its calls come in order, each after the reply to the one before
    (but a CLOSE, which may come at any time and has the last word).

    ``environment`` is its name in the mix; ``task`` and ``seed`` go with OPEN, ``action`` with STEP.
    """

    kind: CallKind
    attempt_id: str
    environment: str
    actor_id: str
    task: Task | None = None
    seed: int = 0
    action: Action | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came of a call: exactly one of ``observation`` (OPEN), ``result`` (STEP) and ``failure`` is set; none of them
    for a CLOSE that went well. ``seconds`` the environment took, waiting for an actor apart.

    A failure is an infrastructure's: it raised, hung beyond the deadline, broke its contract, or its actor died.
    """

    kind: CallKind
    attempt_id: str
    seconds: float
    observation: Observation | None = None
    result: StepResult | None = None
    failure: EnvironmentFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorState:
    """How one actor stands. ``progress`` grows with every call that ends; ``calls`` are waiting or under way; ``since_s`` is
    the time (of the run's monotonic clock) since when the oldest one under way is, None where none is. ``broken`` says
    why it takes no calls any more and must be replaced; empty where it takes them. OPENs for a broken one wait for that, and
    ``calls`` is never 0 there."""

    actor_id: str
    actor_group: str
    progress: int
    calls: int
    since_s: float | None
    broken: str = ""


class Actors(Protocol):
    """Whoever calls environments. Nothing here waits but :meth:`ready`, and that no longer than it is told."""

    def begin(self, call: Call) -> None:
        """Take a call; its reply comes by :meth:`ready`, exactly once. After CLOSE only the reply to CLOSE comes."""

    def ready(self, timeout_s: float) -> list[Reply]:
        """Return the replies that are there, in order of their coming; where there is none, wait for one at most
        ``timeout_s`` seconds. Calls beyond their deadline come back as failures."""

    def assign(self, group: str) -> str:
        """Return the actor of ``group`` that the next episode is dealt to."""

    def states(self) -> list[ActorState]:
        """Return how each actor stands."""

    def replace(self, actor_id: str, reason: str) -> str:
        """End an actor, by force where need be, and put a fresh one in its place; return the fresh one's id. Calls that were
        with it come back as failures that name ``reason``."""

    def close(self) -> None:
        """End all actors within a few seconds; what hangs is left behind or killed."""
