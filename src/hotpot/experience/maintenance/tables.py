"""One table of a lake as files: what Delta's log says there is, and what really lies there.

Owns listing, opening and removing of files, on a folder or on S3 alike. Knows no column but the hidden ones. Paths are
relative to the table's folder, as Delta writes them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from hotpot.errors import StoreError
from hotpot.experience.disk import sync_file, sync_folder
from hotpot.experience.lake.lake import RUN_COLUMN, Lake
from hotpot.types import TABLES

SEGMENTS = "segments"
"""The table of watermarks, which every lake has besides those of :data:`hotpot.types.TABLES`."""

LAKE_TABLES = (*TABLES, SEGMENTS)
"""Every table a lake may have."""

LOG_FOLDER = "_delta_log"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One Parquet file as Delta's log has it. ``num_rows`` is None where the log does not say."""

    path: str
    size: int
    num_rows: int | None


class TableFolder:
    """The files of one table. ``filesystem`` and ``root`` say where; ``own`` is what the paths of one run begin with."""

    def __init__(self, lake: Lake, table: str, *, partitioned: bool) -> None:
        self._filesystem, base = lake.location.filesystem()
        self.table = table
        self.root = f"{base}/{table}"
        self.uri = lake.location.table_uri(table)
        self.own = f"{RUN_COLUMN}={lake.writer}/" if partitioned else ""

    def listing(self, *, all_runs: bool = False) -> dict[str, int]:
        """Return the size of every data file of the run that lies there, known to Delta's log or not."""
        return {
            path: size
            for path, size in self._listed("")
            if not path.startswith("_delta") and (all_runs or path.startswith(self.own))
        }

    def log_sizes(self) -> dict[str, int]:
        """Return the size of every file of Delta's log, ascending by path."""
        return dict(sorted(self._listed(LOG_FOLDER)))

    def open(self, path: str) -> pq.ParquetFile:
        """Open a Parquet file. Raises OSError and Arrow's errors where it can't be read."""
        return pq.ParquetFile(self._filesystem.open_input_file(f"{self.root}/{path}"))

    def read(self, path: str) -> bytes:
        """Return the bytes of a file."""
        with self._filesystem.open_input_file(f"{self.root}/{path}") as file:
            return bytes(file.read())

    def ends_with(self, path: str, size: int, ending: bytes) -> bool:
        """Whether a file of ``size`` bytes ends so; one that went away meanwhile does."""
        try:
            with self._filesystem.open_input_file(f"{self.root}/{path}") as file:
                file.seek(max(0, size - len(ending)))
                return bytes(file.read()) == ending
        except FileNotFoundError:
            return True

    def replace(self, path: str, data: bytes) -> None:
        """Put ``data`` in the place of a file, at once: a reader sees the old file or the new one, also after a power cut."""
        target = f"{self.root}/{path}"
        # A put to S3 is atomic as it is; a local file needs the way over a second name, which Delta ignores.
        draft = f"{self.root}/{LOG_FOLDER}/.{path.rpartition('/')[2]}.draft" if self.is_local else target
        with self._filesystem.open_output_stream(draft) as file:
            file.write(data)
        if draft != target:
            # Whoever made the file durable under this name before won't look at it again.
            sync_file(draft)
            self._filesystem.move(draft, target)
            sync_folder(Path(target).parent)

    def remove(self, path: str) -> None:
        """Delete a file; one that is gone already is none to worry about."""
        try:
            self._filesystem.delete_file(f"{self.root}/{path}")
        except FileNotFoundError:
            return

    @property
    def is_local(self) -> bool:
        """Whether the table lies in a folder of this machine."""
        return isinstance(self._filesystem, fs.LocalFileSystem)

    def _listed(self, folder: str) -> Iterator[tuple[str, int]]:
        path = f"{self.root}/{folder}".rstrip("/")
        selector = fs.FileSelector(path, recursive=True, allow_not_found=True)
        for info in self._filesystem.get_file_info(selector):
            if info.type == fs.FileType.File:
                yield info.path.removeprefix(f"{self.root}/"), int(info.size)


def folder_of(lake: Lake, table: str) -> TableFolder | None:
    """Return the files of a table, or None where the lake has no such table yet."""
    handle = lake.open_table(table)
    if handle is None:
        return None
    return TableFolder(lake, table, partitioned=is_partitioned(handle))


def is_partitioned(handle: Any) -> bool:
    """Whether the table keeps the runs of a shared lake apart."""
    return RUN_COLUMN in handle.metadata().partition_columns


def data_files(lake: Lake, table: str) -> list[DataFile]:
    """Return the run's files of a table as Delta's log has them now; none where there is no such table yet."""
    handle = lake.open_table(table)
    if handle is None:
        return []
    own = f"{RUN_COLUMN}={lake.writer}/" if is_partitioned(handle) else ""
    actions = pa.table(handle.get_add_actions(flatten=True))
    columns: list[list[Any]] = [
        actions.column(name).to_pylist() for name in ("path", "size_bytes", "num_records")
    ]
    return [
        DataFile(path=unquote(path), size=int(size), num_rows=rows)
        for path, size, rows in zip(*columns, strict=True)
        if path.startswith(own)
    ]


def read_columns(folder: TableFolder, files: list[DataFile], columns: list[str]) -> pa.Table:
    """Return some columns of a table's files in one. Raises :class:`StoreError` naming the file that can't be read."""
    pieces = []
    for file in files:
        try:
            with folder.open(file.path) as parquet:
                pieces.append(plain(parquet.read(columns=columns)))
        except (OSError, pa.ArrowException) as error:
            raise StoreError(
                f"can't read {folder.uri}/{file.path}: {error}; restore it from a copy, "
                "`hotpot lake verify` lists all that is damaged"
            ) from error
    return pa.concat_tables(pieces, promote_options="permissive")


def plain(table: pa.Table) -> pa.Table:
    """Return the columns of a file as text and lists of text: one that a deletion rewrote says string_view instead."""
    return table.cast(pa.schema([field.with_type(_without_views(field.type)) for field in table.schema]))


def _without_views(kind: pa.DataType) -> pa.DataType:
    if kind == pa.string_view():
        return pa.string()
    if isinstance(kind, pa.ListType):
        return pa.list_(kind.value_field.with_type(_without_views(kind.value_type)))
    return kind
