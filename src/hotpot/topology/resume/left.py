"""What an asynchronous run left under way: groups of which something waits, or was interrupted.

Owns the reading of that from record and ledger. A group is *left* where no trajectory of it was collected for an update and
something may still come of it: finished trajectories that wait (neither collected nor discarded), episodes that were
interrupted, or none begun at all. Everything else of it is settled: given up, cut or discarded. A resume runs what was
interrupted under the next attempts' numbers, and takes what waits as it is.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from hotpot.experience import Ledger, RunReader, read_trajectories
from hotpot.rollout import NOTHING, Past
from hotpot.topology.resume.position import INTERRUPTIONS, next_attempts
from hotpot.topology.resume.waiting import COLLECTED
from hotpot.types import Purpose

_GROUPS = f"""
SELECT a.group_id, a.episode_id, a.attempt_id, a.state, a.reason,
       t.trajectory_id IS NOT NULL AND c.trajectory_id IS NOT NULL AS collected,
       t.trajectory_id IS NOT NULL AND d.trajectory_id IS NOT NULL AS discarded
FROM attempts a
LEFT JOIN trajectories t ON t.attempt_id = a.attempt_id
LEFT JOIN (SELECT DISTINCT trajectory_id FROM ({COLLECTED})) c ON c.trajectory_id = t.trajectory_id
LEFT JOIN discards d ON d.trajectory_id = t.trajectory_id
WHERE a.purpose = '{Purpose.TRAINING.value}' AND regexp_full_match(a.attempt_id, '[0-9]+[.][0-9]+[.][0-9]+')
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Left:
    """The ``issues`` whose groups are left, ascending; ``past`` says what of them is settled, and ``chosen`` environment and
    index of their tasks, where the record tells."""

    issues: tuple[int, ...] = ()
    past: Past = NOTHING
    chosen: Mapping[int, tuple[str, int]] = field(default_factory=dict)


NOTHING_LEFT = Left()
"""What a new run takes up."""


def read_left(reader: RunReader, ledger: Ledger) -> Left:
    """Return what is left of the run, whose record was recovered."""
    rows = reader.sql(_GROUPS).to_pylist()
    closed = {row["group_id"] for row in rows if row["collected"]}
    waiting: dict[str, str] = {}
    lost, open_groups, seen = set(), set(), set()
    for row in rows:
        name = row["group_id"]
        seen.add(name)
        if name in closed or row["state"] == "failed":
            continue
        if row["state"] == "finished" and not row["discarded"]:
            waiting[row["attempt_id"]] = row["episode_id"]
            open_groups.add(name)
        elif row["state"] == "finished" or row["reason"] not in INTERRUPTIONS:
            lost.add(row["episode_id"])
        else:
            open_groups.add(name)
    issues = [
        issue
        for issue in range(ledger.mark("issue") + 1)
        if f"g{issue}" in open_groups or f"g{issue}" not in seen
    ]
    trajectories = read_trajectories(reader, "attempt_id IN (SELECT unnest(?))", [list(waiting)])
    brought: dict[str, list[object]] = {}
    for trajectory in sorted(trajectories, key=lambda one: one.row.finished_us):
        brought.setdefault(waiting[trajectory.row.attempt_id], []).append(trajectory)
    wanted = {f"g{issue}" for issue in issues}
    past = Past(
        finished=brought,  # type: ignore[arg-type]
        lost=frozenset(lost),
        next_attempts=next_attempts([row for row in rows if row["group_id"] in wanted]),
    )
    return Left(issues=tuple(issues), past=past, chosen=_chosen(reader, set(issues)))


def _chosen(reader: RunReader, issues: set[int]) -> dict[int, tuple[str, int]]:
    """Return environment and index of the tasks of ``issues`` that events tell of."""
    told = reader.table("events", ["detail"], where="kind = 'tasks_chosen'")["detail"].to_pylist()
    choices = [choice for detail in told for choice in json.loads(detail or "{}")["tasks"]]
    return {
        choice["issue"]: (choice["environment"], choice["index"])
        for choice in choices
        if choice["issue"] in issues
    }
