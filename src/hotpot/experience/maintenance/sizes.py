"""The size report: where the bytes of a run's lake are, by table and by column.

Owns sums over Parquet footers. Reads no data. Bytes are those of the files Delta's newest version has; what a vacuum
would take is counted apart.
"""

from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from hotpot.errors import StoreError
from hotpot.experience.log.wal import segment_numbers, segment_path
from hotpot.experience.maintenance.tables import LAKE_TABLES, data_files, folder_of
from hotpot.experience.reading.reader import RunReader


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnSize:
    """One column of one table. ``num_values`` are a list column's elements; ``share`` is of the table's compressed bytes."""

    column: str
    compressed_bytes: int
    uncompressed_bytes: int
    share: float
    num_values: int
    bytes_per_value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSize:
    """One table: its files and rows, its columns from the largest, and the bytes that no longer count."""

    table: str
    num_files: int
    num_rows: int
    num_bytes: int
    unused_files: int
    unused_bytes: int
    delta_log_files: int
    delta_log_bytes: int
    columns: tuple[ColumnSize, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeReport:
    """A run's lake and log. ``log_bytes`` are those of the write-ahead log: what the lake has not taken yet."""

    tables: tuple[TableSize, ...]
    num_bytes: int
    log_segments: int
    log_bytes: int


@dataclass(slots=True)
class _Sum:
    compressed: int = 0
    uncompressed: int = 0
    values: int = 0


@dataclass(slots=True)
class _Sums:
    rows: int = 0
    columns: dict[str, _Sum] = field(default_factory=dict)

    def add(self, footer: pq.FileMetaData) -> None:
        self.rows += footer.num_rows
        for group in range(footer.num_row_groups):
            row_group = footer.row_group(group)
            for index in range(footer.num_columns):
                chunk = row_group.column(index)
                total = self.columns.setdefault(chunk.path_in_schema.partition(".")[0], _Sum())
                total.compressed += chunk.total_compressed_size
                total.uncompressed += chunk.total_uncompressed_size
                total.values += chunk.num_values


def sizes(reader: RunReader) -> SizeReport:
    """Return where the bytes of a run are. Raises :class:`StoreError` where a footer can't be read."""
    tables = tuple(found for name in LAKE_TABLES if (found := _table_size(reader, name)) is not None)
    logs = []
    if reader.run_folder is not None:
        folder = reader.run_folder / "wal"
        logs = [segment_path(folder, number) for number in segment_numbers(folder)]
    return SizeReport(
        tables=tables,
        num_bytes=sum(table.num_bytes for table in tables),
        log_segments=len(logs),
        log_bytes=sum(path.stat().st_size for path in logs if path.exists()),
    )


def _table_size(reader: RunReader, name: str) -> TableSize | None:
    folder, files = folder_of(reader.lake, name), data_files(reader.lake, name)
    if folder is None:
        return None
    sums = _Sums()
    for file in files:
        try:
            with folder.open(file.path) as parquet:
                sums.add(parquet.metadata)
        except (OSError, pa.ArrowException) as error:
            raise StoreError(
                f"can't read {folder.uri}/{file.path}: {error}; `hotpot lake verify` lists all that is damaged"
            ) from error
    used = {file.path for file in files}
    unused = [size for path, size in folder.listing().items() if path not in used]
    log = folder.log_sizes()
    return TableSize(
        table=name,
        num_files=len(files),
        num_rows=sums.rows,
        num_bytes=sum(file.size for file in files),
        unused_files=len(unused),
        unused_bytes=sum(unused),
        delta_log_files=len(log),
        delta_log_bytes=sum(log.values()),
        columns=_columns(sums),
    )


def _columns(sums: _Sums) -> tuple[ColumnSize, ...]:
    total = sum(one.compressed for one in sums.columns.values())
    rows = [
        ColumnSize(
            column=name,
            compressed_bytes=one.compressed,
            uncompressed_bytes=one.uncompressed,
            share=one.compressed / total if total else 0.0,
            num_values=one.values,
            bytes_per_value=one.compressed / one.values if one.values else 0.0,
        )
        for name, one in sums.columns.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.compressed_bytes, row.column)))
