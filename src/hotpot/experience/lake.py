"""The lake: one Delta table per table of :data:`hotpot.types.TABLES`, and the watermark that makes them one.

The only place that touches deltalake. Knows Arrow tables and log segment numbers, nothing of records or the ledger.

How several tables change as one: each commit carries the log segment it came from twice, as an application transaction
(so that a segment is never written twice, checked before writing, since Delta itself does not refuse a repeat) and as
the column ``_segment`` of every row. When all tables of a segment are committed, one row is appended to the table
``segments``: the watermark. Segments are committed in order, so rows with ``_segment`` up to the watermark are complete
and what lies above is the half-finished work of a writer that is still busy, or died and will repeat it. The column,
not a Delta version, draws that line because it survives compaction. Once a run is at rest no row is above it.

What a commit wrote is on the device only after :meth:`Lake.sync` (Delta itself does not wait for that): once for the tables of a
segment before its watermark, once for the watermark before the log segment goes. After a failed sync the lake refuses
everything, since what is on the device is unknown. A segment that is found committed already is taken at its word only
where all its files are there in full length.

The column ``_row`` counts the rows of a segment, across its tables: (``_segment``, ``_row``) is the order of recording
(:mod:`hotpot.experience.order`), which Delta itself does not keep.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, WriterProperties, write_deltalake
from deltalake.exceptions import DeltaError, TableNotFoundError
from numpy.typing import NDArray

from hotpot.errors import StoreError
from hotpot.experience.crashpoints import reach
from hotpot.experience.schema import SCHEMAS
from hotpot.experience.wal import sync_folder
from hotpot.types import SCHEMA_VERSION, TABLES

SEGMENT_COLUMN = "_segment"
"""Name of the hidden column that says which log segment a row came through."""

ROW_COLUMN = "_row"
"""Name of the hidden column that counts the rows of a segment across its tables, from 0."""

LAKE_ERRORS = (DeltaError, OSError, pa.ArrowException)
"""What a failing storage raises here."""

_CONFIGURATION = {"delta.checkpointInterval": "10"}

_WRITER = WriterProperties(compression="ZSTD", compression_level=1)


def _described(name: str, kind: pa.DataType, meaning: str, unit: str = "") -> "pa.Field[Any]":
    return pa.field(name, kind, nullable=False, metadata={"meaning": meaning, "unit": unit})


_HIDDEN_FIELDS = (
    _described(
        SEGMENT_COLUMN,
        pa.int64(),
        "Log segment the row came through; complete up to the last one in table segments",
    ),
    _described(ROW_COLUMN, pa.int64(), "Place of the row among all rows of its segment, across tables"),
)

SEGMENTS_SCHEMA = pa.schema(
    [
        _described("segment", pa.int64(), "Log segment whose records are all in the lake"),
        _described("num_rows", pa.int64(), "Rows the segment brought, all tables together", "rows"),
        _described(
            "tables",
            pa.list_(pa.field("element", pa.string(), nullable=False)),
            "Tables it brought rows to",
        ),
        _described(
            "table_rows",
            pa.list_(pa.field("element", pa.int64(), nullable=False)),
            "Rows it brought to each",
            "rows",
        ),
        _described("time_us", pa.int64(), "When it was published", "microseconds since the epoch"),
        _described("schema_version", pa.int64(), "Version of the schema the rows keep"),
    ],
    metadata={"table": "segments", "schema_version": str(SCHEMA_VERSION)},
)
"""Schema of table ``segments``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFiles:
    """The Parquet files of one table at one Delta version."""

    version: int
    paths: tuple[str, ...]


