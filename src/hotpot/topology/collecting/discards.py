"""Finished trajectories that nobody learns from: which, why, and how stale they were; and their rows.

Owns the record and the rule how stale a trajectory is. Decides nothing: the queue and the groups do.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hotpot.types import SCHEMA_VERSION, DiscardReason, DiscardRow, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """A trajectory that nobody learns from: why, and how stale it was for the weights ``policy_version`` then."""

    trajectory_id: str
    group_id: str
    reason: DiscardReason
    policy_version: int
    staleness: int


def discards(
    trajectories: Iterable[Trajectory],
    reason: DiscardReason,
    *,
    policy_version: int,
    aliases: Mapping[int, int] | None = None,
) -> tuple[Discard, ...]:
    """Return a :class:`Discard` for each trajectory. ``policy_version`` is the learner's, ``aliases`` as in
    :func:`oldest_version`."""
    return tuple(
        Discard(
            trajectory_id=trajectory.row.trajectory_id,
            group_id=trajectory.row.group_id,
            reason=reason,
            policy_version=policy_version,
            staleness=policy_version - oldest_version(trajectory, aliases),
        )
        for trajectory in trajectories
    )


def oldest_version(trajectory: Trajectory, aliases: Mapping[int, int] | None = None) -> int:
    """Return the oldest policy version that sampled a token of ``trajectory``; of one without tokens, its row's.

    ``aliases``: earlier versions whose weights are served under another number now, and that number.
    """
    sampled = {version for step in trajectory.steps for version in step.span_policy_version}
    versions = sampled or {trajectory.row.policy_version}
    return min((aliases or {}).get(version, version) for version in versions)


def discard_rows(
    found: Iterable[Discard], *, run_id: str, update: int, time_us: int
) -> tuple[DiscardRow, ...]:
    """Return one row of table ``discards`` for each. ``update`` is in progress or to come; ``time_us`` as in all rows."""
    return tuple(
        DiscardRow(
            run_id=run_id,
            trajectory_id=each.trajectory_id,
            group_id=each.group_id,
            reason=each.reason.value,
            update=update,
            policy_version=each.policy_version,
            staleness=each.staleness,
            time_us=time_us,
            schema_version=SCHEMA_VERSION,
        )
        for each in found
    )
