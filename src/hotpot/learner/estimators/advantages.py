"""Group-relative advantages: how much better a trajectory did than the others that tried the same task.

Owns the baseline and the decision which groups carry signal. Knows rewards and ids only: no tokens, no tensors.
Groups are formed by id, never by position, so order and interleaving of the members change nothing.

``group_mean``        reward - mean of the group (Dr. GRPO, arXiv:2503.20783)
``group_normalized``  the same, divided by the group's standard deviation (GRPO, arXiv:2402.03300)
``rloo``              reward - mean of the *other* members: n / (n - 1) times group_mean (RLOO, arXiv:2402.14740)
``reinforce_pp``      reward, to be normalised over the batch's loss tokens (REINFORCE++, arXiv:2501.03262); no group

The deviation is the population's (divided by n): the group is all there is, not a sample from which another group's
spread is to be guessed. It keeps the mean square of a group's advantages at exactly 1 whatever its size, and it is the
figure the ``groups`` table holds.

Invariants: the advantages of a kept group sum to 0 (under ``reinforce_pp`` they do not); a group that is not kept has
advantage 0 everywhere and a reason.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hotpot.errors import LearnerError
from hotpot.learner.order import natural_key
from hotpot.learner.signal import is_rounding

Baseline = Literal["group_mean", "group_normalized", "rloo", "reinforce_pp"]

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
    """Advantage of every trajectory by its id, and the groups in natural order of their ids.

    ``to_go`` by (trajectory id, segment), float64 ``[k]``: what is added to it at each action token of the segment.
    """

    by_trajectory: Mapping[str, float]
    groups: tuple[GroupStatistics, ...]
    to_go: Mapping[tuple[str, int], NDArray[np.float64]] = field(default_factory=dict)

    @property
    def kept(self) -> frozenset[str]:
        """Ids of the groups that enter the loss."""
        return frozenset(group.group_id for group in self.groups if group.kept)


def group_advantages(
    members: Sequence[Member],
    baseline: Baseline,
    *,
    penalties: Mapping[str, float] | None = None,
    scores: Mapping[str, float] | None = None,
    to_go: Mapping[tuple[str, int], NDArray[np.float64]] | None = None,
) -> Advantages:
    """Return each member's advantage.

    ``penalties`` by trajectory id are taken off its reward before it is compared (a KL divergence in the reward).
    ``scores`` by trajectory id stand for reward minus penalty, where that was put on another scale: whether a group has
    signal is judged before the scaling. ``to_go``: terms of single tokens (see :class:`Advantages`), where there are some.
    Statistics are of the rewards themselves.

    Raises :class:`LearnerError` where a trajectory is given twice.
    """
    groups = _by_group(members)
    taken = penalties or {}
    judged = {m.trajectory_id: m.reward - taken.get(m.trajectory_id, 0.0) for m in members}
    used = judged if scores is None else scores
    # Without groups it is the whole batch that must have a spread, if tokens have no terms of their own.
    whole = _reason([value for value in judged.values() if math.isfinite(value)]) if not to_go else ""
    by_trajectory: dict[str, float] = {}
    statistics = []
    for group, ordered in groups.items():
        names = [member.trajectory_id for member in ordered]
        reason = _reason([judged[name] for name in names])
        if baseline == "reinforce_pp" and reason != NON_FINITE_REWARD:
            reason = whole
        statistics.append(_statistics(group, [member.reward for member in ordered], reason))
        values = _advantages([used[name] for name in names], baseline) if not reason else [0.0] * len(names)
        by_trajectory |= zip(names, values, strict=True)
    return Advantages(by_trajectory=by_trajectory, groups=tuple(statistics), to_go=to_go or {})


def _by_group(members: Sequence[Member]) -> dict[str, list[Member]]:
    """Return the groups in natural order of their ids, and so their members: sums depend on order in the last bit, and a
    fixed one keeps them independent of arrival."""
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
    return {
        group: sorted(groups[group], key=lambda member: natural_key(member.trajectory_id))
        for group in sorted(groups, key=natural_key)
    }


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


def _reason(values: Sequence[float]) -> str:
    """Return why ``values`` carry no signal between them, or nothing."""
    if not all(math.isfinite(value) for value in values):
        return NON_FINITE_REWARD
    if len(values) < 2:
        return SINGLE_MEMBER
    if is_rounding(max(values) - min(values), max(abs(value) for value in values)):
        return EQUAL_REWARDS
    return ""


def _mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and population standard deviation; NaN where a value is not finite."""
    if not all(math.isfinite(value) for value in values):
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def _statistics(group_id: str, rewards: Sequence[float], reason: str) -> GroupStatistics:
    mean, std = _mean_and_deviation(rewards)
    return GroupStatistics(
        group_id=group_id, size=len(rewards), reward_mean=mean, reward_std=std, kept=not reason, reason=reason
    )


def _advantages(values: Sequence[float], baseline: Baseline) -> list[float]:
    """Return the advantages of one group with signal."""
    if baseline == "reinforce_pp":
        return list(values)
    mean, std = _mean_and_deviation(values)
    if baseline == "group_normalized":
        return [(value - mean) / std for value in values]
    if baseline == "rloo":
        return [(value - mean) * (len(values) / (len(values) - 1)) for value in values]
    return [value - mean for value in values]
