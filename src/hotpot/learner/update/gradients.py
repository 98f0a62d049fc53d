"""The gradient of an optimiser step: which parameters are clipped together, and what norm is told.

Owns the grouping and the norms. Knows no loss, no batch and no optimiser.

The policy's parameters are clipped by one norm, a value head's among them: decoder and head are one network. A separate
critic is clipped on its own: how wrong it is must not shrink the policy's step. The norm that is told, and watched over a
run, is the policy's, unless another is not finite.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from hotpot.learner.scores.critic import Critic
from hotpot.models import Policy


class Gradients:
    """The gradients of what learns in one decoder and its critic, where there is one; each norm is clipped to ``max_norm`` > 0."""

    def __init__(self, decoder: Policy, critic: Critic | None, *, max_norm: float) -> None:
        self._max_norm = max_norm
        policy: list[nn.Parameter] = [
            parameter for parameter in decoder.parameters() if parameter.requires_grad
        ]
        own: list[nn.Parameter] = [] if critic is None else list(critic.parameters())
        alone = critic is not None and critic.decoder is not None
        self._groups = [policy, own] if alone else [policy + own]

    def clip(self) -> float:
        """Clip the gradients that stand in the parameters; return the norm before."""
        return _told([float(nn.utils.clip_grad_norm_(group, self._max_norm)) for group in self._groups])

    def norm_of(self, losses: Iterable[Tensor]) -> float:
        """Return the norm of the gradient of the sum of ``losses`` (scalars), before clipping; what stands in the
        parameters is left alone."""
        parameters = [parameter for group in self._groups for parameter in group]
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for loss in losses:
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            for whole, gradient in zip(total, found, strict=True):
                if gradient is not None:
                    whole += gradient
        ends = [len(self._groups[0]), len(parameters)]
        begins = [0, *ends[:-1]]
        return _told(
            [_norm(total[begin:end]) for begin, end in zip(begins, ends, strict=True) if end > begin]
        )


def _norm(gradients: Sequence[Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients])))


def _told(norms: Sequence[float]) -> float:
    """Return the first norm, unless another is not finite: then that one."""
    return next((norm for norm in norms if not math.isfinite(norm)), norms[0])
