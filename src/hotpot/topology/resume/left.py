"""What an asynchronous run left under way: groups of which something waits, or was interrupted.

Owns the reading of that from record and ledger. A group is *left* where no trajectory of it was collected for an update and
something may still come of it: finished trajectories that wait (neither collected nor discarded), episodes that were
interrupted, or none begun at all. Everything else of it is settled: given up, cut or discarded. A resume runs what was
interrupted under the next attempts' numbers, and takes what waits as it is.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotpot.experience import Ledger, RunReader, read_trajectories
from hotpot.rollout import NOTHING, Past
from hotpot.topology.resume.position import INTERRUPTIONS, next_attempts
from hotpot.types import Purpose, Trajectory

_COLLECTED = """
SELECT unnest(collected_trajectories) AS trajectory_id FROM updates
UNION ALL SELECT trajectory_id FROM consumptions
UNION ALL SELECT t.trajectory_id FROM trajectories t JOIN groups g USING (group_id)
  JOIN updates u ON u."update" = g."update" WHERE u.learner_settings = ''"""
"""Trajectories that an update has had. Updates of releases that did not name what they collected are known by their groups."""

_GROUPS = f"""
SELECT a.group_id, a.episode_id, a.attempt_id, a.state, a.reason,
       t.trajectory_id IS NOT NULL AND c.trajectory_id IS NOT NULL AS collected,
       t.trajectory_id IS NOT NULL AND d.trajectory_id IS NOT NULL AS discarded
FROM attempts a
LEFT JOIN trajectories t ON t.attempt_id = a.attempt_id
LEFT JOIN (SELECT DISTINCT trajectory_id FROM ({_COLLECTED})) c ON c.trajectory_id = t.trajectory_id
LEFT JOIN discards d ON d.trajectory_id = t.trajectory_id
WHERE a.purpose = '{Purpose.TRAINING.value}' AND regexp_full_match(a.attempt_id, '[0-9]+[.][0-9]+[.][0-9]+')
"""
"""Attempts of the run's own sampler. What was imported, or brought back from quarantine, belongs to no group under way."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Left:
    """The ``issues`` whose groups are left, ascending; ``past`` says what of them is settled, and ``chosen`` environment and
    index of their tasks, where the record tells. ``gone`` waits and is not to be learned from; ``until``: no group of an issue
    below it is gone on with any more.
    """

    issues: tuple[int, ...] = ()
    past: Past = NOTHING
    chosen: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    gone: tuple[Trajectory, ...] = ()
    until: int = 0


NOTHING_LEFT = Left()
"""What a new run takes up."""


def read_left(reader: RunReader, ledger: Ledger, *, leave: bool) -> Left:
    """Return what is left of the run, whose record was recovered; ``leave``: nothing of it is gone on with, from now on."""
    end, until = ledger.mark("issue") + 1, _left_until(reader)
    rows = reader.sql(_GROUPS).to_pylist()
    closed = {row["group_id"] for row in rows if row["collected"]}
    waiting, lost, open_groups = _standing([row for row in rows if row["group_id"] not in closed])
    seen = {row["group_id"] for row in rows}
    issues = [issue for issue in range(until, end) if f"g{issue}" in open_groups or f"g{issue}" not in seen]
    trajectories = read_trajectories(reader, "attempt_id IN (SELECT unnest(?))", [list(waiting)])
    trajectories.sort(key=lambda one: one.row.finished_us)
    if leave:
        return Left(gone=tuple(trajectories), until=end)
    brought: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        brought.setdefault(waiting[trajectory.row.attempt_id], []).append(trajectory)
    wanted = {f"g{issue}" for issue in issues}
    past = Past(
        finished=brought,
        lost=frozenset(lost),
        next_attempts=next_attempts([row for row in rows if row["group_id"] in wanted]),
    )
    return Left(issues=tuple(issues), past=past, chosen=_chosen(reader, set(issues)), until=until)


def _standing(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], set[str], set[str]]:
    """Return the attempts that wait (with their episodes), the episodes that ended for good with nothing, and the groups in
    which something is to come: the last attempt at an episode says.
    """
    last: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        known = last.get(row["episode_id"])
        if known is None or _number(row) >= _number(known):
            last[row["episode_id"]] = row
    waiting: dict[str, str] = {}
    lost, open_groups = set(), set()
    for episode, row in last.items():
        finished = row["state"] == "finished"
        if finished and not row["discarded"]:
            waiting[row["attempt_id"]] = episode
            open_groups.add(row["group_id"])
        elif finished or (row["state"] == "dropped" and row["reason"] not in INTERRUPTIONS):
            lost.add(episode)
        else:
            open_groups.add(row["group_id"])
    return waiting, lost, open_groups


def _number(row: Mapping[str, Any]) -> int:
    return int(row["attempt_id"].rpartition(".")[2])


def _left_until(reader: RunReader) -> int:
    """Return the issue below which a resume said that nothing is gone on with."""
    told = reader.table("events", ["detail"], where="kind = 'resumed'")["detail"].to_pylist()
    return max((json.loads(detail or "{}").get("left_until", 0) for detail in told), default=0)


def _chosen(reader: RunReader, issues: set[int]) -> dict[int, tuple[str, int]]:
    """Return environment and index of the tasks of ``issues`` that events tell of."""
    told = reader.table("events", ["detail"], where="kind = 'tasks_chosen'")["detail"].to_pylist()
    choices = [choice for detail in told for choice in json.loads(detail or "{}")["tasks"]]
    return {
        choice["issue"]: (choice["environment"], choice["index"])
        for choice in choices
        if choice["issue"] in issues
    }
