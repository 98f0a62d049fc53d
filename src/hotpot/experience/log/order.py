"""The order of recording inside a log segment, across its tables.

Owns the numbers of the hidden column ``_row``. Knows frames, no lake and no SQL. Invariants: rows are numbered from 0
through the whole segment, frame by frame; in a frame the row of ``updates`` comes last, so everything recorded with an
update or before it has a smaller number than the update's own row. (``_segment``, ``_row``) of that row is the moment
the update was recorded, for every table at once, whatever files the rows lie in by now.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotpot.experience.log.wal import Frame
from hotpot.types import TABLES

_LAST = "updates"
_IN_FRAME = (*(name for name in TABLES if name != _LAST), _LAST)


def row_numbers(frames: Sequence[Frame]) -> dict[str, NDArray[np.int64]]:
    """Return, by table, the number in the segment of each row the frames bring to it: int64 ``[rows]``, ascending."""
    found: dict[str, list[NDArray[np.int64]]] = {}
    begin = 0
    for frame in frames:
        for name in _IN_FRAME:
            table = frame.table(name)
            if table is not None:
                end = begin + table.num_rows
                found.setdefault(name, []).append(np.arange(begin, end))
                begin = end
    return {name: np.concatenate(pieces) for name, pieces in found.items()}
