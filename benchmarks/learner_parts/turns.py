"""Whose turn it is, and with how many threads: a pure state machine for each side, and the medians of both.

An iteration of each side comes in turn: one to warm up, some with each thread count, then the rounds that count, with the
count that was fastest. Knows no model. What an iteration took is counted in seconds of
wall time, which is what matters, and of the process's processor time, which other programs beside it change little.
"""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

TRIALS = 2
HOPELESS = 2.0
"""A thread count this many times slower than another is given up: where others use the cores, threads wait for each other
so long that trying it again would take most of the run."""


def thread_counts() -> tuple[int, ...]:
    """Return the counts to try: one, and every core up to two."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return (1, 2) if cores > 1 else (1,)


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds: of wall time, and of processor time on all threads of the process."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Self:
        """Return both clocks as they stand; differences of two such count."""
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, other: "Spent") -> "Spent":
        return Spent(self.wall_s - other.wall_s, self.cpu_s - other.cpu_s)

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


@dataclass(slots=True, kw_only=True)
class Turns:
    """One side's iterations: each thread count in ``counts`` is tried ``trials`` times, ``rounds`` count."""

    counts: Sequence[int]
    rounds: int
    trials: int = TRIALS
    _done: list[tuple[int, Spent]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Iterations in all."""
        return 1 + self._num_trials + self.rounds

    @property
    def threads(self) -> int:
        """Threads of the next iteration. A count that was hopeless is not tried again; the best takes its turn."""
        trial = len(self._done) - 1
        if trial < 0:
            return self.counts[0]
        count = self.counts[trial % len(self.counts)] if trial < self._num_trials else self.best
        hopeless = count in self.tried and self.tried[count] > HOPELESS * self.tried[self.best]
        return self.best if hopeless else count

    def take(self, spent: Spent) -> None:
        """Hear what the next iteration took."""
        self._done.append((self.threads, spent))

    @property
    def tried(self) -> dict[int, float]:
        """The least wall time of the trials with each thread count."""
        found: dict[int, float] = {}
        for count, spent in self._done[1 : 1 + self._num_trials]:
            found[count] = min(spent.wall_s, found.get(count, spent.wall_s))
        return found

    @property
    def best(self) -> int:
        """The thread count that was fastest; the first, where nothing was tried."""
        return min(self.tried, key=lambda count: self.tried[count], default=self.counts[0])

    @property
    def counted(self) -> list[Spent]:
        """What the rounds took that count."""
        return [spent for _, spent in self._done[1 + self._num_trials :]]

    @property
    def median(self) -> float:
        """Median wall time of an iteration, in seconds."""
        return statistics.median(spent.wall_s for spent in self.counted)

    @property
    def _num_trials(self) -> int:
        return self.trials * len(self.counts) if len(self.counts) > 1 else 0


def times_as_fast(ours: Turns, theirs: Turns) -> tuple[float, float]:
    """Return how many times as fast ``ours`` is, by wall time and by processor time.

    The median over rounds, each compared with the turn beside it.
    """
    pairs = list(zip(ours.counted, theirs.counted, strict=True))
    return (
        statistics.median(other.wall_s / own.wall_s for own, other in pairs),
        statistics.median(other.cpu_s / own.cpu_s for own, other in pairs),
    )
