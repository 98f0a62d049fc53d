"""The ledger: attempts, consumptions, discards and high-water marks in SQLite, written by one owner.

Owns ``control.sqlite``. Knows no trajectory and no log; the store tells it what a log frame did. An attempt's life::

    leased ──► finished            its trajectories are in the log
           ──► failed(reason)      its environment or engine broke
           ──► dropped(reason)     given up: quarantined, cut off, owner died, run ended

Invariants:

- every attempt ends in exactly one state, once; anything else raises :class:`LedgerError`;
- every write checks the fencing token in its own transaction: a superseded owner changes nothing any more;
- a trajectory of a finished attempt is discarded once at most, never after it was consumed; from then on only replay may
  use it;
- a mark never goes back, and is durable before the number it covers is used;
- what a log frame did is applied in one transaction with the frame's position. That transaction alone may be lost in a
  power cut (the log is ahead of it and is applied again); all others are durable when they return.
"""

import os
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hotpot.errors import LedgerError, StoreError
from hotpot.experience.crashpoints import reach
from hotpot.experience.log.ledger_file import (
    ATTEMPT_COLUMNS,
    DISCARD_COLUMNS,
    TABLES,
    attempt_from,
    attempt_values,
    discard_values,
)
from hotpot.experience.log.wal import Position
from hotpot.types import SCHEMA_VERSION, AttemptRow, ConsumptionRow, DiscardRow, TrajectoryRow

MARKS = ("policy_version", "update", "issue", "evaluation")
"""The high-water marks: the highest number of each kind ever handed out."""

REPLAY_SOURCES = ("hot", "cold")
"""Sources of consumptions that draw from the record, not from what waits."""

_IDS_A_QUERY = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One attempt about to run."""

    attempt_id: str
    episode_id: str
    group_id: str
    task_id: str
    purpose: str

    @classmethod
    def of(cls, row: TrajectoryRow) -> Self:
        """Return the lease that the attempt of a trajectory has, or had."""
        return cls(
            attempt_id=row.attempt_id,
            episode_id=row.episode_id,
            group_id=row.group_id,
            task_id=row.task_id,
            purpose=row.purpose,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Attempts by state. ``total`` is always the sum of the four."""

    leased: int
    finished: int
    failed: int
    dropped: int
    total: int


