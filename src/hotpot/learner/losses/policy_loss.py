"""The loss as pure functions: a typed input in, a typed output out, no model and no optimiser.

Owns the policy gradient and its terms. Knows nothing of layouts: every array of one input has the same shape, whatever
it is.

clip        PPO, arXiv:1707.06347, equation 7, with a bound of its own on each side as in DAPO, arXiv:2503.14476
dual clip   arXiv:1912.09729: with a negative advantage the loss of a token is bounded from above
ratio       of a token, or of its whole sequence: GSPO, arXiv:2507.18071, equations 5 to 7
KL          k1, k2, k3 of Schulman, "Approximating KL divergence", 2020 (see :mod:`hotpot.learner.losses.divergence`)
entropy     a bonus, arXiv:1602.01783, section 4

Aggregation is a weight per token (:mod:`hotpot.learner.losses.aggregation`), so a step cut into any number of passes gives the same
gradient: the passes' losses are added, never averaged.

Invariants: what stands under the mask changes neither loss, statistics nor gradient by a bit; with new == old the
ratio is exactly 1.
"""

from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor

from hotpot.learner import masked
from hotpot.learner.losses.divergence import ESTIMATORS, Estimator, k3

Ratio = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Bounds of the ratio (1 - clip_low, 1 + clip_high) and whose it is; the bound of the dual clip (above 1; 0 is off);
    the weights of KL term and entropy bonus (0 is off)."""

    clip_low: float
    clip_high: float
    kl_coefficient: float = 0.0
    kl_estimator: Estimator = "k3"
    ratio: Ratio = "token"
    clip_dual: float = 0.0
    entropy_coefficient: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInput:
    """Per-token arrays, all of one shape ``[...]``; ``mask`` bool, the others float.

    ``new_logprobs`` is the one that carries a gradient. ``old_logprobs`` belong to the policy that sampled (recorded or
    recomputed). ``weights`` come from :func:`hotpot.learner.losses.aggregation.token_weights`. ``reference_logprobs`` only where there
    is a reference; ``sequences`` int64, the number of each token's sequence, only where the ratio is a sequence's;
    ``entropy`` of the whole distribution, with a gradient, only where there is a bonus.
    """

    new_logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    mask: Tensor
    reference_logprobs: Tensor | None = None
    sequences: Tensor | None = None
    entropy: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossStatistics:
    """Sums over loss tokens, so that passes can be added exactly; divide by ``num_tokens`` for a mean.

    ``ratio`` new/old; ``clipped`` tokens whose ratio was clipped (the clipped value is the one that counts, so the token
    has no policy gradient); ``approx_kl`` the k3 estimate of KL(old || new); ``overlap`` min(1, ratio);
    ``reference_kl`` the k3 estimate of KL(new || reference), 0 without a reference.
    """

    num_tokens: int = 0
    ratio: float = 0.0
    clipped: float = 0.0
    approx_kl: float = 0.0
    overlap: float = 0.0
    reference_kl: float = 0.0

    def __add__(self, other: Self) -> "LossStatistics":
        """Return the sums over both passes together."""
        return LossStatistics(
            num_tokens=self.num_tokens + other.num_tokens,
            ratio=self.ratio + other.ratio,
            clipped=self.clipped + other.clipped,
            approx_kl=self.approx_kl + other.approx_kl,
            overlap=self.overlap + other.overlap,
            reference_kl=self.reference_kl + other.reference_kl,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """``loss`` is the scalar to differentiate: ``policy_loss + kl_loss + entropy_loss`` (detached scalars, coefficients
    applied; the last is negative where there is a bonus).

    ``token_losses`` float ``[...]``, detached, unweighted, 0 under the mask: says which token is not finite.
    """

    loss: Tensor
    policy_loss: Tensor
    kl_loss: Tensor
    token_losses: Tensor
    entropy_loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    statistics: LossStatistics = field(default_factory=LossStatistics)


def policy_loss(values: LossInput, settings: LossSettings) -> LossOutput:
    """Return the clipped policy-gradient loss with its optional KL term and entropy bonus.

    Per token: ``-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) + kl_coefficient * kl - entropy_coefficient * H``,
    then the weighted sum.
    """
    mask = values.mask
    new = masked.only(values.new_logprobs, mask)
    old = masked.only(values.old_logprobs, mask)
    advantages = masked.only(values.advantages, mask)
    weights = masked.only(values.weights, mask)
    log_ratio = new - old
    if settings.ratio == "sequence":
        log_ratio = _per_sequence(log_ratio, values)
    surrogate, clipped = clipped_surrogate(log_ratio, advantages, settings)
    divergence = torch.zeros_like(new)
    reference_kl = torch.zeros_like(new)
    if values.reference_logprobs is not None:
        apart = masked.only(values.reference_logprobs, mask) - new
        reference_kl = k3(apart)
        if settings.kl_coefficient > 0:
            divergence = settings.kl_coefficient * ESTIMATORS[settings.kl_estimator](apart)
    token_losses = divergence - surrogate
    policy = masked.total(-surrogate * weights, mask)
    kl_loss = masked.total(divergence * weights, mask)
    loss = policy + kl_loss
    entropy_loss = torch.zeros((), dtype=torch.float64)
    if settings.entropy_coefficient > 0 and values.entropy is not None:
        bonus = settings.entropy_coefficient * masked.only(values.entropy, mask)
        token_losses = token_losses - bonus
        entropy_loss = masked.total(-bonus * weights, mask)
        loss = loss + entropy_loss
    return LossOutput(
        loss=loss,
        policy_loss=policy.detach(),
        kl_loss=kl_loss.detach(),
        entropy_loss=entropy_loss.detach(),
        token_losses=masked.only(token_losses.detach(), mask),
        statistics=_statistics(log_ratio, reference_kl, clipped, mask),
    )


@torch.no_grad()
def _statistics(log_ratio: Tensor, reference_kl: Tensor, clipped: Tensor, mask: Tensor) -> LossStatistics:
    log_ratio = log_ratio.double()
    ratio = log_ratio.exp()
    return LossStatistics(
        num_tokens=masked.count(mask),
        ratio=float(masked.total(ratio, mask)),
        clipped=float(masked.total(clipped.double(), mask)),
        approx_kl=float(masked.total(k3(log_ratio), mask)),
        overlap=float(masked.total(ratio.clamp(max=1.0), mask)),
        reference_kl=float(masked.total(reference_kl.double(), mask)),
    )


def _per_sequence(log_ratio: Tensor, values: LossInput) -> Tensor:
    """Return, at each token, its sequence's mean log-ratio (GSPO, arXiv:2507.18071, equation 7): with its gradient.

    Raises :class:`ValueError` where the input does not say which sequence a token belongs to.
    """
    if values.sequences is None:
        raise ValueError(
            "the ratio of a sequence needs LossInput.sequences; give the number of each token's sequence"
        )
    return masked.only(masked.group_means(log_ratio, values.mask, values.sequences), values.mask)


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Return PPO's surrogate per token and, bool, where a bound is what counts (the token has no gradient then).

    ``log_ratio`` and ``advantages`` float ``[...]``. Where it is clipped the ratio is left out of the computation, so
    that a ratio beyond the largest float has gradient 0 there and not 0 * infinity. ``clip_dual`` bounds the ratio of a
    token with a negative advantage from above, which without it pushes with any ratio.
    """
    high, low = 1.0 + settings.clip_high, 1.0 - settings.clip_low
    with torch.no_grad():
        ratio = log_ratio.exp()
        above = (advantages > 0) & (ratio > high)
        below = (advantages < 0) & (ratio < low)
        clipped = above | below
        bound = torch.where(above, log_ratio.new_tensor(high), log_ratio.new_tensor(low))
        if settings.clip_dual > 0:
            dual = (advantages < 0) & (ratio > settings.clip_dual)
            clipped = clipped | dual
            bound = torch.where(dual, log_ratio.new_tensor(settings.clip_dual), bound)
    inside = torch.where(clipped, 0.0, log_ratio)
    return torch.where(clipped, bound, inside.exp()) * advantages, clipped


def entropy(log_probabilities: Tensor) -> Tensor:
    """Return the entropy in nats of each distribution in ``log_probabilities`` float ``[..., V]``: float ``[...]``.

    A probability of 0 (log-probability -infinity) contributes 0.
    """
    # 0 * -infinity is NaN, and so would its derivative be; 0 times the most negative number is 0.
    finite = log_probabilities.clamp(min=torch.finfo(log_probabilities.dtype).min)
    return -(log_probabilities.exp() * finite).sum(dim=-1)
