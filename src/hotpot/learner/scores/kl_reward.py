"""How far the sampled tokens are from the reference, for a reward that pays for it (RLHF, arXiv:2203.02155, equation 2).

Owns the reference's pass over what was collected, before advantages are estimated. KL(sampling policy || reference) is
estimated at every sampled token from the *recorded* log-probability and the reference's own.

Where the sampler filtered its distribution (``old_logprobs = "recomputed"``) both are the raw models' at temperature 1, as
in :meth:`hotpot.learner.update.steps.UpdateSteps.agreement`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hotpot.config.sections import LearnerSection
from hotpot.experience.sequences.segments import TrainingSequence
from hotpot.learner.batches.batches import BatchSequence, gather, make_member, order_sequences
from hotpot.learner.batches.budget import PassBudget
from hotpot.learner.batches.passes import cut
from hotpot.learner.losses.divergence import ESTIMATORS
from hotpot.learner.scores.reference import reference_logprobs
from hotpot.models import Policy

Divergences = Mapping[tuple[str, int], NDArray[np.float64]]
"""By (trajectory id, segment), in order: the KL estimate at each action token in nats, float64 ``[k]``."""


def divergences(
    reference: Policy,
    sequences: Sequence[TrainingSequence],
    settings: LearnerSection,
    temperature: float,
    budget: PassBudget,
) -> Divergences:
    """Return the estimates for all whole ``sequences`` that have loss tokens, from passes as large as ``budget`` allows."""
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
    return {(m.sequence.trajectory_id, m.sequence.segment): apart[m.start : m.stop] for m in members}


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
