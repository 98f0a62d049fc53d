"""How long to wait before a request that a server could not take is sent again.

Owns the arithmetic: full jitter over a doubling ceiling (Brooker, "Exponential backoff and jitter", 2015), so that many
clients refused at once do not come back at once. The random number is given from outside; there is no clock here.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """``retries`` further tries; before the n-th a pause of up to ``first_s`` times 2 to the n, at most ``longest_s``."""

    retries: int
    first_s: float = 0.1
    longest_s: float = 10.0

    def pause_s(self, tries: int, uniform: float, told_s: float | None = None) -> float | None:
        """Return the pause after ``tries`` failed tries, None where there shall be no further one.

        ``uniform`` is a random number in [0, 1). ``told_s`` is what the server asked for (Retry-After); it is kept to
        unless it is longer than ``longest_s``.
        """
        if tries > self.retries:
            return None
        jittered = uniform * min(self.longest_s, self.first_s * 2.0**tries)
        return jittered if told_s is None else min(max(told_s, jittered), self.longest_s)
