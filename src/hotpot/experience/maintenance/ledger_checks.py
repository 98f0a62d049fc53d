"""Checks that ledger and lake agree: a look at the ledger's file that changes nothing in it.

Owns the comparison. The ledger is read before the record, so what it says was logged must be in the record; the other
way round only what it has applied by then is asked for.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from hotpot.experience.lake.lake import SEGMENT_COLUMN
from hotpot.experience.maintenance.findings import Finding, capped
from hotpot.experience.reading.reader import RunReader


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFacts:
    """What the ledger says: state and reason of the attempts it logged, the consumptions, the last log segment applied."""

    attempts: dict[str, tuple[str, str]]
    consumptions: frozenset[tuple[str, int]]
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
    yield from _check_consumptions(reader, facts)


def _check_consumptions(reader: RunReader, facts: LedgerFacts) -> Iterator[Finding]:
    rows = reader.sql(
        f"SELECT trajectory_id, update, {SEGMENT_COLUMN} FROM recorded_consumptions"
    ).to_pylist()
    record = {(row["trajectory_id"], row["update"]) for row in rows}
    applied = {
        (row["trajectory_id"], row["update"]) for row in rows if row[SEGMENT_COLUMN] < facts.applied_segment
    }
    places = [
        ("ledger", "record", facts.consumptions - record),
        ("record", "ledger", applied - facts.consumptions),
    ]
    for here, there, missing in places:
        yield from capped(
            "ledger_consumption",
            "consumptions",
            (
                f"{trajectory} consumed by update {update} is in the {here}, not in the {there}"
                for trajectory, update in sorted(missing)
            ),
        )


def _read(path: Path, mode: str) -> LedgerFacts:
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=10.0)) as database:
        attempts = database.execute(
            "SELECT attempt_id, state, reason FROM attempts WHERE logged = 1 AND state != 'leased'"
        ).fetchall()
        consumptions = database.execute("SELECT trajectory_id, update_number FROM consumptions").fetchall()
        mark = database.execute("SELECT value FROM marks WHERE name = 'wal_segment'").fetchone()
    return LedgerFacts(
        attempts={attempt: (state, reason) for attempt, state, reason in attempts},
        consumptions=frozenset((trajectory, int(update)) for trajectory, update in consumptions),
        applied_segment=-1 if mark is None else int(mark[0]),
    )
