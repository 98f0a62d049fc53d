"""How large a jump of a curve is at a given place, beside its own trend: pure arithmetic over groups.

The unit is a group (the episodes of one issued task): episodes of one group share the task, so they are no independent
observations; the mean reward of each group is one.

The jump at a place is the coefficient ``d`` of ``reward = a + b * place + d * [under the new version] + noise``, by least
squares over a window of groups around the place: a curve that rises steadily has no jump anywhere. Other places in the
window may get a step of their own in the same fit, so that one change is not charged with another's. Windows lie as far
before as behind where the run allows: the bend of a curve that flattens does then not look like a jump.

The **score** of a jump is its t statistic ``|d| / standard error``, carried over to the normal distribution, so that fits
over few groups are not overrated: the effect in units of its own uncertainty. Noise is taken for independent between groups.

Sources: B. L. Welch, Biometrika 34 (1947), 28-35 (difference of two means); D. L. Wallace, Annals of Mathematical
Statistics 30 (1959), 1121-1130 (t statistics as normal ones, and back; within 2 % of Student's quantile at 95 % from 3
degrees of freedom on, too wide below).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
"""Level of every interval."""

LEAST_WINDOW, LARGEST_WINDOW = 24, 64
"""Fewest and most groups looked at on each side of a change."""

_LEAST_DEGREES = 3
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean, or a difference of means, with the ends of its 95 % interval (None: too few observations for one)."""

    mean: float
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """A jump against the trend, with its 95 % interval and score; ``effect`` is in standard deviations of the noise."""

    size: float
    low: float
    high: float
    effect: float
    score: float


def window_width(num_groups: int) -> int:
    """Return how many groups are looked at on each side of a change: a quarter of the run, within limits."""
    return max(LEAST_WINDOW, min(LARGEST_WINDOW, num_groups // 4))


def window(place: int, count: int, width: int) -> tuple[int, int]:
    """Return begin and end of the window around ``place`` among ``count`` groups: as far before as behind.

    Where one side has fewer than ``width`` groups the other is cut too, but not below ``LEAST_WINDOW``.
    """
    sides = (place, count - place)
    even = max(min(width, *sides), min(width, LEAST_WINDOW))
    return max(0, place - even), min(count, place + even)


def mean_interval(values: Sequence[float]) -> Estimate | None:
    """Return the mean of independent observations with Student's interval; None where there are none."""
    if not len(values):
        return None
    mean, variance = _mean_and_variance(values)
    if len(values) == 1:
        return Estimate(mean=mean, low=None, high=None, count=1)
    half = student(len(values) - 1) * math.sqrt(variance / len(values))
    return Estimate(mean=mean, low=mean - half, high=mean + half, count=len(values))


def difference(before: Sequence[float], after: Sequence[float]) -> Estimate | None:
    """Return mean after minus mean before with Welch's interval; None where either has no observations."""
    if not len(before) or not len(after):
        return None
    (first, one), (second, two) = _mean_and_variance(before), _mean_and_variance(after)
    size, count = second - first, len(before) + len(after)
    if min(len(before), len(after)) < 2:
        return Estimate(mean=size, low=None, high=None, count=count)
    parts = (one / len(before), two / len(after))
    total = sum(parts)
    half = 0.0
    if total > 0:
        degrees = total**2 / (parts[0] ** 2 / (len(before) - 1) + parts[1] ** 2 / (len(after) - 1))
        half = student(degrees) * math.sqrt(total)
    return Estimate(mean=size, low=size - half, high=size + half, count=count)


def jump(values: NDArray[np.float64], new: NDArray[np.bool_], others: Sequence[int] = ()) -> Jump | None:
    """Return the jump of ``values`` where ``new`` says so.

    ``values`` float64 ``[n]`` are the group means of a window in order, ``new`` bool ``[n]`` whether a group was under the
    new version, ``others`` places inside the window at which something else changed (each gets a step of its own). None
    where the groups are too few to tell it from trend and noise, or something else changed at the very same place.
    """
    count = len(values)
    columns = [np.ones(count), np.linspace(-1.0, 1.0, count), new.astype(np.float64)]
    columns += [
        (np.arange(count) >= place).astype(np.float64) for place in sorted(set(others)) if 0 < place < count
    ]
    design = np.column_stack(columns)
    degrees = count - design.shape[1]
    if degrees < _LEAST_DEGREES or np.linalg.matrix_rank(design) < design.shape[1]:
        return None
    inverse = np.linalg.inv(design.T @ design)
    fitted = inverse @ (design.T @ values)
    residuals = values - design @ fitted
    # Rewards that never vary would make any rounding error infinitely significant.
    least = _ROUNDING * max(1.0, float(np.abs(values).max()))
    noise = max(math.sqrt(float(residuals @ residuals) / degrees), least)
    size, error = float(fitted[2]), noise * math.sqrt(float(inverse[2, 2]))
    half = student(degrees) * error
    return Jump(
        size=size, low=size - half, high=size + half, effect=size / noise, score=as_normal(abs(size) / error, degrees)
    )  # fmt: skip


def threshold(num_tests: int) -> float:
    """Return the score that the largest of ``num_tests`` jumps of pure noise passes once in twenty runs (Bonferroni)."""
    return NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / max(1, num_tests))


def as_normal(t: float, degrees: float) -> float:
    """Return the normal quantile as far out as Student's ``t`` (>= 0) with ``degrees`` of freedom (Wallace 1959)."""
    return (8 * degrees + 1) / (8 * degrees + 3) * math.sqrt(degrees * math.log1p(t * t / degrees))


def student(degrees: float) -> float:
    """Return Student's two-sided 95 % quantile, the inverse of :func:`as_normal`."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * (8 * degrees + 3) / (8 * degrees + 1)
    return math.sqrt(degrees * math.expm1(z * z / degrees))


def _mean_and_variance(values: Sequence[float]) -> tuple[float, float]:
    found = np.asarray(values, np.float64)
    return float(found.mean()), float(found.var(ddof=1)) if len(found) > 1 else 0.0