class Lake:
    """The Delta tables under one folder. One writer; any number of readers (each with an instance of its own).

    Raises :class:`StoreError` where a table can't be read; writing lets :data:`LAKE_ERRORS` through to the caller, who
    knows whether to try again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handles: dict[str, DeltaTable] = {}
        self._unsynced: set[str] = set()
        self._synced: set[Path] = set()
        self._broken: str | None = None

    def watermark(self) -> int:
        """Return the number of the last complete segment; 0 where there is none."""
        files = self._files("segments")
        if files is None:
            return 0
        return int(self._maximum(self._handles["segments"], "segment"))

    def files(self, table: str) -> TableFiles | None:
        """Return the files of ``table`` now, or None where the lake has no such table yet."""
        return self._files(table)

    def open_table(self, table: str) -> DeltaTable | None:
        """Return ``table`` as Delta has it now, or None where the lake has no such table yet."""
        return self._handles[table] if self._files(table) is not None else None

    def commit(self, table: str, segment: int, rows: pa.Table, places: NDArray[np.int64]) -> bool:
        """Append ``rows`` of ``segment`` to ``table``; return False where that segment is in it already.

        ``places`` are their numbers in the segment (:func:`hotpot.experience.order.row_numbers`).
        """
        schema = pa.schema([*_HIDDEN_FIELDS, *SCHEMAS[table]])
        segments = pa.repeat(pa.scalar(segment, pa.int64()), rows.num_rows)
        data = pa.Table.from_arrays([segments, pa.array(places), *rows.columns], schema=schema)
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
        return self._append("segments", segment, data, "Log segments whose records are all in the lake.")

    def sync(self, *tables: str) -> None:
        """Wait until the files of ``tables`` and of every table appended to since the last sync are on the device.

        Their folders too. A writer that takes a run over does not know what its predecessor waited for.

        Raises :class:`StoreError` where that fails, and from then on.
        """
        self._check()
        self._unsynced.update(tables)
        try:
            for name in sorted(self._unsynced):
                for folder in (self._folder / name, self._folder / name / "_delta_log"):
                    self._sync_new(folder)
            sync_folder(self._folder)
        except OSError as error:
            self._broken = str(error)
            self._check()
        self._unsynced.clear()

    def forget(self) -> None:
        """Drop what is remembered of the tables' state, after a failure left it uncertain."""
        self._handles.clear()

    def _append(self, name: str, segment: int, data: pa.Table, description: str) -> bool:
        self._check()
        self._unsynced.add(name)
        application = f"hotpot:{name}"
        handle = self._handles.get(name) or self._open_or_create(name, data.schema, description)
        last = handle.transaction_version(application)
        if last is not None and last >= segment:
            self._check_whole(name, handle)
            return False
        reach(f"lake_before_{name}")
        write_deltalake(
            handle,
            data,
            mode="append",
            writer_properties=_WRITER,
            commit_properties=CommitProperties(
                app_transactions=[Transaction(application, segment)],
                custom_metadata={"hotpot.segment": str(segment)},
            ),
        )
        self._handles[name] = handle
        reach(f"lake_after_{name}")
        return True

    def _check(self) -> None:
        if self._broken is not None:
            raise StoreError(
                f"the lake {self._folder} could not be made durable ({self._broken}); stop, check the disk, resume"
            )

    def _sync_new(self, folder: Path) -> None:
        # Files of a Delta table are written once under a name of their own, all but the pointer to the last checkpoint.
        new = [
            path
            for path in folder.iterdir()
            if path.is_file() and (path not in self._synced or path.name == "_last_checkpoint")
        ]
        for path in new:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        if new:
            sync_folder(folder)
        self._synced.update(new)

    def _check_whole(self, name: str, handle: DeltaTable) -> None:
        actions = pa.table(handle.get_add_actions(flatten=True)).select(["path", "size_bytes"])
        for action in actions.to_pylist():
            path = self._folder / name / action["path"]
            size = path.stat().st_size if path.exists() else 0
            if size != action["size_bytes"]:
                raise StoreError(
                    f"{path} has {size} bytes, the table's log says {action['size_bytes']}: a power cut took what was not "
                    f"durable yet; move the last file of {path.parent / '_delta_log'} away and resume, "
                    "the records are in the log"
                )

    def _open_or_create(self, name: str, schema: pa.Schema, description: str) -> DeltaTable:
        path = str(self._folder / name)
        try:
            return DeltaTable(path)
        except TableNotFoundError:
            return DeltaTable.create(
                path,
                schema=schema,
                name=name,
                description=" ".join(description.split()),
                configuration=_CONFIGURATION,
            )

    def _files(self, name: str) -> TableFiles | None:
        try:
            handle = self._handles.get(name)
            if handle is None:
                handle = DeltaTable(str(self._folder / name))
            else:
                handle.update_incremental()
        except TableNotFoundError:
            return None
        except LAKE_ERRORS as error:
            self._handles.pop(name, None)
            raise StoreError(f"can't read lake table {name} in {self._folder}: {error}") from error
        self._handles[name] = handle
        actions = pa.table(handle.get_add_actions(flatten=True))
        paths: list[Any] = actions.column("path").to_pylist()
        root = self._folder / name
        return TableFiles(version=handle.version(), paths=tuple(str(root / path) for path in paths))

    @staticmethod
    def _maximum(handle: DeltaTable, column: str) -> int:
        actions = pa.table(handle.get_add_actions(flatten=True))
        values: list[Any] = actions.column(f"max.{column}").to_pylist() if actions.num_rows else []
        return max((int(value) for value in values), default=0)
