"""The record of what was deleted from a run: rows of table ``events``, kind ``deleted``.

Owns the form of their ``detail``: who took which trajectory out, when, why, and how many rows of each log segment of each
table that were. Knows no content of what is gone.
"""

import getpass
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hotpot.experience.reading.reader import RunReader
from hotpot.ids import canonical_json
from hotpot.types import SCHEMA_VERSION, EventRow

DELETED = "deleted"
"""Kind of the event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """One deletion. ``rows`` maps table to log segment to the number of rows that were taken out;
    ``refusals`` are the hidden (segment, row) of quarantine records that held the same under another name."""

    trajectory_id: str
    reason: str
    who: str
    time_us: int
    rows: dict[str, dict[int, int]]
    refusals: tuple[tuple[int, int], ...] = ()

    def totals(self) -> dict[str, int]:
        """Return the rows taken out of each table."""
        return {name: sum(by_segment.values()) for name, by_segment in self.rows.items()}

    def event(self, *, run_id: str, update: int, policy_version: int) -> EventRow:
        """Return the event that records it."""
        detail: dict[str, Any] = {
            "trajectory_id": self.trajectory_id,
            "reason": self.reason,
            "who": self.who,
            "rows": self.totals(),
            "refusals": self.refusals,
            "segments": {
                name: {str(number): rows for number, rows in by_segment.items()}
                for name, by_segment in self.rows.items()
            },
        }
        return EventRow(
            run_id=run_id,
            kind=DELETED,
            detail=canonical_json(detail),
            update=update,
            policy_version=policy_version,
            time_us=self.time_us,
            schema_version=SCHEMA_VERSION,
        )


def deletion_now(
    trajectory_id: str,
    reason: str,
    rows: dict[str, dict[int, int]],
    refusals: tuple[tuple[int, int], ...] = (),
) -> Deletion:
    """Return a deletion by whoever runs this process, now."""
    return Deletion(
        trajectory_id=trajectory_id,
        reason=reason,
        who=f"{_user()} on {socket.gethostname()}",
        time_us=time.time_ns() // 1_000,
        rows=rows,
        refusals=refusals,
    )


def read_deletions(reader: RunReader) -> list[Deletion]:
    """Return the deletions of a run in the order they were recorded."""
    rows = reader.table("events", ["detail", "time_us"], where=f"kind = '{DELETED}'").to_pylist()
    found = []
    for row in rows:
        detail: dict[str, Any] = json.loads(row["detail"])
        found.append(
            Deletion(
                trajectory_id=detail["trajectory_id"],
                reason=detail["reason"],
                who=detail["who"],
                time_us=row["time_us"],
                rows={
                    name: {int(number): count for number, count in by_segment.items()}
                    for name, by_segment in detail["segments"].items()
                },
                refusals=tuple((segment, row) for segment, row in detail.get("refusals", ())),
            )
        )
    return found


def rows_gone(deletions: Iterable[Deletion]) -> dict[str, Counter[int]]:
    """Return, by table and log segment, how many rows all ``deletions`` took out."""
    gone: dict[str, Counter[int]] = {}
    for deletion in deletions:
        for name, by_segment in deletion.rows.items():
            gone.setdefault(name, Counter()).update(by_segment)
    return gone


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"
