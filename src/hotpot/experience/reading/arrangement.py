"""Where the rows that count lie in some files, in the order they were recorded: worked out once, applied to any column.

Pure: knows the hidden columns' values and nothing of files. A segment's rows in a file are a stretch in order;
compaction puts whole files together, in any order. So an arrangement is a short list of stretches, and taking one
copies nothing; only where rows are really shuffled it is a list of rows.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_ROW_BITS = 32
"""Bits of a row's number in its segment; what is above them numbers the segment."""

_LEAST_STRETCH = 64
"""Rows that a stretch has on average, or rows are taken one by one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrangement:
    """``stretches`` int64 ``[n, 2]``: begin and length of rows in order, one after the other; or None, and ``rows``
    int64 ``[k]`` has each row."""

    stretches: NDArray[np.int64] | None
    rows: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, segments: NDArray[np.int64], rows: NDArray[np.int64], watermark: int) -> Self:
        """Return the arrangement of rows with these ``_segment`` and ``_row`` values, up to the watermark."""
        # One number for the place in the record: the segment above, the row in it below.
        places = (segments << _ROW_BITS) | rows
        complete = segments <= watermark
        breaks = (places[1:] < places[:-1]) | (complete[1:] != complete[:-1])
        if breaks.any():
            breaks |= segments[1:] != segments[:-1]
        edges = (
            np.flatnonzero(np.concatenate([[True], breaks, [True]])) if len(places) else np.zeros(1, np.int64)
        )
        begins, ends = edges[:-1], edges[1:]
        begins, ends = begins[complete[begins]], ends[complete[begins]]
        order = np.argsort(places[begins])
        begins, ends = begins[order], ends[order]
        overlap = bool((places[begins[1:]] < places[ends[:-1] - 1]).any())
        if overlap or len(begins) * _LEAST_STRETCH > len(places) + _LEAST_STRETCH:
            counted = np.flatnonzero(complete)
            return cls(stretches=None, rows=counted[np.argsort(places[counted], kind="stable")])
        return cls(stretches=np.stack([begins, ends - begins], axis=1))

    def apply(self, data: pa.Table) -> pa.Table:
        """Return the rows of ``data`` that count, in order; no copy where they lie in stretches."""
        if self.stretches is None:
            return data.take(self.rows if self.rows is not None else np.zeros(0, np.int64))
        pieces = [data.slice(begin, length) for begin, length in self.stretches.tolist()]
        return pa.concat_tables(pieces) if pieces else data.slice(0, 0)
