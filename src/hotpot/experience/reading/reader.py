"""Reading a run, live, finished or crashed: SQL and columns over lake and log, each record exactly once.

Owns the views. Never writes into the run folder. Invariants: a trajectory is seen whole or not at all; two queries may
see different moments, one query sees one; SQL can only read, and only the run's own tables.
"""

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import duckdb
import numpy as np
import pyarrow as pa

from hotpot.errors import StoreError, UsageError
from hotpot.experience.lake.lake import ROW_COLUMN, SEGMENT_COLUMN, Lake
from hotpot.experience.lake.storage import LakeLocation
from hotpot.experience.reading.columns import ColumnReader
from hotpot.experience.reading.moments import Cut, cut_at
from hotpot.experience.reading.remote import open_door
from hotpot.experience.reading.snapshot import Snapshot, TableSnapshot, take_snapshot
from hotpot.experience.records.schema import COLUMNS, SCHEMAS
from hotpot.experience.records.upgrades import column_sql, steps_from
from hotpot.experience.run_folder.manifest import check_readable
from hotpot.experience.run_folder.places import RunPlace, find_run
from hotpot.metrics import quoted
from hotpot.types import SCHEMA_VERSION, TABLES

_ORDER = f"{SEGMENT_COLUMN}, {ROW_COLUMN}"
_LAST = 2**62

Parameters = Sequence[Any] | Mapping[str, Any]


