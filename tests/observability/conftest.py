"""A reader over rows in memory, in place of a run on disk."""

from collections.abc import Mapping, Sequence
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from hotpot.experience.records.schema import to_table
from hotpot.types import TABLES


class MemoryReader:
    """Answers DuckDB queries over rows of ``hotpot.types.TABLES``; tables not given are empty."""

    def __init__(self, found: Mapping[str, Sequence[Any]]) -> None:
        self._database = duckdb.connect()
        for name in TABLES:
            self._database.register(name, to_table(name, list(found.get(name, ()))))

    def sql(self, query: str, /) -> pa.Table:
        return self._database.sql(query).to_arrow_table()


@pytest.fixture
def reader_over() -> type[MemoryReader]:
    return MemoryReader
