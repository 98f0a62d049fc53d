"""What became of groups, as the difficulty pools hear it: from an update's rows as they are made, or from the lake.

Both ways go through one function, in the order of (update, group), so a run that starts again hears what it heard.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from hotpot.experience import RunReader
from hotpot.learner.order import natural_key
from hotpot.rollout import GroupOutcome, verdict_of
from hotpot.topology.updates.batch import learnable
from hotpot.types import EndReason, GroupRow, Trajectory

_GROUPS = f"""
SELECT g."update", g.group_id, g.task_id, g.env_version, g.reward_version, g.kept, count(*) AS size,
  count(*) FILTER (WHERE t.success) AS num_solved
FROM groups g JOIN trajectories t ON t.group_id = g.group_id
WHERE t.purpose = 'training' AND t.end_reason <> '{EndReason.MAX_SECONDS}'
GROUP BY ALL"""


def update_outcomes(groups: Iterable[GroupRow], collected: Sequence[Trajectory]) -> list[GroupOutcome]:
    """Return what became of the groups of one update; ``collected`` are its trajectories."""
    solved: dict[str, list[bool]] = {}
    for trajectory in learnable(collected):
        solved.setdefault(trajectory.row.group_id, []).append(trajectory.row.success)
    found = [
        {
            "update": group.update,
            "group_id": group.group_id,
            "task_id": group.task_id,
            "env_version": group.env_version,
            "reward_version": group.reward_version,
            "kept": group.kept,
            "size": len(solved[group.group_id]),
            "num_solved": sum(solved[group.group_id]),
        }
        for group in groups
    ]
    return _outcomes(found)


def read_outcomes(reader: RunReader, updates: Collection[int]) -> list[GroupOutcome]:
    """Return what became of the groups of those ``updates`` of a run, in order."""
    wanted = frozenset(updates)
    return _outcomes([row for row in reader.sql(_GROUPS).to_pylist() if row["update"] in wanted])


def _outcomes(found: list[dict[str, Any]]) -> list[GroupOutcome]:
    found.sort(key=lambda row: (row["update"], natural_key(row["group_id"])))
    outcomes = []
    for row in found:
        verdict = verdict_of(num_solved=row["num_solved"], size=row["size"], has_signal=row["kept"])
        if verdict is not None:
            outcomes.append(
                GroupOutcome(
                    task_id=row["task_id"],
                    env_version=row["env_version"],
                    reward_version=row["reward_version"],
                    verdict=verdict,
                )
            )
    return outcomes
