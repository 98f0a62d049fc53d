"""The log-probability of one token of each distribution, and the entropy of all of it, in few passes over the logits.

Owns the derivative, written by hand: the probabilities that the entropy needs anyway are what it is made of. Knows no model.

Invariants: values have the bits of ``log_softmax`` and :func:`hotpot.learner.losses.policy_loss.entropy`; what is saved is
never changed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def picked(logits: Tensor, targets: Tensor, *, spread: bool) -> tuple[Tensor, Tensor]:
    """Return log softmax of ``logits`` float ``[k, V]`` at ``targets`` int64 ``[k]``, and the entropies in nats, float ``[k]`` each.

    The entropies have no gradient, and are 0 unless ``spread``.
    """
    logprobs, entropies = _Picked.apply(logits, targets[:, None], spread)  # type: ignore[no-untyped-call]
    return logprobs, entropies


class _Picked(torch.autograd.Function):
    """d log softmax(z)[t] / dz = onehot(t) - softmax(z)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, spread: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001 - torch's order
        distribution = logits.log_softmax(dim=-1)
        logprobs = distribution.gather(-1, targets)[:, 0]
        entropies = torch.zeros_like(logprobs)
        if spread or ctx.needs_input_grad[0]:
            probabilities = distribution.exp()
            ctx.save_for_backward(probabilities, targets)
        if spread:
            # A probability of 0 contributes 0, and 0 * -infinity would be NaN.
            distribution.clamp_(min=torch.finfo(distribution.dtype).min)
            entropies = distribution.mul_(probabilities).sum(dim=-1).neg_()
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        probabilities, targets = ctx.saved_tensors
        column = given[:, None]
        return (probabilities * -column).scatter_add_(-1, targets, column), None, None