class RunReader:
    """Reads one run. Made by :meth:`open`; holds no lock and no connection between calls.

    ``run_folder`` is None where the run was opened by its lake: then there is what was archived, and neither the log's
    tail nor what only the ledger knows. Not to be shared between threads; open one for each.
    """

    def __init__(self, place: RunPlace) -> None:
        self.run_folder = place.run_folder
        self.manifest = place.manifest
        self.lake = Lake(place.location, writer=place.manifest.run_id)
        self._oldest_version = min(place.manifest.schema_versions)
        self._columns = ColumnReader(place.location)
        self._fixed: Snapshot | None = None
        self._cut: Cut | None = None

    @classmethod
    def open(cls, run: Path | str) -> Self:
        """Open a run folder, or ``LAKE#RUN_ID`` for a run whose folder is elsewhere (see :func:`find_run`).

        Raises :class:`RunFolderError` where there is none, it isn't one, or of another schema, and
        :class:`StoreError` where the lake's storage does not answer.
        """
        place = find_run(run)
        check_readable(Path(run), place.manifest)
        return cls(place)

    def at_once(self) -> Self:
        """Return a reader of the run as it stands now: all its queries see this one moment.

        Good for as long as no vacuum takes the files it has seen. Raises :class:`StoreError` as reading does.
        """
        reader = copy.copy(self)
        reader._fixed = self._fixed or take_snapshot(
            self.run_folder, self.manifest.run_id, self.lake, tuple(TABLES)
        )
        return reader

    def as_of(self, update: int) -> Self:
        """Return a reader of the run as it stood when ``update`` was recorded: nothing later is seen.

        It sees attempts that had ended by then, and no trajectory that was deleted since. Log segments of schema version
        1 are seen whole. Raises :class:`UsageError` where the record has no such update.
        """
        query = f"SELECT {_ORDER} FROM recorded_updates WHERE update = ?"
        found = self._query(query, [update], ("updates",)).to_pylist()
        if not found:
            raise UsageError(
                f"the record of run {self.manifest.run_id} has no update {update}; table updates lists those it has"
            )
        reader = copy.copy(self)
        reader._cut = cut_at(self.lake, found[0][SEGMENT_COLUMN], found[0][ROW_COLUMN])
        return reader

    def sql(self, query: str, params: Parameters | None = None) -> pa.Table:
        """Return the result of one SELECT (DuckDB's SQL) over the tables of :data:`hotpot.types.TABLES`.

        ``params`` fill ``?`` (a sequence) or ``$name`` (a mapping). Raises :class:`UsageError` where the query is not
        one reading statement, or fails; the message names the tables and columns there are.
        """
        return self._query(query, params, _named_tables(query))

    def watermark(self) -> int:
        """Return the number of the last log segment that is wholly in the lake; 0 where there is none."""
        return self.lake.watermark() if self._fixed is None else self._fixed.watermark

    def table(
        self,
        name: str,
        columns: Sequence[str] | None = None,
        *,
        where: str = "true",
        params: Parameters | None = None,
    ) -> pa.Table:
        """Return a table, or only the named columns of it, in the order its rows were recorded.

        ``where`` is an SQL condition over its columns, with ``params``. Only what is asked for is read from the lake: whole
        columns chunk by chunk straight from the files. The result carries each column's meaning and unit. Raises
        :class:`UsageError` where table, column or condition is wrong.
        """
        schema = column_schema(name, columns)
        snapshot = self._plain(name, schema, where)
        if snapshot is not None:
            return self._whole(name, schema, snapshot)
        query = f"SELECT {_listed(schema.names)} FROM recorded_{name} WHERE ({where}) ORDER BY {_ORDER}"
        return self._query(query, params, {name, *_named_tables(query)}).cast(schema)

    def batches(
        self,
        name: str,
        columns: Sequence[str] | None = None,
        *,
        where: str = "true",
        params: Parameters | None = None,
        batch_rows: int = 65_536,
    ) -> Iterator[pa.RecordBatch]:
        """Yield what :meth:`table` returns, at most ``batch_rows`` rows at once, in memory bounded by a row group.

        All batches are of the moment of the first one. Each row comes once, in no promised order. Raises as
        :meth:`table`, at the first batch.
        """
        schema = column_schema(name, columns)
        if batch_rows < 1:
            raise UsageError(f"batch_rows = {batch_rows}; a batch has at least one row")
        snapshot = self._plain(name, schema, where)
        if snapshot is not None:
            found = snapshot.tables[name]
            yield from self._columns.batches(found.paths, snapshot.watermark, schema, batch_rows)
            yield from found.tail.select(schema.names).cast(schema).to_batches(batch_rows)
            return
        query = f"SELECT {_listed(schema.names)} FROM recorded_{name} WHERE ({where})"
        with self._database(query, {name, *_named_tables(query)}) as database:
            for batch in database.sql(query, params=params).to_arrow_reader(batch_rows):
                yield batch.cast(schema)

    def _plain(self, name: str, schema: pa.Schema, where: str) -> Snapshot | None:
        """Return a snapshot to read whole columns from, or None where it takes a query: for a condition, for what only
        the ledger knows, a moment gone by, columns that older rows lack (null where a compaction rewrote their files)."""
        if where != "true" or name == "attempts" or self._cut is not None:
            return None
        if any(step.name in schema.names for step in steps_from(name, self._oldest_version)):
            return None
        return self._snapshot([name])

    def _whole(self, name: str, schema: pa.Schema, snapshot: Snapshot) -> pa.Table:
        found = snapshot.tables[name]
        pieces = self._columns.read(found.paths, snapshot.watermark, schema)
        return pa.concat_tables([*pieces, found.tail.select(schema.names).cast(schema)])

    def _snapshot(self, tables: Collection[str]) -> Snapshot:
        if self._fixed is not None:
            return self._fixed.only(tables)
        return take_snapshot(self.run_folder, self.manifest.run_id, self.lake, tables)

    def _query(self, query: str, params: Parameters | None, tables: Collection[str]) -> pa.Table:
        with self._database(query, tables) as database:
            answer: pa.Table = database.sql(query, params=params).to_arrow_table()
            return answer

    @contextmanager
    def _database(self, query: str, tables: Collection[str]) -> Iterator[duckdb.DuckDBPyConnection]:
        """Open a database that can read ``tables`` and do nothing else, for one reading query."""
        snapshot = self._snapshot(tables)
        with duckdb.connect(":memory:") as database:
            try:
                if self.lake.location.is_local:
                    # Reading ahead takes whole row groups for one list column; a local file needs none of it.
                    database.execute("SET disable_parquet_prefetching = true")
                aged = self._oldest_version < SCHEMA_VERSION
                _prepare(database, snapshot, self._cut, self.lake.location, aged=aged)
            except duckdb.Error as error:
                raise StoreError(
                    f"can't read the lake in {self.lake.location.uri}: {error}; restore what is damaged from a copy"
                ) from error
            try:
                statements = database.extract_statements(query)
                if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                    raise UsageError(f"only a single SELECT can be asked of a run, got {query!r:.300}")
                yield database
            except duckdb.Error as error:
                raise UsageError(f"the query failed: {error}\n{_known_names(query)}") from error


