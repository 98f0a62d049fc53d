"""The loss as pure functions: a typed input in, a typed output out, no model and no optimiser.

Owns the clipped policy gradient (PPO, arXiv:1707.06347, with a bound of its own on each side as in DAPO,
arXiv:2503.14476), the k3 estimator of a KL divergence (Schulman, "Approximating KL divergence", 2020) and the two ways
to average over tokens. Knows nothing of layouts: every array of one input has the same shape, whatever it is.

Aggregation is a weight per token that sums to 1 over an optimiser step, so a step cut into any number of passes gives
the same gradient: the passes' losses are added, never averaged.

Invariants: what stands under the mask changes neither loss, statistics nor gradient by a bit; with new == old the
ratio is exactly 1.
"""

from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor

from hotpot.learner import masked

Aggregation = Literal["token_mean", "sequence_mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Bounds of the ratio (1 - clip_low, 1 + clip_high) and the weight of the KL term (0 is off)."""

    clip_low: float
    clip_high: float
    kl_coefficient: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInput:
    """Per-token arrays, all of one shape ``[...]``; ``mask`` bool, the others float.

    ``new_logprobs`` is the one that carries a gradient. ``old_logprobs`` belong to the policy that sampled (recorded or
    recomputed). ``weights`` come from :func:`token_weights`. ``reference_logprobs`` only where there is a reference.
    """

    new_logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    mask: Tensor
    reference_logprobs: Tensor | None = None


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
    """``loss`` is the scalar to differentiate: ``policy_loss + kl_loss`` (both detached scalars, coefficient applied).

    ``token_losses`` float ``[...]``, detached, unweighted, 0 under the mask: says which token is not finite.
    """

    loss: Tensor
    policy_loss: Tensor
    kl_loss: Tensor
    token_losses: Tensor
    statistics: LossStatistics = field(default_factory=LossStatistics)


def policy_loss(values: LossInput, settings: LossSettings) -> LossOutput:
    """Return the clipped policy-gradient loss with its optional KL term.

    Per token: ``-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) + kl_coefficient * k3``, then the weighted sum.
    """
    mask = values.mask
    new = masked.only(values.new_logprobs, mask)
    old = masked.only(values.old_logprobs, mask)
    advantages = masked.only(values.advantages, mask)
    weights = masked.only(values.weights, mask)
    surrogate, clipped = clipped_surrogate(new - old, advantages, settings)
    divergence = torch.zeros_like(new)
    reference_kl = torch.zeros_like(new)
    if values.reference_logprobs is not None:
        reference_kl = k3(masked.only(values.reference_logprobs, mask) - new)
        if settings.kl_coefficient > 0:
            divergence = settings.kl_coefficient * reference_kl
    policy = masked.total(-surrogate * weights, mask)
    kl_loss = masked.total(divergence * weights, mask)
    with torch.no_grad():
        log_ratio = (new - old).double()
        ratio = log_ratio.exp()
        statistics = LossStatistics(
            num_tokens=masked.count(mask),
            ratio=float(masked.total(ratio, mask)),
            clipped=float(masked.total(clipped.double(), mask)),
            approx_kl=float(masked.total(k3(log_ratio), mask)),
            overlap=float(masked.total(ratio.clamp(max=1.0), mask)),
            reference_kl=float(masked.total(reference_kl.double(), mask)),
        )
    return LossOutput(
        loss=policy + kl_loss,
        policy_loss=policy.detach(),
        kl_loss=kl_loss.detach(),
        token_losses=masked.only((divergence - surrogate).detach(), mask),
        statistics=statistics,
    )


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Return PPO's surrogate per token and, bool, where the clipped value is the one that counts.

    ``log_ratio`` and ``advantages`` float ``[...]``. Where it is clipped the ratio is left out of the computation, so
    that a ratio beyond the largest float has gradient 0 there and not 0 * infinity.
    """
    high, low = 1.0 + settings.clip_high, 1.0 - settings.clip_low
    with torch.no_grad():
        ratio = log_ratio.exp()
        above = (advantages > 0) & (ratio > high)
        below = (advantages < 0) & (ratio < low)
        clipped = above | below
        bound = torch.where(above, log_ratio.new_tensor(high), log_ratio.new_tensor(low))
    inside = torch.where(clipped, 0.0, log_ratio)
    return torch.where(clipped, bound, inside.exp()) * advantages, clipped


def k3(log_ratio: Tensor) -> Tensor:
    """Return Schulman's k3 per token: ``exp(r) - 1 - r`` for r = log p - log q and a token sampled from q.

    Its mean under q is KL(q || p), unbiased; each term is >= 0. KL(old || new): r = new - old. KL(new || reference):
    r = reference - new (with tokens of the old policy, as GRPO takes it). Exact near 0 by ``expm1``.
    """
    return torch.expm1(log_ratio) - log_ratio


def entropy(log_probabilities: Tensor) -> Tensor:
    """Return the entropy in nats of each distribution in ``log_probabilities`` float ``[..., V]``: float ``[...]``.

    A probability of 0 (log-probability -infinity) contributes 0.
    """
    probabilities = log_probabilities.exp()
    return -torch.where(probabilities > 0, probabilities * log_probabilities, 0.0).sum(dim=-1)


def token_weights(mask: Tensor, owners: Tensor, aggregation: Aggregation) -> Tensor:
    """Return the weight of every token of one optimiser step, float64 ``[B, T]``: they sum to 1, 0 under the mask.

    ``mask`` bool ``[B, T]``; ``owners`` int64 ``[B]`` numbers the trajectory each row belongs to, so that the segments of
    one trajectory share its weight. ``token_mean``: every loss token weighs the same. ``sequence_mean``: every
    trajectory weighs the same, and so do the tokens within it.
    """
    per_row = mask.sum(dim=-1)
    if aggregation == "token_mean":
        row_weight = torch.full(per_row.shape, 1.0 / max(masked.count(mask), 1), dtype=torch.float64)
    else:
        per_owner = torch.zeros(int(owners.max()) + 1 if owners.numel() else 0, dtype=torch.int64)
        per_owner.index_add_(0, owners, per_row)
        num_owners = max(masked.count(per_owner > 0), 1)
        row_weight = 1.0 / (per_owner[owners].clamp(min=1).double() * num_owners)
    return masked.only(row_weight[:, None].expand(mask.shape), mask)
