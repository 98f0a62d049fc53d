"""Whose turn it is, and with how many threads: a pure state machine for each side, and the medians of both.

An iteration of each side comes in turn: one to warm up, some with each thread count, then the rounds that count, with the
count that was fastest. Knows no model and no clock.
"""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

TRIALS = 2
HOPELESS = 2.0
"""A thread count this many times slower than another is given up: where others use the cores, threads wait for each other
so long that trying it again would take most of the run."""


def thread_counts() -> tuple[int, ...]:
    """Return the counts to try: one, and every core up to two."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return (1, 2) if cores > 1 else (1,)


@dataclass(slots=True, kw_only=True)
class Turns:
    """One side's iterations: each thread count in ``counts`` is tried ``trials`` times, ``rounds`` count."""

    counts: Sequence[int]
    rounds: int
    trials: int = TRIALS
    _done: list[tuple[int, float]] = field(default_factory=list)

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

    def take(self, seconds: float) -> None:
        """Hear that the next iteration took ``seconds``."""
        self._done.append((self.threads, seconds))

    @property
    def tried(self) -> dict[int, float]:
        """The least seconds of the trials with each thread count."""
        found: dict[int, float] = {}
        for count, seconds in self._done[1 : 1 + self._num_trials]:
            found[count] = min(seconds, found.get(count, seconds))
        return found

    @property
    def best(self) -> int:
        """The thread count that was fastest; the first, where nothing was tried."""
        return min(self.tried, key=lambda count: self.tried[count], default=self.counts[0])

    @property
    def counted(self) -> list[float]:
        """Seconds of the rounds that count."""
        return [seconds for _, seconds in self._done[1 + self._num_trials :]]

    @property
    def median(self) -> float:
        """Median seconds of an iteration."""
        return statistics.median(self.counted)

    @property
    def _num_trials(self) -> int:
        return self.trials * len(self.counts) if len(self.counts) > 1 else 0


def times_as_fast(ours: Turns, theirs: Turns) -> float:
    """Return how many times as fast ``ours`` is: the median over rounds, each compared with the turn beside it."""
    return statistics.median(b / a for a, b in zip(ours.counted, theirs.counted, strict=True))
