"""Estimators of a KL divergence from one sampled token (Schulman, "Approximating KL divergence", 2020).

For KL(q || p) and a token sampled from q each is a function of r = log p - log q: float ``[...]`` in, the same out.
KL(old || new): r = new - old. KL(new || reference): r = reference - new, with tokens of the old policy, as GRPO
(arXiv:2402.03300, equation 4) takes it.

``k1``  -r            unbiased, of either sign. In a reward it is the penalty of RLHF (arXiv:2203.02155, equation 2). In a
                      loss its gradient is that of log q alone, 0 on average: it would not pull at all
``k2``  r^2 / 2       biased, >= 0; in a loss its gradient is the unbiased one of KL(q || p) on policy
``k3``  exp(r)-1-r    unbiased, >= 0; in a loss its gradient is that of KL(p || q) on policy
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def k1(log_ratio: Tensor) -> Tensor:
    """Return ``-r`` per token."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Return ``r ** 2 / 2`` per token."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """Return ``exp(r) - 1 - r`` per token; exact near 0 by ``expm1``."""
    return torch.expm1(log_ratio) - log_ratio


ESTIMATORS: Mapping[Estimator, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
