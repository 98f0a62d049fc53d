"""Export: what a program needs that can't read Delta, as a list of the right files or as plain Parquet.

Owns ``hotpot-export.json`` and the folder of a copy. Why a raw glob over a table's folder is wrong: after a compaction
old files lie beside the ones that replaced them, so rows count twice; files of a crash lie there too; and rows above the
watermark are not complete. The manifest names the files that count and the condition; a copy needs neither.

Both are written beside their place and moved into it, so a killed export leaves nothing half-made under the name.
"""

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hotpot.errors import StoreError, UsageError
from hotpot.experience.crashpoints import reach
from hotpot.experience.disk import sync_folder
from hotpot.experience.lake.lake import ROW_COLUMN, RUN_COLUMN, SEGMENT_COLUMN
from hotpot.experience.maintenance.ranges import pieces
from hotpot.experience.maintenance.tables import data_files, folder_of
from hotpot.experience.reading.reader import RunReader
from hotpot.experience.records.schema import COLUMNS, SCHEMAS
from hotpot.experience.records.upgrades import steps_from
from hotpot.types import SCHEMA_VERSION, TABLES

EXPORT_NAME = "hotpot-export.json"

FORMAT_VERSION = 1
"""Version of the form of ``hotpot-export.json``."""

ROWS_A_FILE = 262_144
"""Rows of a copied Parquet file, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """One table of a copy."""

    table: str
    num_files: int
    num_rows: int
    num_bytes: int


def export_manifest(reader: RunReader) -> dict[str, Any]:
    """Return what ``hotpot-export.json`` holds: every table's exact files, columns and the condition its rows must meet.

    It is of the lake at this moment; what only the log's tail holds is not in it. Raises :class:`StoreError` where the
    lake can't be read.
    """
    lake = reader.lake
    watermark = lake.watermark()
    return {
        "format_version": FORMAT_VERSION,
        "run_id": reader.manifest.run_id,
        "schema_version": SCHEMA_VERSION,
        "exported_us": time.time_ns() // 1_000,
        "lake": lake.location.uri,
        "watermark": watermark,
        "where": f"{SEGMENT_COLUMN} <= {watermark}",
        "order_by": [SEGMENT_COLUMN, ROW_COLUMN],
        "hidden_columns": [RUN_COLUMN, SEGMENT_COLUMN, ROW_COLUMN],
        "tables": {name: _table_entry(reader, name) for name in TABLES},
    }


def write_export(reader: RunReader, path: Path | None = None) -> Path:
    """Write the manifest to ``path``, by default ``hotpot-export.json`` in the run folder, atomically; return where.

    Raises :class:`StoreError` where it can't be written, :class:`UsageError` where no place is known.
    """
    if path is None and reader.run_folder is None:
        raise UsageError("a run that was opened by its lake has no folder to write to; give a path")
    target = path if path is not None else Path(reader.run_folder or "") / EXPORT_NAME
    draft = target.with_name(f"{target.name}.draft")
    text = json.dumps(export_manifest(reader), indent=1, ensure_ascii=False) + "\n"
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        reach("export_written")
        draft.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        raise StoreError(f"can't write {target}: {error}; check space and rights") from error
    return target


def copy_run(reader: RunReader, folder: Path) -> list[Copied]:
    """Write every table as plain Parquet into ``folder``, one folder each: all records, in the order of recording.

    The log's tail is in it and hidden columns are not, so ``folder/steps/*.parquet`` is the table ``steps``, whoever
    reads it. An empty table is one file without rows. Raises :class:`UsageError` where the folder is there already and
    :class:`StoreError` where it can't be written.
    """
    if folder.exists():
        raise UsageError(f"{folder} exists; name a folder that does not, so that no other file is in it")
    draft = folder.with_name(f"{folder.name}.draft")
    moment = reader.at_once()
    try:
        if draft.exists():
            shutil.rmtree(draft)  # what a killed export left
        copied = [_copy_table(moment, name, draft / name) for name in TABLES]
        reach("export_copied")
        draft.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise StoreError(f"can't write {draft}: {error}; check space and rights") from error
    return copied


def _table_entry(reader: RunReader, name: str) -> dict[str, Any]:
    folder = folder_of(reader.lake, name)
    files = data_files(reader.lake, name)
    handle = reader.lake.open_table(name)
    # Files of an older schema version lack these; Delta's readers give null there, Hotpot's the value of the upgrade step.
    later = {step.name: step.older.sql for step in steps_from(name, min(reader.manifest.schema_versions))}
    return {
        "files": [
            {
                "path": f"{folder.uri}/{file.path}",
                "relative_path": f"{name}/{file.path}",
                "size_bytes": file.size,
                "num_rows": file.num_rows,
            }
            for file in files
        ]
        if folder is not None
        else [],
        "delta_version": None if handle is None else handle.version(),
        "columns": [
            {
                "name": column.name,
                "arrow_type": str(column.arrow),
                "nullable": column.nullable or column.name in later,
                "in_older_rows": later.get(column.name),
                "meaning": column.meaning,
                "unit": column.unit,
            }
            for column in COLUMNS[name]
        ],
    }


def _copy_table(moment: RunReader, name: str, folder: Path) -> Copied:
    folder.mkdir(parents=True)
    rows = 0
    paths: list[Path] = []
    for piece in (*pieces(moment, name, rows=ROWS_A_FILE), None):
        if piece is None and paths:
            break
        table = SCHEMAS[name].empty_table() if piece is None else piece
        path = folder / f"part-{len(paths):05d}.parquet"
        _write(table, path)
        paths.append(path)
        rows += table.num_rows
    sync_folder(folder)
    return Copied(
        table=name,
        num_files=len(paths),
        num_rows=rows,
        num_bytes=sum(path.stat().st_size for path in paths),
    )


def _write(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, compression="zstd", write_page_checksum=True)
    with path.open("rb") as file:
        os.fsync(file.fileno())
