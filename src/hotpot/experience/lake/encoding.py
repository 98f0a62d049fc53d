"""How each kind of column is written to Parquet: one table of choices, made by measurement.

The figures are in docs/lake.md, the measurement is benchmarks/column_encodings.py. Owns encodings and compression of every
lake table; knows no file.

deltalake takes settings for a column by name, but has no name for the values inside a list column: what holds for them
is the default of the file.
"""

import functools

import pyarrow as pa
from deltalake import ColumnProperties, WriterProperties

from hotpot.experience.lake.layout import ORDER_FIELDS, SEGMENTS_SCHEMA
from hotpot.experience.records.schema import SCHEMAS

COMPRESSION_LEVEL = 1
"""Level of zstd. Level 9 would save a twelfth of the list columns; the archive shares its cores with the learner."""

_DICTIONARY = ColumnProperties(dictionary_enabled=True)
_PLAIN = ColumnProperties(dictionary_enabled=False, encoding="PLAIN")
_DELTAS = ColumnProperties(dictionary_enabled=False, encoding="DELTA_BINARY_PACKED")
_PREFIXES = ColumnProperties(dictionary_enabled=False, encoding="DELTA_BYTE_ARRAY")

LISTS = _PLAIN
"""Token ids, log-probabilities, masks. A dictionary suits the ids a little better and the log-probabilities, of which
most occur once, much worse."""

SCALARS: dict[pa.DataType, ColumnProperties] = {
    pa.int64(): _DELTAS,
    pa.float64(): _PLAIN,
    pa.string(): _DICTIONARY,
    pa.bool_(): _PLAIN,
}
"""By type, for columns that hold one value a row. BYTE_STREAM_SPLIT saves a fifth of the float columns, which are an
eighth of a table, and is younger than some programs that read a lake."""

UNIQUE_TEXTS: dict[str, ColumnProperties] = {"prefix_hash": _PLAIN, "task_content": _PREFIXES}
"""Columns whose texts hardly ever repeat."""


@functools.cache
def writer_properties(table: str) -> WriterProperties:
    """Return how the columns of ``table``, or of the table of watermarks, are encoded and compressed."""
    fields = [*ORDER_FIELDS, *SCHEMAS[table]] if table in SCHEMAS else SEGMENTS_SCHEMA
    return WriterProperties(
        compression="ZSTD",
        compression_level=COMPRESSION_LEVEL,
        default_column_properties=LISTS,
        column_properties={
            field.name: UNIQUE_TEXTS.get(field.name, SCALARS[field.type])
            for field in fields
            if field.type in SCALARS
        },
    )
