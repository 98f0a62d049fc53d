"""The hidden columns of every lake table, and the table that publishes segments.

Owns names, types and meanings of what the lake adds to the rows of :data:`hotpot.types.TABLES`. Writes nothing.
"""

import re
from typing import Any

import pyarrow as pa

from hotpot.types import SCHEMA_VERSION

RUN_COLUMN = "_run"
"""Name of the hidden column that says which run wrote a row: the tables are partitioned by it."""

SEGMENT_COLUMN = "_segment"
"""Name of the hidden column that says which log segment a row came through."""

ROW_COLUMN = "_row"
"""Name of the hidden column that counts the rows of a segment across its tables, from 0."""

SEGMENTS = "segments"
"""Name of the table of watermarks."""

WRITER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""What the name of a run must look like to name a partition: it stands in paths as it is."""


def _described(name: str, kind: pa.DataType, meaning: str, unit: str = "") -> "pa.Field[Any]":
    return pa.field(name, kind, nullable=False, metadata={"meaning": meaning, "unit": unit})


RUN_FIELD = _described(RUN_COLUMN, pa.string(), "Run that wrote the row; the table is partitioned by it")

ORDER_FIELDS = (
    _described(
        SEGMENT_COLUMN,
        pa.int64(),
        "Log segment the row came through; complete up to the run's last one in table segments",
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
    metadata={"table": SEGMENTS, "schema_version": str(SCHEMA_VERSION)},
)
"""Schema of table ``segments``, without the run."""
