"""What the record weighs: the lake's bytes against compact JSON lines of the same values, and by column."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hotpot.experience import COLUMNS

RECORD_TABLES = ("steps", "trajectories")
ROWS_COMPARED = 500


def lake_files(folder: Path, table: str) -> list[str]:
    """Return the Parquet files that hold ``table`` of the run in ``folder`` now."""
    from deltalake import DeltaTable

    return [str(path) for path in DeltaTable(str(folder / "lake" / table)).file_uris()]


def column_bytes(files: Sequence[str]) -> Counter[str]:
    """Return the compressed bytes of each top-level column over all files."""
    total: Counter[str] = Counter()
    for path in files:
        metadata = pq.ParquetFile(path).metadata
        for group in range(metadata.num_row_groups):
            row_group = metadata.row_group(group)
            for place in range(row_group.num_columns):
                chunk = row_group.column(place)
                total[chunk.path_in_schema.partition(".")[0]] += chunk.total_compressed_size
    return total


def lake_bytes(folder: Path) -> int:
    """Return all bytes on disk of the tables of the record: data files, Delta's log and checkpoints."""
    return sum(
        path.stat().st_size
        for table in RECORD_TABLES
        for path in (folder / "lake" / table).rglob("*")
        if path.is_file()
    )


def json_bytes(folder: Path, scratch: Path) -> int:
    """Write the same values as compact JSON lines, check that nothing is lost, and return the bytes they take."""
    total = 0
    for table in RECORD_TABLES:
        files = lake_files(folder, table)
        names = ", ".join(f'"{column.name}"' for column in COLUMNS[table])
        path = scratch / f"{table}.jsonl"
        with duckdb.connect() as database:
            database.execute("SET threads = 1; SET memory_limit = '2GB'; SET preserve_insertion_order = true")
            database.execute(f"COPY (SELECT {names} FROM read_parquet({files!r})) TO '{path}' (FORMAT json)")
        _check_lossless(table, path, files[0])
        total += path.stat().st_size
        path.unlink()
    return total


def _check_lossless(table: str, path: Path, first_file: str) -> None:
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(ROWS_COMPARED), strict=False)]
    stored = pq.ParquetFile(first_file).read().slice(0, len(rows))
    rows = rows[: stored.num_rows]
    for column in COLUMNS[table]:
        ours = stored.column(column.name).to_pylist()
        theirs = [row.get(column.name) for row in rows]
        if column.kind == "array" and column.python_type is np.float32:
            theirs = [np.asarray(values, np.float32).tolist() for values in theirs]
        if ours != theirs:
            raise RuntimeError(f"the JSON of {table}.{column.name} is not what the lake holds")


def read_rows(files: Sequence[str], schema: pa.Schema, num_rows: int, most: int) -> list[pa.Table]:
    """Return up to ``most`` tables of exactly ``num_rows`` rows each, in the order of ``files``, in one chunk each."""
    pieces: list[pa.Table] = []
    tables: list[pa.Table] = []
    for path in files:
        if len(tables) == most:
            break
        pieces.append(pq.ParquetFile(path).read(schema.names).cast(schema))
        whole = pa.concat_tables(pieces)
        while whole.num_rows >= num_rows and len(tables) < most:
            tables.append(whole.slice(0, num_rows).combine_chunks())
            whole = whole.slice(num_rows)
        pieces = [whole]
    return tables
