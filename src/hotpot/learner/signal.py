"""When values differ by no more than rounding: the one rule, for groups, batches and running moments alike.

Whoever divides by a spread asks here first. Values without a spread carry no signal: what is made of them is 0, never
rounding blown up to full size. The tolerance is the one by which replay knows groups without a signal.
"""

from hotpot.experience.replay.index import EQUAL_REWARD_TOLERANCE


def is_rounding(spread: float, magnitude: float) -> bool:
    """Return whether ``spread`` >= 0 (largest - smallest, or a deviation) is no more than rounding of values whose largest
    magnitude is ``magnitude``. A spread that is NaN is rounding: nothing may be divided by it."""
    return not spread > EQUAL_REWARD_TOLERANCE * max(1.0, magnitude)
