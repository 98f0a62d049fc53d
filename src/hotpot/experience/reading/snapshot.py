"""One consistent look at a run while its writer goes on: watermark, log tail and ledger that belong together.

Owns the order of reading that makes each record appear exactly once. Opens nothing for writing; knows no SQL.

1. The ledger first: what it says an attempt became is in the log by then (log before ledger), so what is read from the
   log afterwards can only be newer, and wins.
2. The watermark W, then every log segment above W, then the watermark again. Segments are deleted only after a newer
   watermark: if W did not move, none of those above it can have gone meanwhile. If it moved, look again.
3. The tables' files last. What they hold above W is in the log tail already, and is left out by ``_segment <= W``.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotpot.errors import StoreError
from hotpot.experience.lake.lake import ROW_COLUMN, SEGMENT_COLUMN, Lake
from hotpot.experience.log.ledger_file import read_not_logged
from hotpot.experience.log.order import row_numbers
from hotpot.experience.log.wal import LogSegment, last_written, read_segment, segment_numbers, segment_path
from hotpot.experience.records.schema import SCHEMAS, to_table
from hotpot.types import AttemptRow

LOOK_AGAIN_S = 30.0
"""Longest time spent on looking again because the archive was faster."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableSnapshot:
    """One table: the lake's files (rows with ``_segment <= watermark`` count) and the log's tail as Arrow, with
    the columns ``_segment`` and ``_row`` as the lake will have them."""

    paths: tuple[str, ...]
    tail: pa.Table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """A consistent look at some tables. ``unlogged`` are the ledger's attempts that are in neither log nor lake, unless
    the log has them by now (then the log's state is the newer one)."""

    watermark: int
    tables: dict[str, TableSnapshot]
    unlogged: pa.Table

    def only(self, tables: Iterable[str]) -> "Snapshot":
        """Return the same moment of some of the tables."""
        return replace(self, tables={name: self.tables[name] for name in tables})


def take_snapshot(run_folder: Path | None, run_id: str, lake: Lake, tables: Iterable[str]) -> Snapshot:
    """Return a snapshot of ``tables``; without a run folder, of what the lake alone holds.

    Raises :class:`StoreError` where log or lake can't be read.
    """
    wanted = tuple(tables)
    unlogged: list[AttemptRow] = []
    waiting: list[LogSegment] = []
    if run_folder is None:
        watermark = lake.watermark()
    else:
        if "attempts" in wanted:
            unlogged = read_not_logged(run_folder / "control.sqlite", run_id)
        watermark, waiting = _tail(run_folder / "wal", lake)
    segments = [(segment, row_numbers(segment.frames)) for segment in waiting]
    found: dict[str, TableSnapshot] = {}
    for name in wanted:
        files = lake.files(name) if watermark else None
        found[name] = TableSnapshot(
            paths=files.paths if files is not None else (), tail=_table_tail(name, segments)
        )
    return Snapshot(watermark=watermark, tables=found, unlogged=to_table("attempts", unlogged))


def _tail(log_folder: Path, lake: Lake) -> tuple[int, list[LogSegment]]:
    deadline = time.monotonic() + LOOK_AGAIN_S
    watermark = lake.watermark()
    while True:
        segments = _read_above(log_folder, watermark)
        again = lake.watermark()
        if again == watermark and segments is not None:
            return watermark, segments
        watermark = again
        if time.monotonic() > deadline:
            raise StoreError(
                f"the log in {log_folder} changed faster than it could be read for {LOOK_AGAIN_S} s; try again"
            )


def _read_above(log_folder: Path, watermark: int) -> list[LogSegment] | None:
    """Return the log segments above the watermark, or None where one was taken to the lake meanwhile."""
    numbers = [number for number in segment_numbers(log_folder) if number > watermark]
    try:
        # What is torn at the end of the last one written is a frame that is just being written: not there yet.
        last = last_written(log_folder, numbers)
        return [read_segment(segment_path(log_folder, number), sealed=number < last) for number in numbers]
    except FileNotFoundError:
        return None


def _table_tail(name: str, segments: list[tuple[LogSegment, dict[str, NDArray[np.int64]]]]) -> pa.Table:
    pieces = [SCHEMAS[name].empty_table()]
    of_segment, numbers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for segment, by_table in segments:
        tables = [table for frame in segment.frames if (table := frame.table(name)) is not None]
        pieces += [pa.Table.from_arrays(table.columns, schema=SCHEMAS[name]) for table in tables]
        if name in by_table:
            of_segment.append(np.full(len(by_table[name]), segment.number))
            numbers.append(by_table[name])
    tail = pa.concat_tables(pieces)
    return tail.append_column(SEGMENT_COLUMN, pa.array(np.concatenate(of_segment))).append_column(
        ROW_COLUMN, pa.array(np.concatenate(numbers))
    )
