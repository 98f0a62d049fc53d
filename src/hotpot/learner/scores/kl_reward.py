"""How far the sampled tokens are from the reference, for a reward that pays for it (RLHF, arXiv:2203.02155, equation 2).

Owns the reference's pass over what was collected, before advantages are estimated. KL(sampling policy || reference) is
estimated at every sampled token from the *recorded* log-probability and the reference's own.

Where the sampler filtered its distribution (``old_logprobs = "recomputed"``) both are the raw models' at temperature 1, as
in :meth:`hotpot.learner.update.steps.UpdateSteps.agreement`. What the reference said is kept: the update measures its
distance from the reference with it, where the temperature is its own, and need not ask again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hotpot.config.sections import LearnerSection
from hotpot.experience.sequences.segments import TrainingSequence
from hotpot.learner.batches.batches import Batch, BatchSequence, gather, make_member, order_sequences
from hotpot.learner.batches.budget import PassBudget
from hotpot.learner.batches.passes import cut
from hotpot.learner.losses.divergence import ESTIMATORS
from hotpot.learner.scores.reference import reference_logprobs
from hotpot.models import Policy

Divergences = Mapping[tuple[str, int], NDArray[np.float64]]
"""By (trajectory id, segment), in order: a value at each action token in nats, the KL estimate as a rule, float64 ``[k]``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """The ``divergences``, and by the same keys the reference's ``logprobs`` at the training temperature, float64 ``[k]``;
    None where it was asked at another."""

    divergences: Divergences
    logprobs: Divergences | None

    def of(self, batch: Batch) -> NDArray[np.float64] | None:
        """Return the reference's log-probabilities of the loss tokens of ``batch``, float64 ``[N]``; None where it has to be
        asked again, as behind a cut, where it sees less."""
        if self.logprobs is None or not batch.whole_context.all():
            return None
        parts = [self.logprobs[m.sequence.trajectory_id, m.sequence.segment] for m in batch.sequences]
        if any(len(part) != len(m.loss_positions) for part, m in zip(parts, batch.sequences, strict=True)):
            return None
        return np.concatenate(parts) if parts else np.zeros(0)


def compare(
    reference: Policy,
    sequences: Sequence[TrainingSequence],
    settings: LearnerSection,
    temperature: float,
    budget: PassBudget,
) -> Compared:
    """Return the comparison of all whole ``sequences`` that have loss tokens, from passes as large as ``budget`` allows."""
    members: list[BatchSequence] = []
    for sequence in order_sequences(sequences):
        if sequence.loss_mask.any():
            start = members[-1].stop if members else 0
            members.append(make_member(sequence, advantage=0.0, owner=len(members), start=start))
    raw = settings.old_logprobs == "recomputed"
    sampled = gather(
        [
            (m.sequence.model_logprobs if raw else m.sequence.behaviour_logprobs, m.loss_positions)
            for m in members
        ],
        np.float64,
    )
    referred = budget.attempt(
        lambda tokens: reference_logprobs(
            reference,
            cut(members, max_tokens=tokens, packing=settings.packing, share=reference.caches),
            len(sampled),
            temperature=1.0 if raw else temperature,
        ),
        stage="divergences",
        sequences=[member.sequence for member in members],
        tokens=settings.micro_batch_tokens,
    )
    apart = ESTIMATORS[settings.kl_estimator](torch.from_numpy(referred - sampled)).numpy()

    def by_segment(values: NDArray[np.float64]) -> Divergences:
        return {(m.sequence.trajectory_id, m.sequence.segment): values[m.start : m.stop] for m in members}

    asked_alike = not raw or temperature == 1.0
    return Compared(divergences=by_segment(apart), logprobs=by_segment(referred) if asked_alike else None)


def to_go(found: Divergences, coefficient: float) -> Divergences:
    """Return, at each action token, minus ``coefficient`` times what it and all later ones of its trajectory add up to."""
    out: dict[tuple[str, int], NDArray[np.float64]] = {}
    behind: dict[str, float] = {}
    for (trajectory, segment), values in reversed(list(found.items())):
        sums = np.cumsum(values[::-1])[::-1] + behind.get(trajectory, 0.0)
        behind[trajectory] = float(sums[0])
        out[trajectory, segment] = -coefficient * sums
    return out


def totals(found: Divergences, coefficient: float) -> dict[str, float]:
    """Return what each trajectory pays: ``coefficient`` times the sum over all its action tokens."""
    out: dict[str, float] = {}
    for (trajectory, _), values in found.items():
        out[trajectory] = out.get(trajectory, 0.0) + coefficient * float(values.sum())
    return out


def costs(found: Divergences, coefficient: float) -> Divergences:
    """Return what each action token pays for itself: ``coefficient`` times its own."""
    return {key: coefficient * values for key, values in found.items()}
