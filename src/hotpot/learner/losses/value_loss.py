"""The value function's loss and how much it explains, as pure functions: tensors in, a typed output out, no model.

Owns the squared error with PPO's clip of how far a value may move in one update (the companion of the ratio's clip; not
in arXiv:1707.06347 itself but in its authors' implementation, described in arXiv:2005.12729, section 3, and
arXiv:2006.05990, section 3.3), and the explained variance. Knows no layout: every array of one input has the same shape.

Weights are those of the policy's loss (:mod:`hotpot.learner.losses.aggregation`), so the losses of a step's passes are added.

Invariant: what stands under the mask changes neither loss, figures nor gradient by a bit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hotpot.learner import masked
from hotpot.learner.signal import is_rounding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueLossInput:
    """Per-token arrays, all of one shape ``[...]``; ``mask`` bool, the others float.

    ``new_values`` carries the gradient. ``old_values`` are those of the critic the update started from, which the
    ``returns`` (what the values are to become, without gradient) were estimated with. ``weights`` as in the policy's loss.
    """

    new_values: Tensor
    old_values: Tensor
    returns: Tensor
    weights: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValueLossOutput:
    """``loss`` is the scalar to differentiate; ``token_losses`` float ``[...]``, detached, unweighted, 0 under the mask.

    ``clipped`` tokens have a loss that no longer depends on the new value.
    """

    loss: Tensor
    token_losses: Tensor
    clipped: int


def value_loss(values: ValueLossInput, *, clip: float) -> ValueLossOutput:
    """Return the value loss.

    Per token ``0.5 * max((new - return)^2, (old + clamp(new - old, -clip, clip) - return)^2)``, then the weighted sum;
    ``clip`` 0 leaves the second term out.
    """
    mask = values.mask
    new = masked.only(values.new_values, mask)
    old = masked.only(values.old_values, mask)
    returns = masked.only(values.returns, mask)
    weights = masked.only(values.weights, mask)
    error = (new - returns).square()
    clipped = torch.zeros_like(mask)
    if clip > 0:
        bounded = (old + (new - old).clamp(-clip, clip) - returns).square()
        clipped = mask & (bounded > error)
        error = torch.maximum(error, bounded)
    token_losses = 0.5 * error
    return ValueLossOutput(
        loss=masked.total(token_losses * weights, mask),
        token_losses=masked.only(token_losses.detach(), mask),
        clipped=masked.count(clipped),
    )


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """Return ``1 - Var(returns - values) / Var(returns)`` over unmasked tokens, arrays float ``[...]``, ``mask`` bool.

    1: the values are the returns up to a constant; 0: as good as any constant; below: worse. None where the returns do
    not vary, so that there is nothing to explain.
    """
    spread = _variance(returns, mask)
    # Returns that are equal up to rounding would be explained by 1 - rounding / rounding.
    if is_rounding(spread**0.5, float(masked.maximum(returns.abs(), mask))):
        return None
    rest = masked.only(returns, mask) - masked.only(values, mask)
    return 1.0 - _variance(rest, mask) / spread


def _variance(values: Tensor, mask: Tensor) -> float:
    centred = masked.only(values, mask).double() - masked.mean(values.double(), mask)
    return float(masked.mean(centred.square(), mask))
