"""Compaction: many small files of a table become few large ones.

Owns one Delta commit per table. Removes no file: readers hold file lists, and a vacuum takes what nobody needs after
its retention. A writer may append meanwhile; Delta puts the two commits in a row. Rows keep their columns ``_segment``
and ``_row``, which are the order of recording; files never were.

Safe to kill at any moment and to repeat: a table is compacted or it is not, and what a killed compaction wrote is an
orphan that a vacuum sweeps.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from deltalake import CommitProperties
from deltalake.exceptions import CommitFailedError

from hotpot.experience.crashpoints import reach
from hotpot.experience.lake.encoding import writer_properties
from hotpot.experience.lake.lake import RUN_COLUMN, Lake
from hotpot.experience.maintenance.lock import maintaining
from hotpot.experience.maintenance.tables import LAKE_TABLES, data_files, is_partitioned
from hotpot.experience.reading.reader import RunReader

TARGET_BYTES = 128 * 1024 * 1024
"""Size a file grows to before compaction leaves it alone."""

TRIES = 4
"""Tries of one table against commits that compaction can't stand beside (another compaction, a deletion)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """What became of one table's files."""

    table: str
    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int
    seconds: float


def compact(
    reader: RunReader, *, tables: Sequence[str] = LAKE_TABLES, target_bytes: int = TARGET_BYTES
) -> list[Compacted]:
    """Compact the run's files in ``tables``; returns one report for each table there is.

    Raises :class:`hotpot.errors.RunFolderError` where another maintenance goes on, and
    :class:`hotpot.errors.StoreError` where the lake can't be read or written.
    """
    with maintaining(reader):
        reports = [compact_table(reader.lake, name, target_bytes=target_bytes) for name in tables]
    return [report for report in reports if report is not None]


def compact_table(lake: Lake, table: str, *, target_bytes: int = TARGET_BYTES) -> Compacted | None:
    """Compact the run's files in one table, durably; None where the lake has no such table.

    Lets :data:`hotpot.experience.lake.lake.LAKE_ERRORS` through, as writing does.
    """
    begin = time.monotonic()
    before = data_files(lake, table)
    if not before:
        return None
    if len(before) > 1:
        _rewrite(lake, table, target_bytes)
        reach("compact_written")
        lake.sync(table)
        reach("compact_after")
    after = data_files(lake, table)
    return Compacted(
        table=table,
        files_before=len(before),
        files_after=len(after),
        bytes_before=sum(file.size for file in before),
        bytes_after=sum(file.size for file in after),
        seconds=time.monotonic() - begin,
    )


def _rewrite(lake: Lake, table: str, target_bytes: int) -> None:
    for attempt in range(1, TRIES + 1):
        handle = lake.open_table(table)
        if handle is None:
            return
        reach("compact_before")
        try:
            handle.optimize.compact(
                partition_filters=[(RUN_COLUMN, "=", lake.writer)] if is_partitioned(handle) else None,
                target_size=target_bytes,
                max_concurrent_tasks=1,
                writer_properties=writer_properties(table),
                commit_properties=CommitProperties(
                    custom_metadata={"hotpot.run": lake.writer, "hotpot.maintenance": "compact"}
                ),
            )
        except CommitFailedError:
            lake.forget()
            if attempt == TRIES:
                raise
        else:
            return
