"""Reading a table piece by piece, in the order of recording, so that no table has to fit into memory.

Owns the pieces: ranges of log segments with about a given number of rows.
"""

from collections.abc import Iterator, Sequence

import pyarrow as pa

from hotpot.experience.lake.lake import SEGMENT_COLUMN
from hotpot.experience.reading.reader import RunReader

ROWS_A_PIECE = 65_536


def pieces(
    reader: RunReader, table: str, columns: Sequence[str] | None = None, *, rows: int = ROWS_A_PIECE
) -> Iterator[pa.Table]:
    """Yield ``table`` in pieces of at least ``rows`` rows (but the last), none where it is empty.

    ``reader`` should be one of a single moment (:meth:`RunReader.at_once`), else the pieces are of different ones.
    """
    counts = reader.sql(
        f"SELECT {SEGMENT_COLUMN}, count(*) AS n FROM recorded_{table} GROUP BY ALL ORDER BY ALL"
    ).to_pylist()
    begin, there = None, 0
    for number, count in enumerate(counts):
        begin = count[SEGMENT_COLUMN] if begin is None else begin
        there += count["n"]
        if there >= rows or number == len(counts) - 1:
            where = f"{SEGMENT_COLUMN} BETWEEN {begin} AND {count[SEGMENT_COLUMN]}"
            yield reader.table(table, columns, where=where)
            begin, there = None, 0
