"""The lake: one Delta table per table of :data:`hotpot.types.TABLES`, and the watermark that makes them one.

Knows Arrow tables and log segment numbers, nothing of records or the ledger.

How several tables change as one: each commit carries the log segment it came from twice, as an application transaction
(so that a segment is never written twice, checked before writing, since Delta itself does not refuse a repeat) and as
the column ``_segment`` of every row. When all tables of a segment are committed, one row is appended to the table
``segments``, and its transaction is the watermark. A run's segments are committed in order, so its rows with
``_segment`` up to the watermark are complete and what lies above is the half-finished work of a writer that is still
busy, or died and will repeat it. The column, not a Delta version, draws that line because it survives compaction. Once
a run is at rest no row is above it.

Several runs share a lake: every table is partitioned by ``_run``, and transactions and watermark are a run's own, so
that writers never wait for one another. Two commits at the same moment both succeed, one after the other; a commit
that lost against a change it can't stand beside is tried again on the newer table. Lakes that were written before runs
could share one have neither partition nor run in their transactions; they are read and written as they are.

On a local folder what a commit wrote is on the device only after :meth:`Lake.sync` (Delta itself does not wait for
that): once for the tables of a segment before its watermark, once for the watermark before the log segment goes. After
a failed sync the lake refuses everything, since what is on the device is unknown. A segment that is found committed
already is taken at its word only where all its files are there in full length. S3 acknowledges only what is durable.

The column ``_row`` counts the rows of a segment, across its tables: (``_segment``, ``_row``) is the order of recording
(:mod:`hotpot.experience.log.order`), which Delta itself does not keep.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import (
    CommitFailedError,
    DeltaError,
    DeltaProtocolError,
    SchemaMismatchError,
    TableNotFoundError,
)
from numpy.typing import NDArray

from hotpot.errors import StoreError, UsageError
from hotpot.experience.crashpoints import reach
from hotpot.experience.disk import FolderSync, sync_folder
from hotpot.experience.lake.encoding import writer_properties
from hotpot.experience.lake.layout import (
    ORDER_FIELDS,
    ROW_COLUMN,
    RUN_COLUMN,
    RUN_FIELD,
    SEGMENT_COLUMN,
    SEGMENTS,
    SEGMENTS_SCHEMA,
    WRITER_NAME,
)
from hotpot.experience.lake.storage import LakeLocation
from hotpot.experience.records.schema import SCHEMAS
from hotpot.types import SCHEMA_VERSION, TABLES

__all__ = ["LAKE_ERRORS", "ROW_COLUMN", "RUN_COLUMN", "SEGMENT_COLUMN", "Lake", "TableFiles", "plain"]

LAKE_ERRORS = (DeltaError, OSError, pa.ArrowException)
"""What a failing storage raises here."""

_PERMANENT = (SchemaMismatchError, DeltaProtocolError)

COMMIT_TRIES = 8
"""Tries of one commit against other writers' changes, before the caller hears of it."""

_CONFIGURATION = {"delta.checkpointInterval": "10"}


def plain(error: BaseException) -> str:
    """Return an error's text on one line, without the colours deltalake gives it."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|↳", " ", str(error)).split())[:600]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFiles:
    """The Parquet files of one run in one table at one Delta version: absolute paths, or ``s3://`` addresses."""

    version: int
    paths: tuple[str, ...]


