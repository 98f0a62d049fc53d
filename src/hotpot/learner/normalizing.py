"""Advantages of one optimiser step or one batch to mean 0 and a spread of 1.

Owns what happens where there is no spread to speak of. Knows neither batches nor losses.

Adam already divides by the size of the gradient, so what normalisation adds is mainly that the size of one step's
advantages does not depend on how many of its episodes succeeded. The price: where all succeed and the critic knows it,
what is left is the critic's error, and dividing by *its* spread makes it as large as a real difference was before.
Hence ``floor``: the smallest spread that is divided by.

Invariant: what stands under the mask changes nothing by a bit.
"""

from torch import Tensor

from hotpot.learner import masked


def normalize(advantages: Tensor, mask: Tensor, *, floor: float) -> Tensor:
    """Return ``(advantages - mean) / max(deviation, floor)`` over unmasked tokens, 0 under the mask; float ``[...]``.

    The deviation is the population's. ``floor`` > 0, in units of reward.
    """
    centred = masked.only(advantages - masked.mean(advantages, mask), mask)
    deviation = float(masked.mean(centred.square(), mask)) ** 0.5
    scaled: Tensor = centred / max(deviation, floor)
    return scaled
