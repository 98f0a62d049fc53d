"""Registered metrics, and rows as dictionaries, over anything that answers SQL about one run.

Knows no file: a reader is whatever has ``sql(query) -> pyarrow.Table`` (``hotpot.experience.RunReader``).
"""

from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow as pa

from hotpot.metrics import metric, sql


class SqlReader(Protocol):
    """What answers a query over the tables of ``hotpot.types.TABLES``."""

    def sql(self, query: str, /) -> pa.Table:
        """Return the result of a DuckDB query."""
        ...


def cut(reader: SqlReader, name: str, *, by: Sequence[str] = (), where: str = "") -> pa.Table:
    """Return metric ``name`` with one row per cut: the ``by`` columns and ``value``.

    Raises
    ------
    UsageError: the metric is unknown or cannot be cut so.
    """
    return reader.sql(sql(metric(name), by=by, where=where))


def value(reader: SqlReader, name: str, *, where: str = "") -> float | None:
    """Return metric ``name`` over the whole run; None where it is undefined there.

    Raises
    ------
    UsageError: the metric is unknown.
    """
    found: float | None = cut(reader, name, where=where).column("value")[0].as_py()
    return found


def rows(reader: SqlReader, query: str) -> list[dict[str, Any]]:
    """Return the rows of a query as dictionaries."""
    found: list[dict[str, Any]] = reader.sql(query).to_pylist()
    return found
