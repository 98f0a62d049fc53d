"""The time by which silence is counted. Reads no clock: readings come in."""


class CountedTime:
    """Time as whoever watches has lived through it: no pause between two of its own looks counts for more than
    ``longest_s``, and a clock that is set back counts for nothing.

    A machine that slept, or a loop that was busy elsewhere, has looked at nobody meanwhile; what it did not see is no
    ground to take anybody for dead.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._last_s: float | None = None
        self._counted_s = 0.0
        self.gap_s = 0.0

    def at(self, now_s: float) -> float:
        """Return the counted time at ``now_s`` of a monotonic clock; :attr:`gap_s` is what of the time since the look before
        did not count."""
        passed_s = 0.0 if self._last_s is None else now_s - self._last_s
        counted_s = min(max(passed_s, 0.0), self._longest_s)
        self._last_s, self.gap_s = now_s, max(passed_s - counted_s, 0.0)
        self._counted_s += counted_s
        return self._counted_s
