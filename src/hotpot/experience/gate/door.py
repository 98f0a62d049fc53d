"""The door for records that are not our dataclasses: other programs' rollouts, and records coming back from quarantine.

::

    {"schema_version", "row", "steps"} ─┐
                                        ├─► upgrade ─► Trajectory ─► gate
    two self-describing Arrow tables ───┘      └────► refusal (malformed, schema_version)

Owns the way from plain values to :class:`hotpot.types.Trajectory`. Knows no store, ledger or clock. A record is a mapping
of JSON's own values: ``schema_version``, ``row`` (columns of table ``trajectories``), ``steps`` (a list of columns of table
``steps``); lists stand for arrays and tuples, and the texts ``"nan"``, ``"inf"``, ``"-inf"`` for those numbers. The outer
``schema_version`` says which columns there are; one inside row and steps may be left out, or be older (a row that was
upgraded since it was written).

Invariants: it never raises, whatever it is given; nothing is rounded, cut or left out to make a record fit (a column
it does not know is a refusal, not ignored); every record put in comes out, read or refused.
"""

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from hotpot.experience.gate.gate import Refusal
from hotpot.experience.records.schema import COLUMNS, Column
from hotpot.experience.records.typecheck import shown
from hotpot.experience.records.upgrades import is_known, upgrade_row
from hotpot.types import SCHEMA_VERSION, StepRow, Trajectory, TrajectoryRow

_KEYS = frozenset({"schema_version", "row", "steps"})
_WORDS_FOR_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrowRecords:
    """Records as two tables with the columns of ``trajectories`` and ``steps``, joined by ``trajectory_id``.

    The metadata of both schemas carries ``schema_version``.
    """

    trajectories: pa.Table
    steps: pa.Table


class _MalformedError(Exception):
    """Why a record can't be read; its text is the refusal's detail."""


def read_record(record: Any) -> Trajectory | Refusal:
    """Return the trajectory that a record describes, upgraded to this release's schema, or why it can't be read."""
    try:
        return _read(record)
    except _MalformedError as error:
        return Refusal(reason="malformed", detail=str(error))


def records_of(arrow: ArrowRecords) -> list[Any]:
    """Return the records of two Arrow tables, one per row of ``trajectories``, then steps that belong to none of them.

    Where the tables can't be read at all, they come out as one record that holds their bytes.
    """
    try:
        rows, steps = (_plain_rows(table) for table in (arrow.trajectories, arrow.steps))
    except (pa.ArrowException, UnicodeDecodeError, ValueError, OverflowError) as error:
        return [_unreadable(arrow, error)]
    version = _version_of(arrow)
    by_id: dict[Any, list[Any]] = {}
    for step in steps:
        by_id.setdefault(_key(step.get("trajectory_id")), []).append(step)
    for found in by_id.values():
        if all(type(step.get("step")) is int for step in found):
            found.sort(key=lambda step: step["step"])
    records = [
        {"schema_version": version, "row": row, "steps": by_id.get(_key(row.get("trajectory_id")), [])}
        for row in rows
    ]
    named = {_key(row.get("trajectory_id")) for row in rows}
    lost = [found for key, found in by_id.items() if key not in named]
    return [*records, *({"schema_version": version, "row": None, "steps": found} for found in lost)]


def _read(record: Any) -> Trajectory | Refusal:
    if not isinstance(record, Mapping) or set(record) != _KEYS:
        have = sorted(map(repr, record)) if isinstance(record, Mapping) else type(record).__name__
        raise _MalformedError(f"a record is a mapping of {sorted(_KEYS)}, got {have!s:.200}")
    version = record["schema_version"]
    if not is_known(version):
        return Refusal(
            reason="schema_version",
            detail=f"schema_version = {shown(version):.50}, but this release reads {SCHEMA_VERSION} and those before it; "
            "write a known version, or use a newer release",
        )
    if not isinstance(record["steps"], list | tuple):
        raise _MalformedError(f"steps is a list of mappings, got {type(record['steps']).__name__}")
    row = TrajectoryRow(**_values("trajectories", record["row"], version, "row"))
    steps = [
        StepRow(**_values("steps", step, version, f"steps[{place}]"))
        for place, step in enumerate(record["steps"])
    ]
    return Trajectory(row=row, steps=tuple(steps))


