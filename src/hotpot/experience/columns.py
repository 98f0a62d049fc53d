"""Whole columns of a table straight from the lake's files, in the order their rows were recorded.

Owns the way around SQL for the commonest question, a few whole columns: only their bytes are read. Knows files and the
hidden columns, no Delta log and no query.

Files never change under their name, so what was once found out about their rows (which are below the watermark, and their
order) stays true: an :class:`Arrangement` is kept with the list of files it is of, and the hidden columns are read once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hotpot.experience.lake import ROW_COLUMN, SEGMENT_COLUMN
from hotpot.experience.snapshot import TableSnapshot

_HIDDEN = (SEGMENT_COLUMN, ROW_COLUMN)

_ROW_BITS = 32
"""Bits of a row's number in its segment; what is above them numbers the segment."""

_LEAST_STRETCH = 64
"""Rows that a stretch in order has on average, or rows are taken one by one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrangement:
    """Where in ``paths``, one after the other, the rows up to ``watermark`` lie, in the order they were recorded.

    ``stretches`` int64 ``[n, 2]``: begin and length of rows in order; or None, and ``rows`` int64 ``[k]`` has each row.
    """

    paths: tuple[str, ...]
    watermark: int
    stretches: NDArray[np.int64] | None
    rows: NDArray[np.int64] | None = None

    def fits(self, table: TableSnapshot, watermark: int) -> bool:
        """Whether it is of these files at this watermark."""
        return self.paths == table.paths and self.watermark == watermark

    def apply(self, data: pa.Table) -> pa.Table:
        """Return the rows of ``data`` (those of all the files) that count, in order; no copy where they lie in stretches."""
        if self.stretches is None:
            return data.take(self.rows if self.rows is not None else np.zeros(0, np.int64))
        pieces = [data.slice(begin, length) for begin, length in self.stretches.tolist()]
        return pa.concat_tables(pieces) if pieces else data.slice(0, 0)


def read_columns(
    table: TableSnapshot, watermark: int, schema: pa.Schema, known: Arrangement | None = None
) -> tuple[pa.Table, Arrangement] | None:
    """Return the columns of ``schema`` from lake and log, in recorded order, and the arrangement of the files.

    ``known`` is an arrangement from before; it is used where it fits. Returns None where only SQL can answer: a file
    lies elsewhere than on this machine, or was written before one of the columns was there. Raises ``OSError`` or
    ``ArrowException`` where a file can't be read.
    """
    if any("://" in path for path in table.paths):
        return None
    if known is not None and not known.fits(table, watermark):
        known = None
    hidden = [] if known is not None else [pa.field(name, pa.int64()) for name in _HIDDEN]
    wanted = pa.schema([*hidden, *schema])
    pieces: list[pa.Table] = []
    for path in table.paths:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            if not set(wanted.names) <= set(file.schema_arrow.names):
                return None
            pieces.append(file.read(wanted.names).select(wanted.names).cast(wanted))
    stored = pa.concat_tables(pieces) if pieces else wanted.empty_table()
    arrangement = known or _arranged(table.paths, watermark, stored)
    rows = arrangement.apply(stored.select(schema.names))
    return pa.concat_tables([rows, table.tail.select(schema.names).cast(rows.schema)]).cast(
        schema
    ), arrangement


def _arranged(paths: Sequence[str], watermark: int, stored: pa.Table) -> Arrangement:
    segments = stored.column(SEGMENT_COLUMN).to_numpy()
    # One number for the place in the record: the segment above, the row in it below.
    places = (segments << _ROW_BITS) | stored.column(ROW_COLUMN).to_numpy()
    complete = segments <= watermark
    # A segment's rows in a file are a stretch in order. Compaction puts whole files together, in any order.
    breaks = (places[1:] < places[:-1]) | (complete[1:] != complete[:-1])
    if breaks.any():
        breaks |= segments[1:] != segments[:-1]
    edges = np.flatnonzero(np.concatenate([[True], breaks, [True]])) if len(places) else np.zeros(1, np.int64)
    begins, ends = edges[:-1], edges[1:]
    begins, ends = begins[complete[begins]], ends[complete[begins]]
    order = np.argsort(places[begins])
    begins, ends = begins[order], ends[order]
    overlap = (places[begins[1:]] < places[ends[:-1] - 1]).any()
    if overlap or len(begins) * _LEAST_STRETCH > len(places) + _LEAST_STRETCH:
        rows = np.flatnonzero(complete)
        rows = rows[np.argsort(places[rows], kind="stable")]
        return Arrangement(paths=tuple(paths), watermark=watermark, stretches=None, rows=rows)
    stretches = np.stack([begins, ends - begins], axis=1)
    return Arrangement(paths=tuple(paths), watermark=watermark, stretches=stretches)
