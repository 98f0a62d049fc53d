"""Time as episodes see it: one clock that never goes back, readable as seconds and as a time of day."""

import time
from collections.abc import Callable


def _monotonic() -> float:
    # Looked up at each call, so that a test that makes the machine's clock jump is obeyed by a clock made before.
    return time.monotonic()


class Clock:
    """A monotonic clock that also tells microseconds since the Unix epoch.

    ``seconds`` is the source; the time of day is read once, when the clock is made, so that a correction of the
    machine's clock can't make a record end before it began.
    """

    def __init__(self, seconds: Callable[[], float] = _monotonic, *, epoch_s: float | None = None) -> None:
        self.now_s = seconds
        self._offset_s = (time.time() if epoch_s is None else epoch_s) - seconds()

    def now_us(self) -> int:
        """Return microseconds since the Unix epoch."""
        return int((self._offset_s + self.now_s()) * 1e6)
