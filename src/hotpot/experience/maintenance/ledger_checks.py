"""Checks that ledger and lake agree: a look at the ledger's file that changes nothing in it.

Owns the comparison. The ledger is read before the record, so what it says was logged must be in the record; the other
way round only what it has applied by then is asked for.
"""

import sqlite3
from collections.abc import Iterator, Set
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotpot.experience.lake.lake import SEGMENT_COLUMN
from hotpot.experience.maintenance.findings import Finding, capped
from hotpot.experience.reading.reader import RunReader


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFacts:
    """What the ledger says: state and reason of the attempts it logged, the consumptions, the discards with their
    reason, the last log segment applied."""

    attempts: dict[str, tuple[str, str]]
    consumptions: frozenset[tuple[str, int]]
    discards: frozenset[tuple[str, str]]
    applied_segment: int


def read_ledger(run_folder: Path) -> LedgerFacts | None:
    """Return what the ledger of a run says, or None where it has none. Raises sqlite3.Error where it can't be read."""
    path = run_folder / "control.sqlite"
    if not path.exists():
        return None
    try:
        return _read(path, "mode=ro")
    except sqlite3.OperationalError:
        # A folder without write permission; without a log of SQLite's own the file is all there is.
        written = path.with_name(f"{path.name}-wal")
        if written.exists() and written.stat().st_size:
            raise
        return _read(path, "immutable=1")


def check_ledger(reader: RunReader, facts: LedgerFacts) -> Iterator[Finding]:
    """Yield where ledger and record contradict each other. ``reader`` must see a later moment than ``facts``."""
    rows = reader.sql(
        f"SELECT attempt_id, state, reason, {SEGMENT_COLUMN} FROM recorded_attempts WHERE state != 'leased'"
    ).to_pylist()
    record = {row["attempt_id"]: (row["state"], row["reason"]) for row in rows}
    yield from capped(
        "ledger_attempt",
        "attempts",
        (
            f"{attempt} is {facts.attempts[attempt][0]} on the ledger, "
            f"{record[attempt][0] if attempt in record else 'not there'} in the record"
            for attempt in sorted(facts.attempts)
            if record.get(attempt) != facts.attempts[attempt]
        ),
    )
    applied = {row["attempt_id"] for row in rows if row[SEGMENT_COLUMN] < facts.applied_segment}
    yield from capped(
        "ledger_attempt",
        "attempts",
        (
            f"{attempt} is in the record, not on the ledger"
            for attempt in sorted(applied - set(facts.attempts))
        ),
    )
    consumed, discarded = "{} consumed by update {}", "{} discarded as {}"
    yield from _check_uses(reader, "consumptions", "update", consumed, facts.consumptions, facts)
    yield from _check_uses(reader, "discards", "reason", discarded, facts.discards, facts)


def _check_uses(
    reader: RunReader, table: str, column: str, words: str, ledger: Set[tuple[str, Any]], facts: LedgerFacts
) -> Iterator[Finding]:
    """Yield which pairs (trajectory, ``column``) of ``table`` are in one of ledger and record only."""
    rows = reader.sql(f"SELECT trajectory_id, {column}, {SEGMENT_COLUMN} FROM recorded_{table}").to_pylist()
    record = {(row["trajectory_id"], row[column]) for row in rows}
    applied = {
        (row["trajectory_id"], row[column]) for row in rows if row[SEGMENT_COLUMN] < facts.applied_segment
    }
    places = [("ledger", "record", ledger - record), ("record", "ledger", applied - ledger)]
    for here, there, missing in places:
        yield from capped(
            f"ledger_{table.removesuffix('s')}",
            table,
            (f"{words.format(*pair)} is in the {here}, not in the {there}" for pair in sorted(missing)),
        )


def _read(path: Path, mode: str) -> LedgerFacts:
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=10.0)) as database:
        attempts = database.execute(
            "SELECT attempt_id, state, reason FROM attempts WHERE logged = 1 AND state != 'leased'"
        ).fetchall()
        consumptions = database.execute("SELECT trajectory_id, update_number FROM consumptions").fetchall()
        discards = (
            database.execute("SELECT trajectory_id, reason FROM discards").fetchall()
            if _has_discards(database)
            else []
        )
        mark = database.execute("SELECT value FROM marks WHERE name = 'wal_segment'").fetchone()
    return LedgerFacts(
        attempts={attempt: (state, reason) for attempt, state, reason in attempts},
        consumptions=frozenset((trajectory, int(update)) for trajectory, update in consumptions),
        discards=frozenset((trajectory, reason) for trajectory, reason in discards),
        applied_segment=-1 if mark is None else int(mark[0]),
    )


def _has_discards(database: sqlite3.Connection) -> bool:
    """Whether the ledger keeps discards: releases of schema version 5 and before had no such table."""
    (found,) = database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'discards'").fetchone()
    return bool(found)
