"""The gate's circuit breaker: a pure state machine over what became of each producer's records.

::

            refused share of the last records above the limit
    closed ───────────────────────────────────────────────────► open
      ▲                                                           │ every n-th record is let through for testing
      │   enough tested ones accepted in a row                    ▼
      └─────────────────────────────────────────────────────── half_open ──► open again where one is refused

No clock, no record and no file inside: it counts records, so equal sequences give equal decisions. It starts closed,
in every process anew. Producers do not touch each other.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

State = Literal["closed", "open", "half_open"]
Change = Literal["opened", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    """When it opens and closes.

    Opens once at least ``min_records`` of a producer's last ``window`` records were judged and more than ``share`` of
    them refused; then lets every ``probe_every``-th record through, and closes after ``probes_to_close`` accepted in a
    row.
    """

    window: int
    min_records: int
    share: float
    probe_every: int
    probes_to_close: int


class Recent:
    """The last ``window`` of what was judged, and how many of them were ``bad``."""

    def __init__(self, window: int) -> None:
        self._judged: deque[bool] = deque()
        self._window = window
        self.bad = 0

    def __len__(self) -> int:
        return len(self._judged)

    def add(self, good: int, bad: int) -> None:
        """Hear what became of some; the bad ones count last."""
        self._judged.extend([False] * good + [True] * bad)
        self.bad += bad
        while len(self._judged) > self._window:
            self.bad -= self._judged.popleft()


@dataclass(slots=True, kw_only=True)
class _Producer:
    recent: Recent
    state: State = "closed"
    held: int = 0
    streak: int = 0


class Breaker:
    """One breaker per producer, by name."""

    def __init__(self, policy: BreakerPolicy) -> None:
        self._policy = policy
        self._producers: dict[str, _Producer] = {}

    def decide(self, producer: str) -> bool:
        """Return whether the producer's next record may be judged; where not, it is to be set aside unjudged."""
        one = self._of(producer)
        if one.state == "closed":
            return True
        one.held += 1
        if one.held % self._policy.probe_every:
            return False
        one.state = "half_open"
        return True

    def observe(self, producer: str, accepted: int, refused: int) -> Change | None:
        """Hear what became of judged records; return the change, if there was one. The refused count last."""
        one, before = self._of(producer), self._of(producer).state
        if before == "closed":
            one.recent.add(accepted, refused)
            if self._jumped(one):
                one.state, one.held, one.streak = "open", 0, 0
                return "opened"
            return None
        one.streak = 0 if refused else one.streak + accepted
        if refused:
            one.state = "open"
        elif one.streak >= self._policy.probes_to_close:
            self._producers[producer] = self._fresh()
            return "closed"
        return None

    def state(self, producer: str) -> State:
        """Return the producer's state; closed for one never heard of."""
        return self._producers[producer].state if producer in self._producers else "closed"

    def producers(self) -> tuple[str, ...]:
        """Return every producer that was asked about or heard of, in order of appearance."""
        return tuple(self._producers)

    def open_producers(self) -> tuple[str, ...]:
        """Return the producers whose breaker is open or half open."""
        return tuple(name for name, one in self._producers.items() if one.state != "closed")

    def _of(self, producer: str) -> _Producer:
        return self._producers.setdefault(producer, self._fresh())

    def _fresh(self) -> _Producer:
        return _Producer(recent=Recent(self._policy.window))

    def _jumped(self, one: _Producer) -> bool:
        judged = len(one.recent)
        return judged >= self._policy.min_records and one.recent.bad > self._policy.share * judged
