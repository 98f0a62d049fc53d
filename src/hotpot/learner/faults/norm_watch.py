"""Whether a gradient norm is out of all proportion to those before it: a pure state machine, no tensor and no clock.

The measure is the median of the last :data:`WINDOW` norms of steps that were taken: one huge norm hardly moves it, and
a level that lasts moves it within half a window. State is those norms alone.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable

WINDOW = 64
"""Steps the median is over."""

MIN_NORMS = 16
"""Steps that must have been taken before any is judged."""


class NormWatch:
    """Judges norms against ``ratio`` times their running median; ``ratio`` 0 judges none."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._norms: deque[float] = deque(maxlen=WINDOW)

    @property
    def norms(self) -> tuple[float, ...]:
        """What the median is over, oldest first."""
        return tuple(self._norms)

    @property
    def median(self) -> float:
        """The running median; NaN while fewer than :data:`MIN_NORMS` steps were taken."""
        return statistics.median(self._norms) if len(self._norms) >= MIN_NORMS else math.nan

    def exploding(self, norm: float) -> bool:
        """Return whether ``norm`` is more than the ratio times the median; it changes nothing."""
        return self._ratio > 0 and norm > self._ratio * self.median

    def observe(self, norm: float) -> None:
        """Take the norm of a step that was taken into the median."""
        self._norms.append(norm)

    def recall(self, norms: Iterable[float]) -> None:
        """Forget what was observed and take up ``norms``, oldest first."""
        self._norms = deque(norms, maxlen=WINDOW)
