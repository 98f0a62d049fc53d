"""Advantages of one optimiser step or one batch to mean 0 and deviation 1.

Owns what happens where there is nothing to normalise. Knows neither batches nor losses.

What it is for: the size of the advantages, and so of the step, does not depend on the unit of the reward. Its price, under a
critic: where all episodes succeed and the critic knows it, what is left is the critic's own error, and dividing by the
deviation of *that* makes it as large as a real difference was before.

Invariant: what stands under the mask changes nothing by a bit.
"""

import torch
from torch import Tensor

from hotpot.learner import masked

EQUAL_TOLERANCE = 1e-6
"""Values count as equal where their deviation is at most this times the largest magnitude, or this itself where magnitudes
are below 1: that is rounding, and dividing by it would turn it into full-size advantages."""


def normalize(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return ``(advantages - mean) / deviation`` over unmasked tokens, 0 under the mask; float ``[...]``.

    The deviation is the population's. All 0 where the values are equal.
    """
    centred = masked.only(advantages - masked.mean(advantages, mask), mask)
    deviation = float(masked.mean(centred.square(), mask)) ** 0.5
    if deviation <= EQUAL_TOLERANCE * max(1.0, float(masked.maximum(advantages.abs(), mask))):
        return torch.zeros_like(centred)
    scaled: Tensor = centred / deviation
    return scaled
