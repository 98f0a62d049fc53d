"""A circuit breaker for each environment version: what fails again and again is left alone for a while. Pure.

::

            more than breaker_share of the last breaker_attempts attempts failed
    closed ──────────────────────────────────────────────────────────────────────► open ◄─────────┐
      ▲                                                   breaker_rest_s later       │             │ it failed
      │ it ended well                                     one attempt is let through ▼             │
      └────────────────────────────────────────────────────────────────────────── half_open ───────┘

    where one actor alone had those failures (others ended well, and fail at most half as often as opens a breaker): it is
    blamed, so that it is replaced, and counts no more; the breaker stays as it is

Owns the judgement of which environments of a mix may be begun, and of which actor is to blame instead. Reads no clock (the caller's monotonic one comes in) and
begins nothing. It judges attempts of environments; :mod:`hotpot.experience.gate.breaker` judges records of producers.
Invariants: versions do not touch each other; only the end of the attempt that was let through moves a breaker that is half
open, whatever else ends late; a clock that is set back makes a rest longer by no more than it was set back.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from hotpot.config import SupervisionSection
from hotpot.experience.gate.breaker import State
from hotpot.topology.supervision.supervisor import Event, Stop

TRIALS_BEFORE_STOP = 1
"""Attempts let through that must have failed, of every version, before a run ends for its environments: an outage shorter
than a rest costs a rest, not the run."""

_REST_OF_SHARE = 0.5
"""Part of breaker_share up to which the attempts of the others may fail where one actor is to blame."""

_TOLD = 3
"""Reasons that are told of a version, the commonest first."""

Leave = Literal["any", "one", "none"]
"""How much of a version may be begun: any number of attempts, one for a trial, or nothing."""


@dataclass(slots=True)
class _Version:
    recent: deque[tuple[str, bool]]
    """The last attempts that ended: by which actor, and whether they failed."""
    state: State = "closed"
    since_s: float = 0.0
    trial: str = ""
    failed_trials: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> int:
        """How many of the last attempts failed."""
        return sum(failed for _, failed in self.recent)


class EnvironmentBreaker:
    """The breakers of all environment versions of a run, by version; a resumed run begins with closed ones. ``blames``: one
    of several actors may be to blame, rather than the environment."""

    def __init__(self, settings: SupervisionSection, *, blames: bool = False) -> None:
        self._settings, self._blames = settings, blames
        self._blamed: set[str] = set()
        self._versions: dict[str, _Version] = {}

    def leave(self, version: str, now_s: float) -> Leave:
        """Return how much of ``version`` may be begun now."""
        one = self._of(version)
        if one.state == "closed":
            return "any"
        rested = now_s - one.since_s >= self._settings.breaker_rest_s
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

    def ended(
        self, version: str, attempt_id: str, now_s: float, *, failed: str | None, actor_id: str = ""
    ) -> Event | None:
        """Hear the end of an attempt that ``actor_id`` ran: ``failed`` is the reason where its environment broke, None where
        it did not.

        Returns the event of a change, if there was one. Its kind is ``actor_blamed`` where the actor is to be replaced.
        """
        if actor_id in self._blamed:
            self.withdrawn(version, attempt_id)
            return None
        one = self._of(version)
        if failed is not None:
            one.reasons[failed] += 1
        one.recent.append((actor_id, failed is not None))
        if one.state == "half_open" and one.trial == attempt_id:
            return self._decide(version, one, now_s, well=failed is None)
        # Counted against the whole window also while it fills: so many failures are too many, whatever else comes.
        too_many = one.failed > self._settings.breaker_share * self._settings.breaker_attempts
        if one.state != "closed" or not too_many:
            return None
        culprit = self._culprit(one)
        return self._open(version, one, now_s) if culprit is None else self._blame(version, one, culprit)

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
        return _Version(deque(maxlen=self._settings.breaker_attempts))

    def _culprit(self, one: _Version) -> str | None:
        """Return the actor whose failures these are; None where they aren't one's, or nobody else showed that it can be done."""
        failed = Counter(actor for actor, failed in one.recent if failed)
        actor = failed.most_common(1)[0][0]
        others = [failed for name, failed in one.recent if name != actor]
        may_fail = _REST_OF_SHARE * self._settings.breaker_share * len(others)
        return actor if self._blames and not all(others) and sum(others) <= may_fail else None

    def _blame(self, version: str, one: _Version, actor: str) -> Event:
        """Count ``actor`` no more, whatever of it still ends."""
        ends = [failed for name, failed in one.recent if name == actor]
        detail = {
            "env_version": version,
            "actor_id": actor,
            "failed": sum(ends),
            "attempts": len(ends),
            "others_failed": one.failed - sum(ends),
            "others_attempts": len(one.recent) - len(ends),
            "reasons": self.reasons(version),
        }
        self._blamed.add(actor)
        for each in self._versions.values():
            kept = [(name, failed) for name, failed in each.recent if name != actor]
            each.recent.clear()
            each.recent.extend(kept)
        one.reasons.clear()
        return "actor_blamed", detail

    def _decide(self, version: str, one: _Version, now_s: float, *, well: bool) -> Event:
        if well:
            self._versions[version] = self._fresh()
            return "environment_breaker_closed", {"env_version": version}
        if (culprit := self._culprit(one)) is not None:
            one.state, one.trial = "open", ""  # it has rested: the next may be let through
            return self._blame(version, one, culprit)
        one.failed_trials += 1
        return self._open(version, one, now_s)

    def _open(self, version: str, one: _Version, now_s: float) -> Event:
        one.state, one.since_s, one.trial = "open", now_s, ""
        detail: dict[str, Any] = {
            "env_version": version,
            "failed": one.failed,
            "attempts": len(one.recent),
            "failed_trials": one.failed_trials,
            "reasons": self.reasons(version),
        }
        return "environment_breaker_opened", detail
