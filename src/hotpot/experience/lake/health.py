"""How archiving goes: a pure state machine over its successes and failures.

Decides what is worth telling (an outage begins, an outage is over: once each, however many tries lie between), and how
long to pause. Holds no thread and no clock of its own; knows no lake.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
_LONGEST_DOUBLING = 16

FAILING = "archive_failing"
"""Kind of the event that the lake began to refuse what is in the log."""

HEALED = "archive_healed"
"""Kind of the event that it takes it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Something to record about archiving, with the time it happened."""

    kind: str
    detail: Mapping[str, str | int | float]
    time_us: int = field(default_factory=lambda: time.time_ns() // 1_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveStatus:
    """``backlog``: sealed log segments that wait, ``archived`` those that went to the lake so far. ``failing_s``: seconds since the
    outage began, 0 without one; ``tries`` that failed since, and the last ``reason``."""

    backlog: int
    archived: int = 0
    failing_s: float = 0.0
    tries: int = 0
    reason: str = ""


class ArchiveHealth:
    """Hears of every try; remembers the outage that is going on."""

    def __init__(self) -> None:
        self.tries = self.archived = 0
        self.cause = ""
        self._since_s = 0.0

    def failed(self, cause: str, waiting: int, now_s: float) -> Told | None:
        """Hear that a try failed for ``cause`` while ``waiting`` log segments wait; return what begins by it."""
        self.tries += 1
        self.cause = cause
        if self.tries > 1:
            return None
        self._since_s = now_s
        return Told(kind=FAILING, detail=MappingProxyType({"reason": cause, "log_segments": waiting}))

    def succeeded(self, waiting: int, now_s: float) -> Told | None:
        """Hear that a log segment went to the lake; return what is over by it."""
        self.archived += 1
        if self.tries == 0:
            return None
        detail: dict[str, str | int | float] = {
            "reason": self.cause,
            "outage_s": round(now_s - self._since_s, 3),
            "tries": self.tries,
            "log_segments": waiting,
        }
        self.tries, self.cause = 0, ""
        return Told(kind=HEALED, detail=MappingProxyType(detail))

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next try: doubling from the first to the longest."""
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(max(self.tries, 1) - 1, _LONGEST_DOUBLING))

    def status(self, backlog: int, now_s: float) -> ArchiveStatus:
        """Return the state as whoever watches sees it."""
        if self.tries == 0:
            return ArchiveStatus(backlog=backlog, archived=self.archived)
        return ArchiveStatus(
            backlog=backlog,
            archived=self.archived,
            failing_s=now_s - self._since_s,
            tries=self.tries,
            reason=self.cause,
        )
