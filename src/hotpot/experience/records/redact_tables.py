"""Secrets out of tables: which columns may hold text of people or programs, and those columns cleaned."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from hotpot.experience.records.redact import Redactor
from hotpot.experience.records.schema import COLUMNS

_REDACTED_COLUMNS = {
    "trajectories": ("task_content",),
    "events": ("detail",),
    "versions": ("manifest", "sources"),
    "quarantine": ("detail", "payload"),
}
_JSON_COLUMNS = frozenset({"detail", "manifest", "sources", "payload"})


def redact_tables(redactor: Redactor, tables: Mapping[str, pa.Table]) -> tuple[dict[str, pa.Table], int]:
    """Return the tables with secrets replaced, and how many were found. Tables without any are handed back as they are."""
    result, count = dict(tables), 0
    for name in tables.keys() & _REDACTED_COLUMNS.keys():
        for column in _REDACTED_COLUMNS[name]:
            result[name], found = _redact_column(redactor, result[name], name, column)
            count += found
    return result, count


def _redact_column(redactor: Redactor, table: pa.Table, name: str, column: str) -> tuple[pa.Table, int]:
    index = [c.name for c in COLUMNS[name]].index(column)
    texts: list[Any] = table.column(index).to_pylist()
    redact = redactor.redact_json if column in _JSON_COLUMNS else redactor.redact
    cleaned = {text: redact(text) for text in set(texts)}
    count = sum(cleaned[text][1] for text in texts)
    if count == 0:
        return table, 0
    array = pa.array([cleaned[text][0] for text in texts], type=pa.string())
    return table.set_column(index, table.schema.field(index), array), count
