"""Tokens that another policy sampled than the update starts from: what their ratio is to, and how much they count.

With the recorded log-probabilities as the old ones, the clip holds the policy near the one that *sampled*: a success
that has since become likelier by more than the clip has no gradient left, however rare it still is, and a failure that
has become likelier pushes with an unbounded ratio. So the two roles of the old policy are taken apart (decoupled
objective, "Batch size-invariance for policy optimization", arXiv:2110.00641): the clip is around the policy the update
starts from (*proximal*), and the whole term is multiplied by the importance weight proximal / behaviour, truncated from
above (IMPALA, arXiv:1802.01561) for both signs of the advantage.

Tokens that replay brought back are always taken so. ``learner.decoupled`` extends it to all tokens of an older policy
version (``stale``), or to all tokens: then the weight is the truncated importance of the learner's forward pass over the
sampler's, whatever makes them differ (an engine in another precision, or with other kernels).

Under V-trace the clip of every token is around the policy the update starts from, and nothing is multiplied: its advantage
has the truncated ratio in it (:mod:`hotpot.learner.estimators.vtrace`).

Invariant: a batch without such tokens is computed as if this module were not there.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from hotpot.config.sections import LearnerSection
from hotpot.learner.batches.batches import Batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replayed:
    """The replayed loss tokens of one batch. ``mask`` bool ``[N]``; ``any`` whether there are some."""

    mask: NDArray[np.bool_]
    any: bool

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Return those of ``batch``."""
        flags = [member.sequence.replayed for member in batch.sequences]
        lengths = [len(member.loss_positions) for member in batch.sequences]
        return cls(mask=np.repeat(np.array(flags, dtype=np.bool_), lengths), any=any(flags))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoupled:
    """The loss tokens of one batch whose clip is around the starting policy. ``mask`` bool ``[N]``; ``caps`` float64
    ``[N]``: each one's largest importance; ``any`` whether there are some; ``weighs`` whether their importance multiplies
    what they count (or is in their advantages already)."""

    mask: NDArray[np.bool_]
    caps: NDArray[np.float64]
    any: bool
    weighs: bool = True

    @classmethod
    def of(cls, batch: Batch, settings: LearnerSection, policy_version: int) -> Self:
        """Return those of ``batch`` where the update starts from ``policy_version``."""
        replayed = Replayed.of(batch).mask
        mask = replayed
        if settings.decoupled == "stale":
            mask = replayed | (batch.policy_versions < policy_version)
        elif settings.decoupled == "all" or settings.advantages == "vtrace":
            mask = np.ones_like(replayed)
        caps = np.where(replayed, settings.replayed_ratio_cap, settings.importance_cap)
        return cls(mask=mask, caps=caps, any=bool(mask.any()), weighs=settings.advantages != "vtrace")

    def old(self, recorded: NDArray[np.float64], first: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the old log-probabilities of the ratio, ``[N]``: ``first`` on decoupled tokens, else ``recorded``."""
        return np.where(self.mask, first, recorded) if self.any else recorded


def importance(
    proximal: NDArray[np.float64], behaviour: NDArray[np.float64], caps: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return min(cap, proximal / behaviour) per token from log-probabilities and caps ``[k]``; never overflows."""
    return np.exp(np.minimum(proximal - behaviour, np.log(caps)))