def column_schema(name: str, columns: Sequence[str] | None = None) -> pa.Schema:
    """Return the schema of a table, or of the named columns of it. Raises :class:`UsageError` where there are none such."""
    if name not in TABLES:
        raise UsageError(f"unknown table {name!r}; tables are {', '.join(TABLES)}")
    known = [column.name for column in COLUMNS[name]]
    names = known if columns is None else list(columns)
    unknown = [column for column in names if column not in known]
    if unknown or not names:
        raise UsageError(f"table {name} has no columns {unknown}; columns are {', '.join(known)}")
    fields = [SCHEMAS[name].field(column) for column in names]
    return pa.schema(fields, {"table": name, "schema_version": str(SCHEMA_VERSION)})


def _named_tables(query: str) -> list[str]:
    """Return the tables a query can refer to: those whose name is in its text, or all where it lists tables."""
    words = {word.removeprefix("recorded_") for word in re.findall(r"[a-z_]+", query.lower())}
    named = [name for name in TABLES if name in words]
    return named or list(TABLES)


def _prepare(
    database: duckdb.DuckDBPyConnection,
    snapshot: Snapshot,
    cut: Cut | None,
    location: LakeLocation,
    *,
    aged: bool,
) -> None:
    """Define the views, and take away everything but reading them. ``aged``: files may lack columns."""
    paths = [path for table in snapshot.tables.values() for path in table.paths]
    open_door(database, location, paths)
    # Only these very files may be opened, and a single SELECT can only read. Paths are our own, quoted as SQL text.
    database.execute(
        "SET python_enable_replacements = false; SET autoinstall_known_extensions = false; "
        "SET autoload_known_extensions = false; "
        f"SET allowed_paths = [{', '.join(map(quoted, paths))}]; SET enable_external_access = false"
    )
    for name, table in snapshot.tables.items():
        columns = [column.name for column in COLUMNS[name]]
        body = _recorded(database, name, table, snapshot.watermark, columns, aged=aged)
        if cut is not None:
            body = f"SELECT * FROM ({body}) WHERE {cut.condition()}"
        elif name == "attempts":
            body = _with_ledger(database, body, snapshot.unlogged, columns)
        database.execute(
            f"CREATE VIEW recorded_{name} AS {body}; "
            f"CREATE VIEW {name} AS SELECT {_listed(columns)} FROM recorded_{name}"
        )
    database.execute("SET lock_configuration = true")


def _recorded(
    database: duckdb.DuckDBPyConnection,
    name: str,
    table: TableSnapshot,
    watermark: int,
    columns: Sequence[str],
    *,
    aged: bool,
) -> str:
    """Return the query for a table's rows in lake and log, with the hidden columns that order them."""
    database.register(f"log_{name}", table.tail)
    body = f"SELECT {_ORDER}, {_listed(columns)} FROM log_{name}"
    if table.paths:
        files, kept = ", ".join(map(quoted, table.paths)), _listed(columns)
        source = f"read_parquet([{files}], hive_partitioning = false)"
        if aged:
            # A column may be in some files or in none: the log's tail has them all, and none of its rows pass.
            source = (
                f"(SELECT * FROM read_parquet([{files}], hive_partitioning = false, union_by_name = true) "
                f"UNION ALL BY NAME SELECT * FROM log_{name} WHERE false)"
            )
            kept = ", ".join(column_sql(name, column) for column in columns)
        body = f"SELECT {_ORDER}, {kept} FROM {source} WHERE {SEGMENT_COLUMN} <= {watermark} UNION ALL {body}"
    return body


def _with_ledger(
    database: duckdb.DuckDBPyConnection, body: str, unlogged: pa.Table, columns: Sequence[str]
) -> str:
    numbers = pa.array(np.arange(unlogged.num_rows))
    last = pa.array(np.full(unlogged.num_rows, _LAST))
    ordered = unlogged.append_column(SEGMENT_COLUMN, last).append_column(ROW_COLUMN, numbers)
    database.register("ledger_attempts", ordered)
    return (
        f"WITH ended AS ({body}) FROM ended UNION ALL SELECT {_ORDER}, {_listed(columns)} FROM ledger_attempts "
        "WHERE attempt_id NOT IN (SELECT attempt_id FROM ended)"
    )


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(f'"{column}"' for column in columns)


def _known_names(query: str) -> str:
    words = set(re.findall(r"[a-z_]+", query.lower()))
    lines = [f"tables: {', '.join(TABLES)}"]
    lines += [
        f"columns of {name}: {', '.join(column.name for column in COLUMNS[name])}"
        for name in TABLES
        if name in words
    ]
    return "\n".join(lines)
