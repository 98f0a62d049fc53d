"""From rewards to the advantages of a batch, as the recipe says: KL in the reward, scales, baseline.

Owns the order of these steps and what the learner remembers between updates for them. Decides no formula itself.

::

    rewards ─► minus KL ─► reward_normalization ─► baseline ─► tokens ─► advantage_normalization

Under ``reinforce_pp`` the KL is no total of the trajectory: each token pays for itself and those after it
(REINFORCE++, arXiv:2501.03262), and the tokens' advantages are normalised over the batch. Under ``gae`` and ``vtrace`` a
critic stands in for the baseline, and each token pays its KL from what it earned.

Invariants: with every choice at its default advantages are the baseline's by the bit; order of arrival changes nothing;
state in, state out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hotpot.config.sections import LearnerSection
from hotpot.learner.batches.batches import Batch
from hotpot.learner.estimators.advantages import Advantages, Member, compared_with_no_group, group_advantages
from hotpot.learner.estimators.normalization import Moments, normalize, standardize
from hotpot.learner.order import natural_key
from hotpot.learner.scores.kl_reward import Divergences, to_go, totals


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningScales:
    """Moments of the run so far: of rewards (KL taken off) and of loss tokens' advantages."""

    reward: Moments = Moments()
    advantage: Moments = Moments()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Mapping[str, Any]]) -> Self:
        """Return what :meth:`to_dict` was called on."""
        return cls(**{name: Moments(**parts) for name, parts in values.items()})


def shaped_advantages(
    members: Sequence[Member],
    peers: Sequence[Member],
    settings: LearnerSection,
    *,
    divergence: Divergences,
    scales: RunningScales,
) -> tuple[Advantages, RunningScales]:
    """Return the advantages of ``members`` and the scales after them.

    ``peers`` count in their groups' baselines, not in the running scale. ``divergence`` is empty unless the KL is in the
    reward. With a critic nobody is compared: its estimates come later (:mod:`hotpot.learner.batches.states`).
    """
    if settings.advantages == "gae" or settings.advantages == "vtrace":  # noqa: PLR1714 - narrows the type
        return compared_with_no_group(members), scales
    everyone = [*members, *peers]
    by_token = settings.advantages == "reinforce_pp"
    paid = {} if by_token else totals(divergence, settings.kl_coefficient)
    scores = None
    if settings.reward_normalization != "none":
        known = {member.trajectory_id for member in members}
        ordered = sorted(everyone, key=lambda member: natural_key(member.trajectory_id))
        numbers = {group: number for number, group in enumerate(sorted({m.group_id for m in ordered}))}
        values, moments = normalize(
            np.array([m.reward - paid.get(m.trajectory_id, 0.0) for m in ordered], dtype=np.float64),
            settings.reward_normalization,
            groups=np.array([numbers[m.group_id] for m in ordered], dtype=np.int64),
            counted=np.array([m.trajectory_id in known for m in ordered], dtype=np.bool_),
            state=scales.reward,
        )
        scores = dict(zip((m.trajectory_id for m in ordered), values.tolist(), strict=True))
        scales = replace(scales, reward=moments)
    later = to_go(divergence, settings.kl_coefficient) if by_token else {}
    return group_advantages(everyone, settings.advantages, penalties=paid, scores=scores, to_go=later), scales


def shaped_batch(
    batch: Batch, settings: LearnerSection, scales: RunningScales
) -> tuple[Batch, RunningScales]:
    """Return ``batch`` with its tokens' advantages on the scale the recipe says, and the scales after it."""
    how = "batch" if settings.advantages == "reinforce_pp" else settings.advantage_normalization
    if how == "none" or how == "minibatch":  # noqa: PLR1714
        return batch, scales
    numbers = {group: number for number, group in enumerate(dict.fromkeys(_groups(batch)))}
    groups = np.array([numbers[group] for group in _groups(batch)], dtype=np.int64)[batch.sequence_numbers]
    values, moments = normalize(batch.advantages, how, groups=groups, state=scales.advantage)
    return batch.with_advantages(values), replace(scales, advantage=moments)


def step_advantages(batch: Batch, flat: NDArray[np.int64], settings: LearnerSection) -> NDArray[np.float64]:
    """Return the advantages that an optimiser step over the loss tokens ``flat`` int64 ``[k]`` learns with, float64
    ``[N]``: the batch's, or, where the recipe says so, those of its own tokens on their own scale, 0 elsewhere."""
    if settings.advantage_normalization != "minibatch":
        return batch.advantages
    inside = np.zeros(batch.num_loss_tokens, dtype=np.bool_)
    inside[flat] = True
    return standardize(batch.advantages, inside)


def _groups(batch: Batch) -> list[str]:
    return [member.sequence.group_id for member in batch.sequences]
