"""Attempts at episodes: what the ledger is told of them, and how many went which way."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from hotpot.experience.log.ledger import Lease
from hotpot.ids import attempt_id, episode_id, group_id
from hotpot.rollout.tasks import EpisodePlan
from hotpot.types import Purpose

_MAX_REASONS = 64
_MAX_TALLIED_CHARS = 200
STOPPED = "the collection was stopped"
"""Reason of an attempt that was given up because whoever collected stopped; nothing is wrong with its episode."""

MAX_REASON_CHARS = 1000
"""Longest reason on the ledger; longer ones are cut."""


class AttemptLog(Protocol):
    """Where attempts are kept; the ledger is one."""

    def lease(self, leases: Sequence[Lease]) -> None:
        """Record attempts about to run."""

    def fail(self, attempt_id: str, reason: str) -> None:
        """End an attempt whose environment broke."""

    def drop(self, attempt_id: str, reason: str) -> None:
        """End an attempt that is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One try at a plan: attempt number ``attempt``, the ``number``-th (from 1) in this collection.

    ``company``: it is run beside others for their bits' sake only, and is no attempt on the ledger.
    """

    plan: EpisodePlan
    attempt: int
    number: int = 1
    company: bool = False

    @property
    def attempt_id(self) -> str:
        """Id of the attempt."""
        plan = self.plan
        return attempt_id(plan.issue, plan.sample, self.attempt, evaluation=plan.evaluation)

    def again(self) -> "Try":
        """Return the try after this one."""
        return replace(self, attempt=self.attempt + 1, number=self.number + 1)

    def lease(self, purpose: Purpose) -> Lease:
        """Return what the ledger is told before it runs."""
        plan = self.plan
        return Lease(
            attempt_id=self.attempt_id,
            episode_id=episode_id(plan.issue, plan.sample, evaluation=plan.evaluation),
            group_id=group_id(plan.issue, evaluation=plan.evaluation),
            task_id=plan.task.task_id,
            purpose=purpose.value,
        )


@dataclass(slots=True)
class RolloutCounts:
    """What a rollout has done since it was made. ``failures`` counts failed tries by reason, ``overrides`` those of them
    that an environment's try to say how the agent is sampled came to, by reason.

    ``engine_steps`` calls of the engine, ``requests_in_engine`` the requests it held, summed over those calls, ``answers``
    what it answered, ``replies`` what actors did.
    """

    started: int = 0
    finished: int = 0
    dropped: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    overrides: Counter[str] = field(default_factory=Counter)
    close_failures: Counter[str] = field(default_factory=Counter)
    redactions: int = 0
    engine_steps: int = 0
    requests_in_engine: int = 0
    answers: int = 0
    replies: int = 0


def readable(reason: str) -> str:
    """Return a reason fit for the ledger: of bounded length, and text that UTF-8 can carry."""
    return reason[:MAX_REASON_CHARS].encode("utf-8", "replace").decode("utf-8")


def tally(counter: Counter[str], reason: str) -> None:
    """Count a reason; rare ones beyond a bound are counted together, so that texts can't fill the memory."""
    reason = reason[:_MAX_TALLIED_CHARS]
    counter[reason if reason in counter or len(counter) < _MAX_REASONS else "(others)"] += 1
