"""The changes of versions inside one run as its records tell them, with what changed in the source of the thing.

Owns the questions to the lake; what a change is and how it ranks is :mod:`version_changes`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotpot.errors import UsageError
from hotpot.ids import canonical_json
from hotpot.observability.changes import Difference, between, known_versions
from hotpot.observability.jumps import Estimate, mean_interval
from hotpot.observability.queries import SqlReader, rows
from hotpot.observability.version_changes import (
    KINDS,
    FoldedPublishes,
    GroupPoint,
    UpdateKl,
    VersionChange,
    find_changes,
)

AROUND_UPDATES = 5
"""Updates on each side that ``around`` looks at unless told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedChange:
    """A change and what differs: in the source, parameters and packages of the thing, and in the settings of a resume
    that lies between. ``rank`` counts from 1, the most likely influence."""

    rank: int
    change: VersionChange
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChanges:
    """Every change of a version in training, most likely influence first, and the publishes folded into one line."""

    changes: tuple[ExplainedChange, ...]
    publishes: FoldedPublishes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One update of the curve: reward over the groups it collected, KL, and the ranks of the changes that begin in it."""

    update: int
    reward: Estimate | None
    success_rate: float
    approx_kl: float | None
    reference_kl: float | None
    policy_version: int
    new_policy_version: int
    changes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """The curve in a window of updates, and the changes that begin in it, most likely influence first."""

    update: int
    curve: tuple[CurvePoint, ...]
    changes: tuple[ExplainedChange, ...]


def run_changes(reader: SqlReader) -> RunChanges:
    """Return the changes of the five versions among the run's training trajectories."""
    found, publishes = _found(reader)
    return RunChanges(changes=_explained(reader, found), publishes=publishes)


def around(reader: SqlReader, update: int, *, radius: int = AROUND_UPDATES) -> Around:
    """Return what changed, and the reward curve, from ``radius`` updates before ``update`` to as many after.

    Raises
    ------
    UsageError: the run has no such update, or ``radius`` is negative.
    """
    if radius < 0:
        raise UsageError(f"the window reaches {radius} updates to each side; give 0 or more")
    recorded = {row["update"]: row for row in rows(reader, _UPDATES)}
    if update not in recorded:
        span = f"{min(recorded)} to {max(recorded)}" if recorded else "none yet"
        raise UsageError(f"the run has no update {update}; it has {span}")
    points = _points(reader)
    found, _ = _found(reader, points)
    inside = range(update - radius, update + radius + 1)
    # A change without an update is of groups that the next one will learn from.
    last = max(recorded)
    near = [
        (rank, change)
        for rank, change in enumerate(found, start=1)
        if (last + 1 if change.update is None else change.update) in inside
    ]
    curve = [_curve_point(recorded[number], points, near) for number in sorted(recorded) if number in inside]
    ranks = {rank for rank, _ in near}
    changes = [change for change in _explained(reader, found, ranks) if change.rank in ranks]
    return Around(update=update, curve=tuple(curve), changes=tuple(changes))


def _found(
    reader: SqlReader, points: Sequence[GroupPoint] | None = None
) -> tuple[list[VersionChange], FoldedPublishes | None]:
    kl = {
        row["update"]: UpdateKl(approx_kl=row["approx_kl"], reference_kl=row["reference_kl"])
        for row in rows(reader, _UPDATES)
        if row["optimizer_steps"]
    }
    return find_changes(_points(reader) if points is None else points, kl, _taken_up(reader))


def _points(reader: SqlReader) -> list[GroupPoint]:
    found = []
    for row in rows(reader, _GROUPS):
        versions = {kind: str(row.pop(column)) for kind, column in KINDS.items()}
        found.append(GroupPoint(versions=versions, **row))
    return found


def _taken_up(reader: SqlReader) -> set[str]:
    """Return the policy versions, the first apart, whose weights are not those of the version before nor an update's.

    A resume serves the weights of its checkpoint as a new version; from the last checkpoint they are the same weights.
    """
    found, before = set(), None
    for row in rows(reader, _POLICIES):
        if before is not None and row["origin"] != row["run_id"] and row["checksum"] != before:
            found.add(str(row["version"]))
        before = row["checksum"]
    return found


def _explained(
    reader: SqlReader, found: Sequence[VersionChange], ranks: set[int] | None = None
) -> tuple[ExplainedChange, ...]:
    resumes = rows(reader, "SELECT time_us, detail FROM events WHERE kind = 'resumed' ORDER BY time_us")
    known = known_versions(reader)
    explained = []
    for rank, change in enumerate(found, start=1):
        if ranks is not None and rank not in ranks:
            continue
        settings = [
            difference
            for resume in resumes
            if change.since_us < resume["time_us"] <= change.time_us
            for difference in _settings(json.loads(resume["detail"]).get("changed", {}))
        ]
        differences = (*between(known, change.kind, change.old, change.new), *settings)
        explained.append(ExplainedChange(rank=rank, change=change, differences=differences))
    return tuple(explained)


def _settings(changed: Mapping[str, Sequence[Any]]) -> list[Difference]:
    return [
        Difference(part="recipe", where=name, old=_text(old), new=_text(new))
        for name, (old, new) in changed.items()
        if {} not in (old, new)  # what was put into an empty table, or taken out of it, says all
    ]


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else canonical_json(value)


def _curve_point(
    row: Mapping[str, Any], points: Sequence[GroupPoint], near: Sequence[tuple[int, VersionChange]]
) -> CurvePoint:
    stepped = bool(row["optimizer_steps"])
    return CurvePoint(
        update=row["update"],
        reward=mean_interval([point.reward for point in points if point.update == row["update"]]),
        success_rate=row["success_rate"],
        approx_kl=row["approx_kl"] if stepped else None,
        reference_kl=row["reference_kl"] if stepped else None,
        policy_version=row["policy_version"],
        new_policy_version=row["new_policy_version"],
        changes=tuple(rank for rank, change in near if change.update == row["update"]),
    )


_GROUPS = """
    WITH collected AS (SELECT group_id, min("update") AS "update" FROM groups GROUP BY group_id)
    SELECT t.env_version, t.reward_version, t.prompt_version, t.schema_version,
      min(t.policy_version) AS policy_version, avg(t.reward) AS reward, count(*) AS num_trajectories,
      sum(t.num_steps)::BIGINT AS num_steps, any_value(c."update") AS "update", min(t.started_us) AS started_us
    FROM trajectories t LEFT JOIN collected c USING (group_id)
    WHERE t.purpose = 'training'
    GROUP BY group_id, t.env_version, t.reward_version, t.prompt_version, t.schema_version
    ORDER BY started_us, group_id"""

_UPDATES = """
    SELECT "update", approx_kl, reference_kl, optimizer_steps, success_rate, policy_version, new_policy_version
    FROM updates"""

_POLICIES = """
    SELECT run_id, TRY_CAST(version AS BIGINT) AS version, TRY_CAST(manifest AS JSON)->>'$.checksum' AS checksum,
      coalesce(TRY_CAST(manifest AS JSON)->>'$.origin', run_id) AS origin
    FROM versions WHERE kind = 'policy' ORDER BY 2"""
