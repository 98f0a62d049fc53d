"""Where a run goes on: the next update's number, the next task issue, and what is settled of the update it was in.

Owns the reading of that from record and ledger. Decides nothing about weights. An update whose number was handed out and
that was not recorded is *pending*: its number and its issues stand for it still, so whoever goes on with it uses them
again, under new attempts. A process that does not go on with it takes numbers above the marks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotpot.experience import Ledger, RunReader, read_trajectories
from hotpot.experience.log.recovery import OWNER_DIED
from hotpot.experience.store import RUN_ENDED
from hotpot.rollout import STOPPED, Past
from hotpot.types import EndReason, Purpose

INTERRUPTIONS = (OWNER_DIED, RUN_ENDED, STOPPED)
"""Reasons of dropped attempts with which nothing is wrong: the process was."""

_OWN_ISSUE = f"purpose = '{Purpose.TRAINING.value}' AND regexp_full_match(group_id, 'g[0-9]+')"
_ISSUE = "CAST(substr(group_id, 2) AS BIGINT)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The next update and the next task issue. ``problem`` says why a pending update can't be gone on with, if so."""

    next_update: int
    next_issue: int
    problem: str = ""


def behind_the_marks(ledger: Ledger, problem: str = "") -> Position:
    """Return the position above everything that was ever handed out."""
    return Position(
        next_update=max(ledger.mark("update"), 0) + 1, next_issue=ledger.mark("issue") + 1, problem=problem
    )


def read_position(reader: RunReader, ledger: Ledger, update: int) -> Position:
    """Return the position after ``update``, the last one recorded on the way: that of the pending update, if any.

    The record says which issues were handed out by the time of an update, and what a process that went on with other
    numbers took. Where the marks do not fit, the position is behind them.
    """
    told = _told_last(reader)
    if told is not None and told.next_update > update:
        wanted = told
    else:
        wanted = Position(next_update=update + 1, next_issue=_last_issue(reader, update) + 1)
    begun, issued = ledger.mark("update"), ledger.mark("issue")
    pending = begun == wanted.next_update and issued >= wanted.next_issue - 1
    resting = max(begun, 0) == wanted.next_update - 1 and issued == wanted.next_issue - 1
    if pending or resting:
        return wanted
    return behind_the_marks(
        ledger, f"updates up to {begun} and issues up to {issued} were handed out after update {update}"
    )


def read_past(reader: RunReader, first_issue: int, *, company: bool) -> Past:
    """Return what is on record of the episodes issued from ``first_issue`` on."""
    attempts = reader.sql(
        f"SELECT attempt_id, episode_id, state, reason FROM attempts WHERE {_OWN_ISSUE} AND {_ISSUE} >= ?",
        [first_issue],
    ).to_pylist()
    finished = {row["attempt_id"]: row["episode_id"] for row in attempts if row["state"] == "finished"}
    trajectories = read_trajectories(reader, "attempt_id IN (SELECT unnest(?))", [list(finished)])
    brought: dict[str, list[Any]] = {}
    for trajectory in trajectories:
        brought.setdefault(finished[trajectory.row.attempt_id], []).append(trajectory)
    return Past(
        finished=brought,
        lost=frozenset(_given_up(attempts)) - frozenset(brought),
        next_attempts=next_attempts(attempts),
        company=company,
    )


def is_barren(past: Past, num_episodes: int) -> bool:
    """Whether all ``num_episodes`` episodes of an update are settled and none can be learned from."""
    useful = any(
        trajectory.row.end_reason != EndReason.MAX_SECONDS
        for found in past.finished.values()
        for trajectory in found
    )
    return not useful and len(past.finished) + len(past.lost) >= num_episodes


def _told_last(reader: RunReader) -> Position | None:
    """Return the position that the last process to take the run up began at, where it said so."""
    rows = reader.table("events", ["detail"], where="kind = 'resumed'").to_pylist()
    detail = json.loads(rows[-1]["detail"]) if rows else {}
    if "next_update" not in detail:
        return None
    return Position(next_update=detail["next_update"], next_issue=detail["next_issue"])


def _last_issue(reader: RunReader, update: int) -> int:
    """Return the highest issue that any attempt was made at by the time of ``update``; -1 where there is none."""
    if not update:
        return -1
    found = reader.as_of(update).sql(f"SELECT max({_ISSUE}) AS last FROM attempts WHERE {_OWN_ISSUE}")
    last = found["last"][0].as_py()
    return -1 if last is None else int(last)


def _given_up(attempts: Sequence[Mapping[str, Any]]) -> set[str]:
    return {
        row["episode_id"]
        for row in attempts
        if row["state"] == "dropped" and row["reason"] not in INTERRUPTIONS
    }


def next_attempts(attempts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of the next attempt at each episode that ``attempts`` are at."""
    found: dict[str, int] = {}
    for row in attempts:
        number = int(row["attempt_id"].partition("+")[0].rpartition(".")[2])
        found[row["episode_id"]] = max(found.get(row["episode_id"], 0), number + 1)
    return found
