"""The ledger's file, ``control.sqlite``: its tables, its rows as records, and a look at it without owning it.

Knows SQLite and the columns. What may be written, and when, is :mod:`hotpot.experience.log.ledger`.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from hotpot.errors import StoreError
from hotpot.types import SCHEMA_VERSION, AttemptRow, DiscardRow

TABLES = """
CREATE TABLE IF NOT EXISTS owners (
    token INTEGER PRIMARY KEY, pid INTEGER NOT NULL, host TEXT NOT NULL, since_us INTEGER NOT NULL, closed_us INTEGER);
CREATE TABLE IF NOT EXISTS attempts (
    attempt_id TEXT PRIMARY KEY, episode_id TEXT NOT NULL, group_id TEXT NOT NULL, task_id TEXT NOT NULL,
    purpose TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, owner TEXT NOT NULL,
    leased_us INTEGER NOT NULL, closed_us INTEGER, logged INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS attempts_not_logged ON attempts (logged) WHERE logged = 0;
CREATE TABLE IF NOT EXISTS consumptions (
    trajectory_id TEXT NOT NULL, update_number INTEGER NOT NULL, epochs INTEGER NOT NULL, source TEXT NOT NULL,
    time_us INTEGER NOT NULL, PRIMARY KEY (trajectory_id, update_number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS discards (
    trajectory_id TEXT PRIMARY KEY, reason TEXT NOT NULL, update_number INTEGER NOT NULL, policy_version INTEGER NOT NULL,
    staleness INTEGER NOT NULL, time_us INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS marks (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""

ATTEMPT_COLUMNS = (
    "attempt_id, episode_id, group_id, task_id, purpose, state, reason, owner, leased_us, closed_us"
)
"""Columns of the SQLite table ``attempts``, in the order records are read and written."""

DISCARD_COLUMNS = "trajectory_id, reason, update_number, policy_version, staleness, time_us"
"""Columns of the SQLite table ``discards``, in the order records are written."""

_NOT_WRITABLE = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)


def attempt_from(run_id: str, row: Sequence[Any]) -> AttemptRow:
    """Return the record of one row of the SQLite table, its columns in the order of :data:`ATTEMPT_COLUMNS`."""
    return AttemptRow(
        run_id=run_id,
        attempt_id=row[0],
        episode_id=row[1],
        group_id=row[2],
        task_id=row[3],
        purpose=row[4],
        state=row[5],
        reason=row[6],
        owner=row[7],
        leased_us=row[8],
        closed_us=row[9],
        schema_version=SCHEMA_VERSION,
    )


def attempt_values(row: AttemptRow) -> tuple[str | int | None, ...]:
    """Return the values of a record in the order of :data:`ATTEMPT_COLUMNS`."""
    return (
        row.attempt_id, row.episode_id, row.group_id, row.task_id, row.purpose,
        row.state, row.reason, row.owner, row.leased_us, row.closed_us,
    )  # fmt: skip


def discard_values(row: DiscardRow) -> tuple[str | int, ...]:
    """Return the values of a record in the order of :data:`DISCARD_COLUMNS`."""
    return (row.trajectory_id, row.reason, row.update, row.policy_version, row.staleness, row.time_us)


def read_not_logged(path: Path, run_id: str) -> list[AttemptRow]:
    """Return, without owning the ledger, the attempts no log frame carries: leased ones, and ended ones not yet logged.

    Works beside a living owner and on a folder that can't be written; none where there is no ledger yet. Raises
    :class:`StoreError` where there is one and it can't be read: what it knows must not look like nothing.
    """
    if not path.exists():
        return []
    try:
        return _read_not_logged(path, run_id, "mode=ro")
    except sqlite3.Error as error:
        written = path.with_name(f"{path.name}-wal")
        # A folder without write permission, where SQLite can't make its shared memory. Read as immutable, what is in
        # SQLite's own log would be missed, so only where there is none.
        if error.sqlite_errorcode & 0xFF in _NOT_WRITABLE and not (
            written.exists() and written.stat().st_size
        ):
            with suppress(sqlite3.Error):
                return _read_not_logged(path, run_id, "immutable=1")
        raise StoreError(
            f"can't read the ledger {path}: {error}; check rights, restore the file from a copy, "
            "or copy the run folder to where it can be written"
        ) from error


def ended_in_order(path: Path) -> bool:
    """Return whether the last owner of the ledger ended the run in order; False where there is no ledger.

    Raises :class:`StoreError` where it can't be read.
    """
    if not path.exists():
        return False
    try:
        with closing(_connected(path, "mode=ro")) as database:
            row = database.execute("SELECT closed_us FROM owners ORDER BY token DESC LIMIT 1").fetchone()
    except sqlite3.Error as error:
        raise StoreError(f"can't read the ledger {path}: {error}; check rights") from error
    return row is not None and row[0] is not None


def _connected(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=10.0)


def _read_not_logged(path: Path, run_id: str, mode: str) -> list[AttemptRow]:
    with closing(_connected(path, mode)) as database:
        made = database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'attempts'").fetchone()
        if not made[0]:
            return []  # its owner is just making it
        query = f"SELECT {ATTEMPT_COLUMNS} FROM attempts WHERE logged = 0 ORDER BY rowid"
        return [attempt_from(run_id, row) for row in database.execute(query)]
