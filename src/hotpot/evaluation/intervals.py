"""Confidence intervals for shares of solved tasks, and for differences of them. Pure arithmetic.

Sources: E. B. Wilson, JASA 22 (1927), 209-212 (score interval); A. Agresti and Y. Min, Statistics in Medicine 24
(2005), 729-740 (paired difference, half an observation added to each cell); R. G. Newcombe, Statistics in Medicine 17
(1998), 873-890, method 10 (difference of independent shares).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

CONFIDENCE = 0.95
"""Level of every interval unless another is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with the ends of its confidence interval."""

    estimate: float
    low: float
    high: float


def wilson(successes: int, trials: int, *, confidence: float = CONFIDENCE) -> Interval:
    """Return the share ``successes / trials`` with Wilson's score interval.

    Raises ValueError unless ``0 <= successes <= trials`` and there is at least one trial.
    """
    if trials <= 0 or not 0 <= successes <= trials:
        raise ValueError(
            f"{successes} successes of {trials} trials are no share; give 0 <= successes <= trials >= 1"
        )
    z = _z(confidence)
    share = successes / trials
    scale = 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return Interval(estimate=share, low=low, high=high)


def paired_difference(
    before: Mapping[str, bool], after: Mapping[str, bool], *, confidence: float = CONFIDENCE
) -> Interval:
    """Return the difference of two success rates on the same tasks, after minus before.

    Verdicts are matched by task id; tasks in only one of the two (an episode failed) are left out. The interval is
    Wald's for matched pairs with half an observation added to each of the four cells; the estimate is the plain
    difference. Raises ValueError where no task is in both.
    """
    common = before.keys() & after.keys()
    if not common:
        raise ValueError("no task is in both evaluations; compare evaluations of the same seed and split")
    count = len(common)
    won = sum(after[task] and not before[task] for task in common)
    lost = sum(before[task] and not after[task] for task in common)
    padded, more, less = count + 2.0, won + 0.5, lost + 0.5
    centre = (more - less) / padded
    half = _z(confidence) * math.sqrt(more + less - (more - less) ** 2 / padded) / padded
    return Interval(estimate=(won - lost) / count, low=max(-1.0, centre - half), high=min(1.0, centre + half))


def independent_difference(
    first: tuple[int, int], second: tuple[int, int], *, confidence: float = CONFIDENCE
) -> Interval:
    """Return the difference of two success rates on different tasks, first minus second, each (successes, trials).

    Newcombe's hybrid score interval. Raises ValueError as :func:`wilson` does.
    """
    a, b = wilson(*first, confidence=confidence), wilson(*second, confidence=confidence)
    difference = a.estimate - b.estimate
    return Interval(
        estimate=difference,
        low=difference - math.hypot(a.estimate - a.low, b.high - b.estimate),
        high=difference + math.hypot(a.high - a.estimate, b.estimate - b.low),
    )


def _z(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; give a level between 0 and 1, such as 0.95")
    return NormalDist().inv_cdf((1 + confidence) / 2)