def _values(table: str, row: Any, version: int, where: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise _MalformedError(f"{where} is a mapping of the columns of {table}, got {type(row).__name__}")
    claimed = row.get("schema_version", version)
    if not is_known(claimed) or claimed > version:
        raise _MalformedError(f"{where}.schema_version = {shown(claimed):.50}, but the record says {version}")
    try:
        upgraded = upgrade_row(table, row, version) | {"schema_version": SCHEMA_VERSION}
    except (KeyError, TypeError) as error:
        raise _MalformedError(
            f"{where} can't be upgraded from version {version}: {shown(error):.200}"
        ) from error
    columns = COLUMNS[table]
    missing = [column.name for column in columns if column.name not in upgraded]
    if missing:
        raise _MalformedError(f"{where} lacks {missing[:10]}; a record has every column of {table}")
    names = {column.name for column in columns}
    foreign = [name for name in upgraded if name not in names]
    if foreign:
        raise _MalformedError(
            f"{where} has columns that {table} does not: {foreign[:10]!r:.300}; leave them out"
        )
    return {column.name: _value(column, upgraded[column.name], where) for column in columns}


def _value(column: Column, value: Any, where: str) -> Any:
    if value is None and column.nullable:
        return None
    try:
        if column.kind == "scalar":
            return _scalar(column.python_type, value)
        if not isinstance(value, list | tuple):
            raise TypeError(f"a list, got {type(value).__name__}")
        if column.kind == "tuple":
            return tuple(_scalar(column.python_type, element) for element in value)
        return _array(np.dtype(column.python_type), value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _MalformedError(
            f"{where}.{column.name} takes {column.arrow}{' or null' if column.nullable else ''}: {error!s:.200}"
        ) from error


def _scalar(wanted: type, value: Any) -> Any:
    if wanted is float:
        return _float(value)
    if type(value) is not wanted:
        raise TypeError(f"expected {wanted.__name__}, got {shown(value):.80}")
    if wanted is int and value not in _INT64:
        raise ValueError(f"{shown(value):.80} does not fit 64 bits")
    return value


def _float(value: Any) -> float:
    if type(value) is str and value in _WORDS_FOR_NUMBERS:
        return _WORDS_FOR_NUMBERS[value]
    if type(value) not in (float, int):
        raise TypeError(f"expected a number, got {shown(value):.80}")
    return float(value)


def _array(dtype: "np.dtype[Any]", values: Any) -> Any:
    if dtype.kind == "f":
        with np.errstate(over="ignore"):  # what a float32 can't hold becomes infinite, which a rule refuses
            return np.array([_float(value) for value in values], dtype=dtype)
    odd = set(map(type, values)) - {int}
    if odd:
        raise TypeError(f"expected integers, got {sorted(kind.__name__ for kind in odd)}")
    limits = np.iinfo(dtype)
    if values and not limits.min <= min(values) <= max(values) <= limits.max:
        raise ValueError(f"a value does not fit {dtype}")
    return np.array(values, dtype=dtype)


def _plain_rows(table: Any) -> list[Any]:
    if not isinstance(table, pa.Table):
        raise ValueError(f"expected an Arrow table, got {type(table).__name__}")
    table.validate(full=True)
    if len(set(table.column_names)) != table.num_columns:
        raise ValueError(f"a column comes twice among {table.column_names}")
    return table.to_pylist()


def _key(value: Any) -> str:
    # Ids of the wrong type must not fall together with text that reads the same, nor be unhashable.
    return f"{type(value).__name__}:{value}"


def _version_of(arrow: ArrowRecords) -> int | str | None:
    found = {
        (table.schema.metadata or {}).get(b"schema_version") for table in (arrow.trajectories, arrow.steps)
    }
    if len(found) != 1 or None in found:
        return None
    text = (found.pop() or b"").decode("ascii", "replace")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text


def _unreadable(arrow: ArrowRecords, error: Exception) -> dict[str, str]:
    return {"unreadable": str(error)[:300]} | {
        name: _bytes_of(getattr(arrow, name)) for name in ("trajectories", "steps")
    }


def _bytes_of(table: Any) -> str:
    if not isinstance(table, pa.Table):
        return repr(table)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return base64.b64encode(sink.getvalue().to_pybytes()).decode("ascii")
