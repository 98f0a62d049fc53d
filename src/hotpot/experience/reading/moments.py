"""One moment of a run's record: where it is cut so that what came later is not seen.

Owns the cut and how it is found from an update's number. Knows SQL conditions and the lake's table ``segments``. It
stands on the columns ``_segment`` and ``_row`` alone, so it survives compaction and vacuum: tables only grow, but for
deletions, which are gone from every moment.
"""

from dataclasses import dataclass

import pyarrow.parquet as pq

from hotpot.errors import StoreError
from hotpot.experience.lake.lake import LAKE_ERRORS, ROW_COLUMN, SEGMENT_COLUMN, Lake, plain

FIRST_ORDERED_VERSION = 2
"""Schema version since which ``_row`` counts across tables; older log segments are seen whole or not at all."""

_WHOLE = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The last row that is seen: rows of earlier log segments, and of this one up to number ``row``."""

    segment: int
    row: int

    def condition(self) -> str:
        """Return the cut as an SQL condition over the hidden columns."""
        return (
            f"({SEGMENT_COLUMN} < {self.segment} OR "
            f"({SEGMENT_COLUMN} = {self.segment} AND {ROW_COLUMN} <= {self.row}))"
        )


def cut_at(lake: Lake, segment: int, row: int) -> Cut:
    """Return the cut behind the row ``row`` of ``segment``, or behind the whole segment where it is an old one.

    Raises :class:`StoreError` where the lake can't be read.
    """
    return Cut(segment=segment, row=row if _is_ordered(lake, segment) else _WHOLE)


def _is_ordered(lake: Lake, segment: int) -> bool:
    files = lake.files("segments")
    if files is None:
        return True  # all is in the log still, which this release wrote
    filesystem, base = lake.location.filesystem()
    for path in files.paths:
        place = base + path.removeprefix(lake.location.uri)
        try:
            table = pq.read_table(place, columns=["segment", "schema_version"], filesystem=filesystem)
        except LAKE_ERRORS as error:
            raise StoreError(
                f"can't read {path} of the lake: {plain(error)}; check the storage, or restore the file from a copy"
            ) from error
        for number, version in zip(*(column.to_pylist() for column in table.columns), strict=True):
            if number == segment:
                return bool(version >= FIRST_ORDERED_VERSION)
    return True
