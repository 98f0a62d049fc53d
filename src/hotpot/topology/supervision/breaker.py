"""A circuit breaker for each environment version: what fails again and again is left alone for a while. Pure.

::

            more than breaker_share of the last breaker_attempts attempts failed
    closed ──────────────────────────────────────────────────────────────────────► open ◄─────────┐
      ▲                                                   breaker_rest_s later       │             │ it failed
      │ it ended well                                     one attempt is let through ▼             │
      └────────────────────────────────────────────────────────────────────────── half_open ───────┘

Owns the judgement of which environments of a mix may be begun. Reads no clock (the caller's monotonic one comes in) and
begins nothing. It judges attempts of environments; :mod:`hotpot.experience.gate.breaker` judges records of producers.
Invariants: versions do not touch each other; only the end of the attempt that was let through moves a breaker that is half
open, whatever else ends late; a clock that is set back makes a rest longer by no more than it was set back.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from hotpot.config import SupervisionSection
from hotpot.experience.gate.breaker import Recent, State
from hotpot.rollout.attempts import tally
from hotpot.topology.supervision.supervisor import Event, Stop

TRIALS_BEFORE_STOP = 1
"""Attempts let through that must have failed, of every version, before a run ends for its environments: an outage shorter
than a rest costs a rest, not the run."""

_TOLD = 3
"""Reasons that are told of a version, the commonest first."""

Leave = Literal["any", "one", "none"]
"""How much of a version may be begun: any number of attempts, one for a trial, or nothing."""


@dataclass(slots=True)
class _Version:
    recent: Recent
    state: State = "closed"
    since_s: float = 0.0
    trial: str = ""
    failed_trials: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class EnvironmentBreaker:
    """The breakers of all environment versions of a run, by version; a resumed run begins with closed ones."""

    def __init__(self, settings: SupervisionSection) -> None:
        self._settings = settings
        self._versions: dict[str, _Version] = {}

    def leave(self, version: str, now_s: float) -> Leave:
        """Return how much of ``version`` may be begun now."""
        one = self._of(version)
        if one.state == "closed":
            return "any"
        rested = now_s - one.since_s >= self._settings.rest_s
        return "one" if one.state == "open" and rested else "none"

    def issuable(self, versions: Iterable[str], now_s: float) -> tuple[str, ...]:
        """Return those of ``versions`` of which any number of attempts may be begun."""
        return tuple(version for version in versions if self.leave(version, now_s) == "any")

    def trial(self, version: str, attempt_id: str) -> Event:
        """Hear that attempt ``attempt_id`` was let through (:meth:`leave` said ``one``): its end decides."""
        one = self._of(version)
        one.state, one.trial = "half_open", attempt_id
        return "environment_breaker_half_open", {"env_version": version, "attempt_id": attempt_id}

    def withdrawn(self, version: str, attempt_id: str) -> None:
        """Hear that an attempt ended without saying anything of its environment (cut, or its actor was replaced); where it
        was the one let through, the next may be."""
        one = self._of(version)
        if one.state == "half_open" and one.trial == attempt_id:
            one.state, one.trial = "open", ""

    def ended(self, version: str, attempt_id: str, now_s: float, *, failed: str | None) -> Event | None:
        """Hear the end of an attempt: ``failed`` is the reason where its environment broke, None where it did not.

        Returns the event of a change, if there was one.
        """
        one = self._of(version)
        if failed is not None:
            tally(one.reasons, failed)
        if one.state == "half_open" and one.trial == attempt_id:
            return self._decide(version, one, now_s, well=failed is None)
        if one.state != "closed":
            return None
        one.recent.add(int(failed is None), int(failed is not None))
        # Counted against the whole window also while it fills: so many failures are too many, whatever else comes.
        if one.recent.bad > self._settings.breaker_share * self._settings.breaker_attempts:
            return self._open(version, one, now_s)
        return None

    def verdict(self, versions: Iterable[str]) -> Stop | None:
        """Return the end of the run where no version of the mix can be begun and each failed its trial too."""
        found = {version: self._of(version) for version in versions}
        if not found or any(one.failed_trials < TRIALS_BEFORE_STOP for one in found.values()):
            return None
        told = "; ".join(f"{version}: {self.reasons(version)}" for version in found)
        return Stop(
            culprit="environments",
            reason=f"every environment of the mix fails, also after supervision.breaker_rest_s of rest: {told}",
        )

    def state(self, version: str) -> State:
        """Return how the breaker of ``version`` stands; closed for one never heard of."""
        return self._of(version).state

    def reasons(self, version: str) -> str:
        """Return the commonest reasons of failure since the breaker was closed last, with their counts."""
        found = self._of(version).reasons.most_common(_TOLD)
        return ", ".join(f"{count} x {reason}" for reason, count in found) or "no attempt failed"

    def _of(self, version: str) -> _Version:
        return self._versions.setdefault(version, self._fresh())

    def _fresh(self) -> _Version:
        return _Version(Recent(self._settings.breaker_attempts))

    def _decide(self, version: str, one: _Version, now_s: float, *, well: bool) -> Event:
        if well:
            self._versions[version] = self._fresh()
            return "environment_breaker_closed", {"env_version": version}
        one.failed_trials += 1
        return self._open(version, one, now_s)

    def _open(self, version: str, one: _Version, now_s: float) -> Event:
        one.state, one.since_s, one.trial = "open", now_s, ""
        detail: dict[str, Any] = {
            "env_version": version,
            "failed": one.recent.bad,
            "attempts": len(one.recent),
            "failed_trials": one.failed_trials,
            "reasons": self.reasons(version),
        }
        return "environment_breaker_opened", detail
