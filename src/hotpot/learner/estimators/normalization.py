"""Rewards or advantages on a common scale: centred and divided by a deviation, over a group, a batch or the whole run.

Owns the four ways and the running moments. Knows neither tokens nor tensors of a model: an array in, an array out.

``none``     as they are
``group``    (x - mean) / deviation within each group (GRPO, arXiv:2402.03300)
``batch``    the same over all values of the batch (global batch normalisation of REINFORCE++, arXiv:2501.03262)
``running``  the same over all values of the run so far, this batch included (as PPO implementations do,
             arXiv:2006.05990; moments are merged as by Chan, Golub and LeVeque, 1979)

Those of one optimiser step (``minibatch``) are :func:`standardize` over its own values.

The price, under a critic: where all episodes succeed and the critic knows it, what is left is the critic's own error, and
dividing by the deviation of *that* makes it as large as a real difference was before.

Deviations are the population's. Values without a spread (:mod:`hotpot.learner.signal`) become 0.

Invariants: state in, state out, nothing is kept here; masked values change nothing by a bit; |result| is at most the
square root of the number of values whose moments were taken.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hotpot.learner import masked
from hotpot.learner.signal import is_rounding

Normalization = Literal["none", "group", "batch", "running"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Count, mean, sum of squared differences from the mean, smallest and largest of the values seen so far (0 where none)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    lowest: float = 0.0
    highest: float = 0.0

    @property
    def deviation(self) -> float:
        """The population's standard deviation; 0 where nothing was seen."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def merge(self, other: "Moments") -> "Moments":
        """Return the moments of both together."""
        if not self.count or not other.count:
            return other if other.count else self
        count, apart = self.count + other.count, other.mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + apart * (other.count / count),
            squares=self.squares + other.squares + apart * apart * (self.count * (other.count / count)),
            lowest=min(self.lowest, other.lowest),
            highest=max(self.highest, other.highest),
        )

    def apply(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (values - mean) / deviation, float64 ``[n]``; zeros where what was seen differs by no more than rounding."""
        if is_rounding(self.highest - self.lowest, max(abs(self.lowest), abs(self.highest))):
            return np.zeros_like(values)
        return (values - self.mean) / self.deviation


def moments(values: NDArray[np.float64], mask: NDArray[np.bool_]) -> Moments:
    """Return the moments of the unmasked ``values`` float64 ``[n]``; ``mask`` bool ``[n]``."""
    x, kept = torch.from_numpy(values), torch.from_numpy(mask)
    mean = masked.mean(x, kept)
    return Moments(
        count=masked.count(kept),
        mean=float(mean),
        squares=float(masked.total((x - mean).square(), kept)),
        lowest=-float(masked.maximum(-x, kept)),
        highest=float(masked.maximum(x, kept)),
    )


def standardize(values: NDArray[np.float64], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the unmasked ``values`` float64 ``[n]`` on their own scale, 0 under ``mask`` bool ``[n]`` false.

    A value that is not finite stays what it is and counts nowhere.
    """
    kept = mask & np.isfinite(values)
    clean = np.where(kept, values, 0.0)
    out = moments(clean, kept).apply(clean)
    return np.where(kept, out, np.where(mask, values, 0.0))


def normalize(
    values: NDArray[np.float64],
    how: Normalization,
    *,
    groups: NDArray[np.int64],
    counted: NDArray[np.bool_] | None = None,
    state: Moments | None = None,
) -> tuple[NDArray[np.float64], Moments]:
    """Return ``values`` float64 ``[n]`` on the scale ``how`` says, and the running moments after them.

    ``groups`` int64 ``[n]`` numbers each value's group. A value that is not finite does not exist: it stays what it is
    and counts nowhere. ``state``: the running moments before these values; only ``running`` changes them, by those of
    ``counted`` bool ``[n]`` (all by default).
    """
    state = state or Moments()
    if how == "none":
        return values, state
    everything = np.ones(len(values), dtype=np.bool_)
    if how == "batch":
        return standardize(values, everything), state
    if how == "group":
        out = values.copy()
        for group in np.unique(groups):
            inside = groups == group
            out[inside] = standardize(values[inside], everything[inside])
        return out, state
    kept = np.isfinite(values)
    clean = np.where(kept, values, 0.0)
    state = state.merge(moments(clean, kept if counted is None else kept & counted))
    return np.where(kept, state.apply(clean), values), state
