"""When values differ by no more than rounding: the one rule, for groups, batches and running moments alike.

Whoever divides by a spread asks here first. Values without a spread carry no signal: what is made of them is 0, never
rounding blown up to full size.
"""

EQUAL_REWARD_TOLERANCE = 1e-6
"""Values count as equal where their spread is at most this times the largest magnitude, or this itself where magnitudes
are below 1: float32 rounding of equal rewards stays under it, and dividing by a deviation that small would turn rounding
into full-size advantages."""


def is_rounding(spread: float, magnitude: float) -> bool:
    """Return whether ``spread`` >= 0 (largest - smallest, or a deviation) is no more than rounding of values whose largest
    magnitude is ``magnitude``. A spread that is NaN is rounding: nothing may be divided by it."""
    return not spread > EQUAL_REWARD_TOLERANCE * max(1.0, magnitude)
