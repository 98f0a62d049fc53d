"""Bringing a run folder into order before its next owner writes: what a crash left is completed or cut off.

Owns the sequence: delete log segments that the lake holds already, cut the torn tail of the last one, apply the frames
the ledger has not seen, end the attempts a dead owner had leased. Every part may be repeated, so a crash in here needs
nothing more than another recovery.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotpot.errors import CorruptRecordError
from hotpot.experience.crashpoints import reach
from hotpot.experience.disk import sync_folder
from hotpot.experience.log.ledger import Ledger
from hotpot.experience.log.wal import (
    Frame,
    Position,
    last_written,
    read_segment,
    segment_numbers,
    segment_path,
    truncate_segment,
)
from hotpot.experience.records.schema import from_table
from hotpot.ids import canonical_json
from hotpot.types import SCHEMA_VERSION, EventRow

OWNER_DIED = "owner_died"
"""Reason of an attempt that was leased by an owner who died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What was found: log segments still to be archived, the number for the next one, and what had to be mended."""

    sealed: tuple[int, ...]
    next_segment: int
    unclean: bool
    frames_applied: int
    attempts_dropped: int
    torn_bytes: int


def recover(log_folder: Path, ledger: Ledger, watermark: int) -> Recovered:
    """Bring log and ledger into order and say what was done.

    Raises :class:`hotpot.errors.CorruptRecordError` where acknowledged records are damaged; then nothing is changed
    that could be mended by restoring the file.
    """
    applied = ledger.applied()
    numbers = segment_numbers(log_folder)
    for number in [number for number in numbers if number <= watermark]:
        segment_path(log_folder, number).unlink()
        reach("recovery_deleted")
    waiting = [number for number in numbers if number > watermark]
    _check_complete(log_folder, waiting, watermark, applied)
    last = last_written(log_folder, waiting)
    sealed: list[int] = []
    frames_applied = torn = 0
    for number in waiting:
        path = segment_path(log_folder, number)
        known = applied.offset if applied.segment == number else 0
        segment = read_segment(path, sealed=number < last, acknowledged_bytes=known)
        torn += segment.torn_bytes
        for frame in segment.frames:
            if frame.end > applied:
                _apply(frame, ledger)
                frames_applied += 1
        if segment.frames:
            if segment.torn_bytes:
                truncate_segment(path, segment.end_bytes)
                reach("recovery_cut")
            sealed.append(number)
        else:
            path.unlink()
    sync_folder(log_folder)
    reach("recovered_log")
    died = ledger.previous_owner_died()
    dropped = ledger.drop_leased(OWNER_DIED)
    reach("recovery_dropped")
    return Recovered(
        sealed=tuple(sealed),
        next_segment=max([watermark, *sealed]) + 1,
        unclean=died,
        frames_applied=frames_applied,
        attempts_dropped=dropped,
        torn_bytes=torn,
    )


def event(recovered: Recovered, ledger: Ledger, run_id: str) -> EventRow:
    """Return the event that tells of a recovery."""
    detail: dict[str, Any] = {
        "log_segments": len(recovered.sealed),
        "frames_applied": recovered.frames_applied,
        "attempts_dropped": recovered.attempts_dropped,
        "torn_bytes": recovered.torn_bytes,
        "owner": ledger.token,
    }
    return EventRow(
        run_id=run_id,
        kind="recovered",
        detail=canonical_json(detail),
        update=max(0, ledger.mark("update")),
        policy_version=max(0, ledger.mark("policy_version")),
        time_us=time.time_ns() // 1_000,
        schema_version=SCHEMA_VERSION,
    )


def _check_complete(log_folder: Path, waiting: list[int], watermark: int, applied: Position) -> None:
    # Log segments are numbered without gaps, so one that is neither here nor in the lake was lost.
    last = max(applied.segment, *waiting, 0) if waiting else applied.segment
    missing = sorted(set(range(watermark + 1, last + 1)) - set(waiting))
    if missing:
        raise CorruptRecordError(
            f"log segments {missing[:10]} are neither in {log_folder} nor in the lake (complete up to {watermark}); "
            "restore them, or the lake, from a copy"
        )


def _apply(frame: Frame, ledger: Ledger) -> None:
    rows: dict[str, list[Any]] = {}
    for name in ("attempts", "consumptions", "discards", "updates"):
        table = frame.table(name)
        rows[name] = [] if table is None else from_table(name, table)
    update = max((row.update for row in rows["updates"]), default=None)
    ledger.apply(frame.end, rows["attempts"], rows["consumptions"], update, rows["discards"])
