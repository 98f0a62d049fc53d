"""Group-relative advantages: how much better a trajectory did than the others that tried the same task.

Owns the baseline and the decision which groups carry signal. Knows rewards and ids only: no tokens, no tensors.
Groups are formed by id, never by position, so order and interleaving of the members change nothing.

``group_mean``        reward - mean of the group (Dr. GRPO, arXiv:2503.20783)
``group_normalized``  the same, divided by the group's standard deviation (GRPO, arXiv:2402.03300)

The deviation is the population's (divided by n): the group is all there is, not a sample from which another group's
spread is to be guessed. It keeps the mean square of a group's advantages at exactly 1 whatever its size, and it is the
figure the ``groups`` table holds.

Invariants: the advantages of a kept group sum to 0; a group that is not kept has advantage 0 everywhere and a reason.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hotpot.errors import LearnerError
from hotpot.learner.order import natural_key

Baseline = Literal["group_mean", "group_normalized"]

EQUAL_REWARD_TOLERANCE = 1e-6
"""Rewards count as equal where their spread (largest - smallest) is at most this times the largest magnitude, or this
itself where magnitudes are below 1: float32 rounding of equal rewards stays under it, and dividing by a deviation that
small would turn rounding into full-size advantages."""

EQUAL_REWARDS = "equal_rewards"
SINGLE_MEMBER = "single_member"
NON_FINITE_REWARD = "non_finite_reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One trajectory as the baseline sees it. ``reward`` is the trajectory's total."""

    trajectory_id: str
    group_id: str
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """One group: its size, reward mean and population standard deviation, and whether it enters the loss.

    ``reason`` is empty where the group is kept, else one of ``equal_rewards``, ``single_member``,
    ``non_finite_reward``. Mean and deviation are NaN where a reward is not finite.
    """

    group_id: str
    size: int
    reward_mean: float
    reward_std: float
    kept: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Advantage of every trajectory by its id, and the groups in natural order of their ids."""

    by_trajectory: Mapping[str, float]
    groups: tuple[GroupStatistics, ...]

    @property
    def kept(self) -> frozenset[str]:
        """Ids of the groups that enter the loss."""
        return frozenset(group.group_id for group in self.groups if group.kept)


def group_advantages(members: Sequence[Member], baseline: Baseline) -> Advantages:
    """Return each member's advantage within its group.

    Raises :class:`LearnerError` where a trajectory is given twice.
    """
    groups: dict[str, list[Member]] = {}
    seen: set[str] = set()
    for member in members:
        if member.trajectory_id in seen:
            raise LearnerError(
                f"trajectory {member.trajectory_id!r} is given twice; a trajectory counts once in its group's "
                "baseline, so give each one once"
            )
        seen.add(member.trajectory_id)
        groups.setdefault(member.group_id, []).append(member)
    by_trajectory: dict[str, float] = {}
    statistics = []
    for group in sorted(groups, key=natural_key):
        # Sums depend on order in the last bit; a fixed order keeps them independent of arrival.
        ordered = sorted(groups[group], key=lambda member: natural_key(member.trajectory_id))
        summary = _statistics(group, [member.reward for member in ordered])
        statistics.append(summary)
        for member in ordered:
            by_trajectory[member.trajectory_id] = _advantage(member.reward, summary, baseline)
    return Advantages(by_trajectory=by_trajectory, groups=tuple(statistics))


def compared_with_no_group(members: Sequence[Member]) -> Advantages:
    """Return what the groups of ``members`` come to where a critic stands in for the baseline: no advantage, all kept.

    Only a group with a reward that is not finite stays out. Raises as :func:`group_advantages` does.
    """
    found = group_advantages(members, "group_mean")
    groups = tuple(
        group if group.reason == NON_FINITE_REWARD else replace(group, kept=True, reason="")
        for group in found.groups
    )
    return Advantages(by_trajectory=dict.fromkeys(found.by_trajectory, 0.0), groups=groups)


def _statistics(group_id: str, rewards: Sequence[float]) -> GroupStatistics:
    reason = ""
    if not all(math.isfinite(reward) for reward in rewards):
        mean = std = math.nan
        reason = NON_FINITE_REWARD
    else:
        mean = math.fsum(rewards) / len(rewards)
        std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        magnitude = max(1.0, *(abs(reward) for reward in rewards))
        if len(rewards) == 1:
            reason = SINGLE_MEMBER
        elif max(rewards) - min(rewards) <= EQUAL_REWARD_TOLERANCE * magnitude:
            reason = EQUAL_REWARDS
    return GroupStatistics(
        group_id=group_id,
        size=len(rewards),
        reward_mean=mean,
        reward_std=std,
        kept=not reason,
        reason=reason,
    )


def _advantage(reward: float, group: GroupStatistics, baseline: Baseline) -> float:
    if not group.kept:
        return 0.0
    centred = reward - group.reward_mean
    return centred if baseline == "group_mean" else centred / group.reward_std
