"""How columns of recorded episodes are best written: bytes and seconds of every encoding, by kind of column.

``python benchmarks/encodings.py RUN`` measures the tables of one recorded run, in files of as many rows as the archive
commits at once. Every candidate is written by the lake's own writer (deltalake), one column at a time. Prints one line
for each kind, candidate and zstd level, and ends with one JSON line: what the lake's own table of encodings
(``hotpot.experience.lake.encoding``) comes to, all columns together, as a share of the compact JSON of the same rows, and of
the compact JSON of their values alone, without the columns' names.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import ColumnProperties, WriterProperties, write_deltalake

from hotpot.experience import open_run
from hotpot.experience.lake.encoding import writer_properties

TABLES = ("steps", "trajectories", "learned_tokens")
FILES = 4
LEVELS = (1, 3, 6, 9)
NUMBERS = ("dictionary", "PLAIN", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT")
FLOATS = ("dictionary", "PLAIN", "BYTE_STREAM_SPLIT")
TEXTS = ("dictionary", "PLAIN", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY")


def candidates(kind: pa.DataType) -> tuple[str, ...]:
    inner = kind.value_type if pa.types.is_list(kind) else kind
    if pa.types.is_boolean(inner):
        return ("dictionary", "PLAIN")
    if pa.types.is_string(inner):
        return TEXTS
    return FLOATS if pa.types.is_floating(inner) else NUMBERS


def properties(field: pa.Field, encoding: str, level: int) -> WriterProperties:
    if encoding == "dictionary":
        chosen = ColumnProperties(dictionary_enabled=True)
    else:
        chosen = ColumnProperties(dictionary_enabled=False, encoding=encoding)
    if pa.types.is_list(field.type):
        # deltalake can't name the values inside a list; here they are the only ones.
        return WriterProperties(compression="ZSTD", compression_level=level, default_column_properties=chosen)
    return WriterProperties(
        compression="ZSTD", compression_level=level, column_properties={field.name: chosen}
    )


def slices(table: pa.Table) -> Iterable[pa.Table]:
    rows = -(-table.num_rows // FILES)
    return (table.slice(begin, rows) for begin in range(0, table.num_rows, rows))


def written(table: pa.Table, chosen: WriterProperties) -> tuple[int, float, float]:
    """Return bytes of the column chunks, and seconds to write and to read them."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        for piece in slices(table):
            write_deltalake(folder, piece, mode="append", writer_properties=chosen)
        middle = time.perf_counter()
        files = list(Path(folder).glob("*.parquet"))
        for file in files:
            pq.read_table(file)
        ended = time.perf_counter()
        num_bytes = 0
        for file in files:
            found = pq.ParquetFile(file).metadata
            groups = [found.row_group(index) for index in range(found.num_row_groups)]
            num_bytes += sum(g.column(i).total_compressed_size for g in groups for i in range(g.num_columns))
    return num_bytes, middle - began, ended - middle


def by_kind(tables: dict[str, pa.Table]) -> None:
    kinds: dict[str, list[tuple[str, pa.Field, pa.Table]]] = {}
    for name, table in tables.items():
        for field in table.schema:
            kinds.setdefault(str(field.type), []).append((name, field, table.select([field.name])))
    for kind, columns in kinds.items():
        best: dict[str, tuple[int, str]] = {}
        for encoding in candidates(columns[0][1].type):
            for level in LEVELS if pa.types.is_list(columns[0][1].type) else LEVELS[:1]:
                results = [
                    written(column, properties(field, encoding, level)) for _, field, column in columns
                ]
                total, write_s, read_s = (sum(part) for part in zip(*results, strict=True))
                print(
                    f"{kind:32} {encoding:24} zstd {level}: {total:>10,} bytes  write {write_s:.2f} s  read {read_s:.2f} s"
                )
                if level > 1:
                    continue
                for (name, field, _), (size, *_) in zip(columns, results, strict=True):
                    best[f"{name}.{field.name}"] = min(
                        best.get(f"{name}.{field.name}", (size, encoding)), (size, encoding)
                    )
        for column, (size, encoding) in sorted(best.items(), key=lambda item: -item[1][0])[:8]:
            print(f"    {column:40} {encoding:24} {size:>10,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="run folder, or LAKE#RUN_ID")
    parser.add_argument("--only-total", action="store_true", help="measure the lake's own choice only")
    parser.add_argument(
        "--share", type=float, default=1.0, help="measure this share of the rows, from the first on"
    )
    given = parser.parse_args()
    reader = open_run(given.run)
    tables = {name: reader.table(name) for name in TABLES}
    tables = {
        name: table.slice(0, int(table.num_rows * given.share)) for name, table in tables.items() if table
    }
    if not given.only_total:
        by_kind(tables)
    line: dict[str, float | int] = {"trajectories": tables["trajectories"].num_rows}
    parquet = compact = bare = 0
    for name, table in tables.items():
        num_bytes, _, _ = written(table, writer_properties(name))
        rows = table.to_pylist()
        text = sum(len(json.dumps(row, separators=(",", ":"))) + 1 for row in rows)
        bare += sum(len(json.dumps(list(row.values()), separators=(",", ":"))) + 1 for row in rows)
        line[f"{name}_over_json"] = round(num_bytes / text, 4)
        parquet, compact = parquet + num_bytes, compact + text
    print(
        json.dumps(
            {
                **line,
                "bytes_over_json": round(parquet / compact, 4),
                "bytes_over_json_values": round(parquet / bare, 4),
            }
        )
    )


if __name__ == "__main__":
    main()
