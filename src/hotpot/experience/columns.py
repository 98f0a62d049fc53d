"""Whole columns of a table straight from the lake's files, in the order their rows were recorded.

Owns the way around SQL for the commonest question, a few whole columns: only their bytes are read, and of a file's rows
none is looked at twice. Knows files and the hidden columns, no Delta log and no query. What a file's own statistics prove
(that it holds one segment, that all of it is below the watermark) is not read.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hotpot.experience.lake import ROW_COLUMN, SEGMENT_COLUMN
from hotpot.experience.snapshot import TableSnapshot

_ROW_BITS = 32
"""Bits of a row's number in its segment; what is above them numbers the segment."""

_LEAST_STRETCH = 64
"""Rows that a stretch in order has on average, or rows are sorted one by one."""


def read_columns(table: TableSnapshot, watermark: int, schema: pa.Schema) -> pa.Table | None:
    """Return the columns of ``schema`` from lake and log, in recorded order, without a copy where files are in order.

    Returns None where only SQL can answer: a file lies elsewhere than on this machine, or was written before one of the
    columns was there. Raises ``OSError`` or ``ArrowException`` where a file can't be read.
    """
    if any("://" in path for path in table.paths):
        return None
    whole = pa.schema([(SEGMENT_COLUMN, pa.int64()), (ROW_COLUMN, pa.int64()), *schema])
    pieces: list[pa.Table] = []
    for path in table.paths:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            if not set(schema.names) <= set(file.schema_arrow.names):
                return None
            pieces.append(_read_file(file, watermark, schema.names).cast(whole))
    pieces = [piece for piece in (*pieces, table.tail.select(whole.names).cast(whole)) if piece.num_rows]
    if not pieces:
        return schema.empty_table()
    pieces.sort(key=lambda piece: (piece.column(0)[0].as_py(), piece.column(1)[0].as_py()))
    return _in_order(pieces).select(schema.names).cast(schema)


def _read_file(file: pq.ParquetFile, watermark: int, names: Sequence[str]) -> pa.Table:
    """Return the hidden columns and ``names`` of the rows up to the watermark."""
    first, last = _segments(file.metadata)
    if first is not None and first == last and first <= watermark:
        rows = file.read([ROW_COLUMN, *names])
        segments: Any = pa.repeat(pa.scalar(first, pa.int64()), rows.num_rows)
        return rows.select([ROW_COLUMN, *names]).add_column(0, SEGMENT_COLUMN, segments)
    rows = file.read([SEGMENT_COLUMN, ROW_COLUMN, *names]).select([SEGMENT_COLUMN, ROW_COLUMN, *names])
    if last is not None and last <= watermark:
        return rows
    return rows.filter(pc.less_equal(rows.column(0), pa.scalar(watermark, pa.int64())))


def _segments(metadata: pq.FileMetaData) -> tuple[int | None, int | None]:
    """Return the smallest and the largest segment in a file, None where its statistics don't say."""
    place = next(
        i
        for i in range(metadata.num_columns)
        if metadata.row_group(0).column(i).path_in_schema == SEGMENT_COLUMN
    )
    found: list[Any] = [
        metadata.row_group(group).column(place).statistics for group in range(metadata.num_row_groups)
    ]
    if any(one is None or not one.has_min_max for one in found):
        return None, None
    return min(one.min for one in found), max(one.max for one in found)


def _in_order(pieces: Sequence[pa.Table]) -> pa.Table:
    rows = pa.concat_tables(pieces)
    # One number for the place in the record: the segment above, the row in it below.
    segments = rows.column(0).to_numpy()
    places = (segments << _ROW_BITS) | rows.column(1).to_numpy()
    falls = places[1:] < places[:-1]
    if not falls.any():
        return rows
    # A compaction puts whole files together, in any order: a segment is a stretch in order, and stretches are arranged.
    breaks = np.flatnonzero(falls | (segments[1:] != segments[:-1])) + 1
    begins, ends = np.append(0, breaks), np.append(breaks, len(places))
    order = np.argsort(places[begins])
    begins, ends = begins[order], ends[order]
    overlap = (places[begins[1:]] < places[ends[:-1] - 1]).any()
    if overlap or len(breaks) * _LEAST_STRETCH > len(places):
        return rows.take(np.argsort(places, kind="stable"))
    stretches = zip(begins.tolist(), (ends - begins).tolist(), strict=True)
    return pa.concat_tables([rows.slice(begin, length) for begin, length in stretches])