class Lake:
    """One run's view of the Delta tables at one place. One writer for each run; any number of readers (each with an
    instance of its own).

    Raises :class:`StoreError` where a table can't be read; writing lets :data:`LAKE_ERRORS` through to the caller, who
    knows whether to try again.
    """

    def __init__(self, location: LakeLocation, *, writer: str) -> None:
        if not WRITER_NAME.fullmatch(writer):
            raise UsageError(f"run id {writer!r} can't name a partition; use letters, digits, '.', '_', '-'")
        self.location = location
        self.writer = writer
        self._options = location.storage_options()
        self._handles: dict[str, DeltaTable] = {}
        self._unsynced: set[str] = set()
        self._device = FolderSync()
        self._broken: str | None = None

    def watermark(self) -> int:
        """Return the number of the run's last complete segment; 0 where there is none."""
        handle = self.open_table(SEGMENTS)
        last = None if handle is None else handle.transaction_version(self._application(SEGMENTS, handle))
        return int(last or 0)

    def open_table(self, name: str) -> DeltaTable | None:
        """Return the Delta table as it is now, or None where the lake has no such table yet.

        The handle stays the lake's: read from it before the next call. Raises :class:`StoreError` where it can't be read.
        """
        try:
            return self._opened(name)
        except LAKE_ERRORS as error:
            self._handles.pop(name, None)
            raise StoreError(
                f"can't read lake table {name} in {self.location.uri}: {plain(error)}; check the storage, try again"
            ) from error

    def files(self, name: str) -> TableFiles | None:
        """Return the run's files of a table now, or None where the lake has no such table yet.

        Other runs' files are left out by their partition. (By path: asking Delta to filter costs a hundred times as much.)
        """
        handle = self.open_table(name)
        if handle is None:
            return None
        # deltalake gives addresses with the folder's odd letters escaped; what follows the table's own has none.
        base = len(handle.table_uri.rstrip("/").removeprefix("file://")) + 1
        root = self.location.table_uri(name)
        own = _own_paths(handle, self.writer)
        paths = tuple(f"{root}/{uri[base:]}" for uri in handle.file_uris() if uri.startswith(own, base))
        return TableFiles(version=handle.version(), paths=paths)

    def commit(self, table: str, segment: int, rows: pa.Table, numbers: NDArray[np.int64]) -> bool:
        """Append ``rows`` of ``segment`` to ``table``; return False where that segment is in it already.

        ``numbers`` are theirs in the segment (:func:`hotpot.experience.log.order.row_numbers`).
        """
        schema = pa.schema([*ORDER_FIELDS, *SCHEMAS[table]])
        segments = pa.repeat(pa.scalar(segment, pa.int64()), rows.num_rows)
        data = pa.Table.from_arrays([segments, pa.array(numbers), *rows.columns], schema=schema)
        return self._append(table, segment, data, TABLES[table].__doc__ or table)

    def publish(self, segment: int, rows_by_table: Mapping[str, int]) -> bool:
        """Append the watermark of ``segment``, making its rows visible; return False where it was there already."""
        row: dict[str, list[Any]] = {
            "segment": [segment],
            "num_rows": [sum(rows_by_table.values())],
            "tables": [list(rows_by_table)],
            "table_rows": [list(rows_by_table.values())],
            "time_us": [time.time_ns() // 1_000],
            "schema_version": [SCHEMA_VERSION],
        }
        data = pa.Table.from_pydict(row, schema=SEGMENTS_SCHEMA)
        return self._append(SEGMENTS, segment, data, "Log segments whose records are all in the lake.")

    def sync(self, *tables: str) -> None:
        """Wait until the files of ``tables`` and of every table appended to since the last sync are on the device.

        Their folders too. A writer that takes a run over does not know what its predecessor waited for. Raises
        :class:`StoreError` where that fails, and from then on.
        """
        self._check()
        self._unsynced.update(tables)
        if self.location.is_local:
            try:
                reach("lake_sync")
                self._sync_local()
            except OSError as error:
                self._broken = str(error)
                self._check()
        self._unsynced.clear()

    def forget(self) -> None:
        """Drop what is remembered of the tables' state, after a failure left it uncertain."""
        self._handles.clear()

    def _sync_local(self) -> None:
        root = self.location.folder
        for name in sorted(self._unsynced):
            for folder in (f"{RUN_COLUMN}={self.writer}", "_delta_log", "."):
                self._device.sync(root / name / folder)
            sync_folder(root / name)
        sync_folder(root)

    def _append(self, name: str, segment: int, data: pa.Table, description: str) -> bool:
        self._check()
        self._unsynced.add(name)
        for attempt in range(1, COMMIT_TRIES + 1):
            handle = self._opened(name) or self._created(name, data.schema, description)
            application = self._application(name, handle)
            last = handle.transaction_version(application)
            if last is not None and last >= segment:
                self._check_whole(name, handle)
                return False
            try:
                self._write(name, handle, data, application, segment)
                return True
            except CommitFailedError:
                # Another commit came between that this one can't stand beside: look again, at the newer table.
                self._handles.pop(name, None)
                if attempt == COMMIT_TRIES:
                    raise
        raise AssertionError("unreachable")

    def _write(self, name: str, handle: DeltaTable, data: pa.Table, application: str, segment: int) -> None:
        rows = _laid_out(data, handle, self.writer)
        known = {field.name for field in handle.schema().fields}
        fresh = set(rows.column_names) - known
        rows = _fitting(rows, known)
        reach(f"lake_before_{name}")
        write_deltalake(
            handle,
            rows,
            mode="append",
            schema_mode="merge" if fresh else None,
            writer_properties=writer_properties(name),
            commit_properties=CommitProperties(
                app_transactions=[Transaction(application, segment)],
                custom_metadata={"hotpot.run": self.writer, "hotpot.segment": str(segment)},
            ),
        )
        reach(f"lake_after_{name}")

    def _application(self, name: str, handle: DeltaTable) -> str:
        return f"hotpot:{self.writer}:{name}" if _is_partitioned(handle) else f"hotpot:{name}"

    def _check(self) -> None:
        if self._broken is not None:
            raise StoreError(
                f"the lake {self.location.uri} could not be made durable ({self._broken}); stop, check the disk, resume"
            )

    def _check_whole(self, name: str, handle: DeltaTable) -> None:
        if not self.location.is_local:
            return
        root = self.location.folder / name
        actions = pa.table(handle.get_add_actions()).select(["path", "size_bytes"])
        own = _own_paths(handle, self.writer)
        for action in actions.to_pylist():
            if not action["path"].startswith(own):
                continue
            path = root / action["path"]
            size = path.stat().st_size if path.exists() else 0
            if size != action["size_bytes"]:
                raise StoreError(
                    f"{path} has {size} bytes, the table's log says {action['size_bytes']}: a power cut took what was not "
                    f"durable yet; move the last file of {root / '_delta_log'} away and resume, "
                    "the records are in the log"
                )

    def _opened(self, name: str) -> DeltaTable | None:
        handle = self._handles.get(name)
        try:
            if handle is None:
                handle = DeltaTable(self.location.table_uri(name), storage_options=self._options)
            else:
                handle.update_incremental()
        except TableNotFoundError:
            return None
        self._handles[name] = handle
        return handle

    def _created(self, name: str, schema: pa.Schema, description: str) -> DeltaTable:
        uri = self.location.table_uri(name)
        try:
            handle = DeltaTable.create(
                uri,
                schema=pa.schema([RUN_FIELD, *schema]),
                partition_by=[RUN_COLUMN],
                name=name,
                description=" ".join(description.split()),
                configuration=_CONFIGURATION,
                storage_options=self._options,
            )
        except DeltaError:
            # Another run made it a moment earlier.
            handle = DeltaTable(uri, storage_options=self._options)
        self._handles[name] = handle
        return handle


def is_permanent(error: BaseException) -> bool:
    """Whether a failure is about what the table is, which no waiting changes: another schema, a newer protocol."""
    # A refused merge of schemas comes as a plain DeltaError; its text is all that tells it from an outage.
    return isinstance(error, _PERMANENT) or (
        isinstance(error, DeltaError) and str(error).startswith("Schema error")
    )


def _is_partitioned(handle: DeltaTable) -> bool:
    return RUN_COLUMN in handle.metadata().partition_columns


def _own_paths(handle: DeltaTable, run: str) -> str:
    """Return how the paths of the run's files begin, from the table's folder."""
    return f"{RUN_COLUMN}={run}/" if _is_partitioned(handle) else ""


def _laid_out(data: pa.Table, handle: DeltaTable, run: str) -> pa.Table:
    """Return ``data`` in the layout of the table: with the run it is partitioned by, or without."""
    if not _is_partitioned(handle):
        return data
    runs: Any = pa.repeat(pa.scalar(run), data.num_rows)
    return data.add_column(0, RUN_FIELD, runs)


def _fitting(rows: pa.Table, known: set[str]) -> pa.Table:
    """Return ``rows`` such that a table made by another release takes them: what is new to it may be null, and what it
    knows keeps the meaning and unit that are written there (Delta takes no differing ones)."""
    fields = [
        field.remove_metadata() if field.name in known else field.with_nullable(True) for field in rows.schema
    ]
    return rows.cast(pa.schema(fields))