class Ledger:
    """The ledger of one run, opened by its owner; opening takes a new fencing token and supersedes older owners.

    ``redact`` replaces the secrets in the reasons of attempts before they are kept anywhere.
    """

    def __init__(self, path: Path, run_id: str, *, redact: Callable[[str], str] = str) -> None:
        self._run_id = run_id
        self._redact = redact
        self._guard = threading.RLock()
        self._durable: bool | None = None
        try:
            self._database = sqlite3.connect(
                path, timeout=10.0, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.executescript(TABLES)
            self._token = self._take_ownership()
        except sqlite3.Error as error:
            raise StoreError(
                f"can't open the ledger {path}: {error}; check space, rights and the file"
            ) from error

    @property
    def token(self) -> int:
        """This owner's fencing token: grows by one with every owner of the run."""
        return self._token

    def lease(self, leases: Sequence[Lease]) -> None:
        """Record attempts as leased, durably. Raises :class:`LedgerError` where one exists already; then none is."""
        rows = self._leased(leases)
        with self._transaction(durable=True) as database:
            for row in rows:
                try:
                    database.execute(
                        f"INSERT INTO attempts ({ATTEMPT_COLUMNS}, logged) VALUES (?,?,?,?,?,?,?,?,?,?,0)",
                        attempt_values(row),
                    )
                except sqlite3.IntegrityError as error:
                    raise LedgerError(
                        f"attempt {row.attempt_id} was leased before; an attempt is one try, "
                        "so give the next try the next attempt number"
                    ) from error

    def fail(self, attempt_id: str, reason: str) -> None:
        """End a leased attempt as failed: its environment or engine broke. Raises :class:`LedgerError` if not leased."""
        self._end({attempt_id: reason}, "failed")

    def drop(self, attempt_id: str, reason: str) -> None:
        """End a leased attempt as dropped: given up for ``reason``. Raises :class:`LedgerError` if not leased."""
        self._end({attempt_id: reason}, "dropped")

    def advance(self, name: str, value: int) -> None:
        """Raise the mark ``name`` to ``value``, durably, before the number is used.

        Raises :class:`LedgerError` where ``value`` is not above the mark: numbers are never reused.
        """
        _known_mark(name)
        with self._transaction(durable=True) as database:
            current = self._read_mark(name)
            if value <= current:
                raise LedgerError(
                    f"mark {name} stands at {current} and can't go to {value}; "
                    "numbers are never reused: take one above the mark"
                )
            database.execute("INSERT OR REPLACE INTO marks VALUES (?, ?)", (name, value))

    def reach(self, name: str, value: int) -> None:
        """Make sure that the mark ``name`` is at least ``value``: for numbers that may have been handed out already, to
        the very thing they are used for now.
        """
        if value > self.mark(name):
            self.advance(name, value)

    def marks(self) -> dict[str, int]:
        """Return all high-water marks."""
        return {name: self.mark(name) for name in MARKS}

    def mark(self, name: str) -> int:
        """Return the highest number of kind ``name`` handed out so far; -1 where none was."""
        _known_mark(name)
        with self._guard:
            return self._read_mark(name)

    def counts(self) -> LedgerCounts:
        """Return attempts by state, for a balance: leased + finished + failed + dropped = total."""
        with self._guard:
            states = dict(self._database.execute("SELECT state, count(*) FROM attempts GROUP BY state"))
        names = ("leased", "finished", "failed", "dropped")
        by_state = {name: int(states.get(name, 0)) for name in names}
        return LedgerCounts(**by_state, total=sum(states.values()))

    # What follows is for the store: it couples the ledger to the log.

    def is_leased(self, attempt_id: str) -> bool:
        """Whether the attempt is leased now. Any text may be asked for, even such as UTF-8 can't carry."""
        if _lone_surrogate(attempt_id):
            return False
        return bool(self._find_leased([attempt_id]))

    def states(self, ids: Iterable[str]) -> dict[str, str]:
        """Return the state of each of the attempts that the ledger knows. Any text may be asked for."""
        asked = [each for each in dict.fromkeys(ids) if not _lone_surrogate(each)]
        found: dict[str, str] = {}
        with self._guard:
            for start in range(0, len(asked), _IDS_A_QUERY):
                part = asked[start : start + _IDS_A_QUERY]
                places = ",".join("?" * len(part))
                query = f"SELECT attempt_id, state FROM attempts WHERE attempt_id IN ({places})"
                found.update(self._database.execute(query, part).fetchall())
        return found

    def ended(self, reasons: Mapping[str, str], state: str) -> list[AttemptRow]:
        """Return the rows that leased attempts (id to reason) will have once they end in ``state``; changes nothing.

        Raises :class:`LedgerError` where one isn't leased.
        """
        now = _now_us()
        leased = {row.attempt_id: row for row in self._find_leased(list(reasons))}
        for attempt_id in reasons:
            if attempt_id not in leased:
                raise LedgerError(
                    f"attempt {attempt_id!r} can't become {state}: {self._standing(attempt_id)}; "
                    "only a leased attempt ends, and it ends once"
                )
        return [
            _ended(leased[attempt_id], state, self._redact(reason) if reason else "", now)
            for attempt_id, reason in reasons.items()
        ]

    def brought(self, leases: Sequence[Lease]) -> list[AttemptRow]:
        """Return the rows of finished attempts that were never leased here, whose records another program brings whole.

        Changes nothing: they enter with the frame that holds their records (:meth:`apply`), so that one that was cut
        off before may be brought again.
        """
        return [_ended(row, "finished", "", row.leased_us) for row in self._leased(leases)]

    def drop_leased(self, reason: str) -> int:
        """End every leased attempt as dropped and return how many there were."""
        rows = self._find("state = 'leased' ORDER BY rowid")
        self._end({row.attempt_id: reason for row in rows}, "dropped")
        return len(rows)

    def not_logged(self) -> list[AttemptRow]:
        """Return the ended attempts that no log frame carries yet, in the order they were leased."""
        return self._find("logged = 0 AND state != 'leased' ORDER BY rowid")

    def check_consumptions(self, rows: Sequence[ConsumptionRow], update: int) -> None:
        """Raise :class:`LedgerError` where ``update`` is not new, or may not use one of the trajectories."""
        with self._guard:
            last = self._read_mark("recorded_update")
            if update <= last:
                raise LedgerError(
                    f"update {update} was recorded before (the last is {last}); use a new number"
                )
            if len({row.trajectory_id for row in rows}) != len(rows) or any(r.update != update for r in rows):
                raise LedgerError(f"update {update} consumes each trajectory once, under its own number")
            for row in rows:
                self._check_finished(row.trajectory_id, "consumed")
                gone = self._reason_discarded(row.trajectory_id)
                if gone is not None and row.source not in REPLAY_SOURCES:
                    raise LedgerError(
                        f"trajectory {row.trajectory_id} can't be consumed as {row.source}: it was discarded ({gone}); "
                        f"only replay ({', '.join(REPLAY_SOURCES)}) may still use it"
                    )

    def check_discards(self, rows: Sequence[DiscardRow]) -> None:
        """Raise :class:`LedgerError` where a trajectory can't be discarded: its attempt is not finished, it was
        consumed, or it was discarded before."""
        with self._guard:
            if len({row.trajectory_id for row in rows}) != len(rows):
                raise LedgerError("a trajectory is discarded once; leave repeated rows out")
            for row in rows:
                self._check_finished(row.trajectory_id, "discarded")
                used = self._database.execute(
                    "SELECT update_number FROM consumptions WHERE trajectory_id = ? LIMIT 1",
                    (row.trajectory_id,),
                ).fetchone()
                gone = self._reason_discarded(row.trajectory_id)
                if used is not None or gone is not None:
                    told = f"update {used[0]} consumed it" if used else f"it was discarded before ({gone})"
                    raise LedgerError(
                        f"trajectory {row.trajectory_id} can't be discarded as {row.reason}: {told}; "
                        "only what waits is discarded, and once"
                    )

    def apply(
        self,
        position: Position,
        attempts: Sequence[AttemptRow],
        consumptions: Sequence[ConsumptionRow] = (),
        update: int | None = None,
        discards: Sequence[DiscardRow] = (),
    ) -> None:
        """Apply what the log frame ending at ``position`` did, in one transaction. Safe to repeat after a crash."""
        reach("before_ledger")
        with self._transaction(durable=False) as database:
            database.executemany(
                f"INSERT INTO attempts ({ATTEMPT_COLUMNS}, logged) VALUES (?,?,?,?,?,?,?,?,?,?,1) "
                "ON CONFLICT (attempt_id) DO UPDATE SET "
                "state = excluded.state, reason = excluded.reason, closed_us = excluded.closed_us, logged = 1",
                map(attempt_values, attempts),
            )
            database.executemany(
                "INSERT OR REPLACE INTO consumptions VALUES (?,?,?,?,?)",
                [(c.trajectory_id, c.update, c.epochs, c.source, c.time_us) for c in consumptions],
            )
            database.executemany(
                f"INSERT OR REPLACE INTO discards ({DISCARD_COLUMNS}) VALUES (?,?,?,?,?,?)",
                map(discard_values, discards),
            )
            marks = [("wal_segment", position.segment), ("wal_offset", position.offset)]
            if update is not None:
                marks.append(("recorded_update", update))
            database.executemany("INSERT OR REPLACE INTO marks VALUES (?, ?)", marks)
        reach("after_ledger")

    def applied(self) -> Position:
        """Return the end of the last log frame that was applied; segment -1 where none was."""
        with self._guard:
            return Position(segment=self._read_mark("wal_segment"), offset=self._read_mark("wal_offset"))

    def sync(self) -> None:
        """Make everything applied so far durable (before the log segments that could repeat it are deleted)."""
        with self._transaction(durable=True) as database:
            database.execute("INSERT OR REPLACE INTO marks VALUES ('synced_us', ?)", (_now_us(),))

    def previous_owner_died(self) -> bool:
        """Whether the owner before this one never closed the ledger."""
        with self._guard:
            found = self._database.execute(
                "SELECT closed_us FROM owners WHERE token < ? ORDER BY token DESC LIMIT 1", (self._token,)
            ).fetchone()
        return found is not None and found[0] is None

    def close(self, *, ended: bool = True) -> None:
        """Close the file; ``ended`` says the run was left in order (no recovery is needed)."""
        with self._guard:
            try:
                if ended:
                    with self._transaction(durable=True) as database:
                        database.execute(
                            "UPDATE owners SET closed_us = ? WHERE token = ?", (_now_us(), self._token)
                        )
            finally:
                self._database.close()

    def _take_ownership(self) -> int:
        self._set_durable(durable=True)
        cursor = self._database.execute(
            "INSERT INTO owners (pid, host, since_us) VALUES (?, ?, ?)",
            (os.getpid(), socket.gethostname(), _now_us()),
        )
        return int(cursor.lastrowid or 0)

    def _leased(self, leases: Sequence[Lease]) -> list[AttemptRow]:
        now = _now_us()
        return [
            AttemptRow(
                run_id=self._run_id,
                attempt_id=lease.attempt_id,
                episode_id=lease.episode_id,
                group_id=lease.group_id,
                task_id=lease.task_id,
                purpose=lease.purpose,
                state="leased",
                reason="",
                owner=str(self._token),
                leased_us=now,
                closed_us=None,
                schema_version=SCHEMA_VERSION,
            )
            for lease in leases
        ]

    def _end(self, reasons: Mapping[str, str], state: str) -> None:
        rows = self.ended(reasons, state)
        if not rows:
            return
        with self._transaction(durable=True) as database:
            database.executemany(
                "UPDATE attempts SET state = ?, reason = ?, closed_us = ? WHERE attempt_id = ?",
                [(row.state, row.reason, row.closed_us, row.attempt_id) for row in rows],
            )

    def _standing(self, attempt_id: str) -> str:
        with self._guard:
            found = self._database.execute(
                "SELECT state, reason FROM attempts WHERE attempt_id = ?", (attempt_id,)
            ).fetchone()
        return "it was never leased" if found is None else f"it is {found[0]} already {found[1]}".rstrip()

    def _check_finished(self, trajectory_id: str, what: str) -> None:
        found = self._database.execute(
            "SELECT state FROM attempts WHERE attempt_id = ?", (trajectory_id.partition("/")[0],)
        ).fetchone()
        if found is None or found[0] != "finished":
            raise LedgerError(
                f"trajectory {trajectory_id} can't be {what}: its attempt "
                f"{'was never leased' if found is None else f'is {found[0]}, not finished'}; "
                "only what the store accepted is learned from"
            )

    def _reason_discarded(self, trajectory_id: str) -> str | None:
        found = self._database.execute(
            "SELECT reason FROM discards WHERE trajectory_id = ?", (trajectory_id,)
        ).fetchone()
        return None if found is None else str(found[0])

    def _find(self, condition: str, *values: str) -> list[AttemptRow]:
        with self._guard:
            found = self._database.execute(
                f"SELECT {ATTEMPT_COLUMNS} FROM attempts WHERE {condition}", values
            )
            return [attempt_from(self._run_id, row) for row in found]

    def _find_leased(self, ids: Sequence[str]) -> list[AttemptRow]:
        found: list[AttemptRow] = []
        for start in range(0, len(ids), _IDS_A_QUERY):
            part = ids[start : start + _IDS_A_QUERY]
            places = ",".join("?" * len(part))
            found += self._find(f"state = 'leased' AND attempt_id IN ({places})", *part)
        return found

    def _read_mark(self, name: str) -> int:
        found = self._database.execute("SELECT value FROM marks WHERE name = ?", (name,)).fetchone()
        return -1 if found is None else int(found[0])

    def _set_durable(self, *, durable: bool) -> None:
        if durable != self._durable:
            self._database.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._durable = durable

    @contextmanager
    def _transaction(self, *, durable: bool) -> Iterator[sqlite3.Connection]:
        with self._guard:
            try:
                self._set_durable(durable=durable)
                self._database.execute("BEGIN IMMEDIATE")
                try:
                    self._check_token()
                    yield self._database
                    if durable:
                        reach("ledger_before_commit")
                    self._database.execute("COMMIT")
                    if durable:
                        reach("ledger_after_commit")
                except BaseException:
                    if self._database.in_transaction:
                        self._database.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise StoreError(
                    f"the ledger could not be written: {error}; check space and rights"
                ) from error

    def _check_token(self) -> None:
        (newest,) = self._database.execute("SELECT max(token) FROM owners").fetchone()
        if newest != self._token:
            raise LedgerError(
                f"this writer (token {self._token}) was superseded by token {newest}; "
                "another process owns the run now: stop this one"
            )


def _ended(lease: AttemptRow, state: str, reason: str, now_us: int) -> AttemptRow:
    return AttemptRow(
        run_id=lease.run_id,
        attempt_id=lease.attempt_id,
        episode_id=lease.episode_id,
        group_id=lease.group_id,
        task_id=lease.task_id,
        purpose=lease.purpose,
        state=state,
        reason=reason,
        owner=lease.owner,
        leased_us=lease.leased_us,
        closed_us=max(now_us, lease.leased_us),
        schema_version=SCHEMA_VERSION,
    )


def _lone_surrogate(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _known_mark(name: str) -> None:
    if name not in MARKS:
        raise LedgerError(f"unknown mark {name!r}; marks are {', '.join(MARKS)}")


def _now_us() -> int:
    return time.time_ns() // 1_000
