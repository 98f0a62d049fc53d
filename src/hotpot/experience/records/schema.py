"""Arrow schemas of every table, derived from the record classes, and the way between rows and Arrow.

Owns: the mapping of type rules to Arrow types, and the metadata that makes a file describe itself (each field carries
``meaning`` and ``unit``, each schema ``table`` and ``schema_version``). Knows no file, log or database.

Invariants: ``from_table(name, to_table(name, rows))`` gives equal rows; a column that is not ``X | None`` holds no
null, in its lists neither; nothing is converted silently except int to float.
"""

import dataclasses
import itertools
import operator
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from hotpot.errors import StoreError
from hotpot.types import SCHEMA_VERSION, TABLES

Kind = Literal["scalar", "tuple", "array"]

_SCALARS: dict[type, pa.DataType] = {
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    bool: pa.bool_(),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column as the record class declares it.

    ``python_type`` is the type of a scalar or of a tuple's elements (int, float, str, bool); for an array it is the
    NumPy scalar class of its dtype. ``arrow`` is the column's Arrow type.
    """

    name: str
    kind: Kind
    python_type: type
    nullable: bool
    arrow: pa.DataType
    meaning: str
    unit: str


def _column(field: "dataclasses.Field[Any]", hint: Any) -> Column:
    nullable = False
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner = [argument for argument in typing.get_args(hint) if argument is not type(None)]
        nullable, hint = True, inner[0]
    kind: Kind = "scalar"
    element: Any = hint
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        kind, element = "tuple", arguments[0]
    elif origin is np.ndarray:
        kind, element = "array", typing.get_args(arguments[1])[0]
    arrow: pa.DataType
    if kind == "array":
        arrow = pa.list_(pa.field("element", pa.from_numpy_dtype(np.dtype(element)), nullable=False))
    elif kind == "tuple":
        arrow = pa.list_(pa.field("element", _SCALARS[element], nullable=False))
    else:
        arrow = _SCALARS[element]
    return Column(
        name=field.name,
        kind=kind,
        python_type=element,
        nullable=nullable,
        arrow=arrow,
        meaning=field.metadata["meaning"],
        unit=field.metadata["unit"],
    )


def _columns(cls: type) -> tuple[Column, ...]:
    hints = typing.get_type_hints(cls)
    return tuple(_column(field, hints[field.name]) for field in dataclasses.fields(cls))


COLUMNS: dict[str, tuple[Column, ...]] = {name: _columns(cls) for name, cls in TABLES.items()}
"""The columns of every table, in order."""

TABLE_OF: dict[type, str] = {cls: name for name, cls in TABLES.items()}
"""Table name of every record class."""


def _schema(table: str) -> pa.Schema:
    fields = [
        pa.field(
            column.name,
            column.arrow,
            nullable=column.nullable,
            metadata={"meaning": column.meaning, "unit": column.unit},
        )
        for column in COLUMNS[table]
    ]
    return pa.schema(fields, metadata={"table": table, "schema_version": str(SCHEMA_VERSION)})


SCHEMAS: dict[str, pa.Schema] = {name: _schema(name) for name in TABLES}
"""The Arrow schema of every table, with its metadata."""

_GETTERS: dict[str, tuple[Callable[[Any], Any], ...]] = {
    name: tuple(operator.attrgetter(column.name) for column in columns) for name, columns in COLUMNS.items()
}


def to_table(table: str, rows: Sequence[Any]) -> pa.Table:
    """Return ``rows`` (all of the class of ``table``) as one Arrow table, column by column.

    Raises :class:`StoreError` naming the column whose values are not of its declared type.
    """
    arrays = []
    for column, getter in zip(COLUMNS[table], _GETTERS[table], strict=True):
        values = list(map(getter, rows))
        try:
            arrays.append(_to_array(column, values))
        except (pa.ArrowException, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise StoreError(
                f"column {table}.{column.name} takes {column.arrow}"
                f"{' or null' if column.nullable else ''}, but a value does not fit: {error}; "
                "correct whoever built the row"
            ) from error
    return pa.Table.from_arrays(arrays, schema=SCHEMAS[table])


def from_table(table: str, data: pa.Table) -> list[Any]:
    """Return the rows of ``data`` (all columns of ``table``, in any order) as instances of its record class.

    Arrays in the rows are read-only views into ``data``. Raises :class:`StoreError` where a column is missing.
    """
    missing = [column.name for column in COLUMNS[table] if column.name not in data.column_names]
    if missing:
        raise StoreError(f"rows of {table} need every column, but {missing} are missing; read them too")
    names = [column.name for column in COLUMNS[table]]
    lists = [_from_array(column, data.column(column.name)) for column in COLUMNS[table]]
    cls = TABLES[table]
    return [cls(**dict(zip(names, values, strict=True))) for values in zip(*lists, strict=True)]


def group_rows(rows: Iterable[Any]) -> dict[str, list[Any]]:
    """Return rows of mixed record classes by table name. Raises :class:`StoreError` on a foreign class."""
    grouped: dict[str, list[Any]] = {}
    for row in rows:
        name = TABLE_OF.get(type(row))
        if name is None:
            raise StoreError(
                f"{type(row).__name__} is not a row of any table; known tables are {', '.join(TABLES)}"
            )
        grouped.setdefault(name, []).append(row)
    return grouped


# Arrow itself would cut 1.5 to the integer 1 and take bytes for text, so types are checked before it sees them.
_ACCEPTED: dict[type, tuple[type, ...]] = {
    int: (int, np.integer),
    float: (float, int, np.floating, np.integer),
    str: (str,),
    bool: (bool, np.bool_),
}


def _check_types(values: Iterable[Any], wanted: type, *, nullable: bool) -> None:
    for found in set(map(type, values)):
        if found is wanted or (nullable and found is type(None)):
            continue
        if not issubclass(found, _ACCEPTED[wanted]) or (found is bool and wanted is not bool):
            raise TypeError(f"expected {wanted.__name__}, got {found.__name__}")


def _check_containers(values: Iterable[Any], wanted: type) -> None:
    odd = set(map(type, values)) - {wanted}
    if odd:
        raise TypeError(f"expected {wanted.__name__}, got {', '.join(sorted(kind.__name__ for kind in odd))}")


# The stubs of pyarrow leave the members of list arrays untyped, hence Any in what follows.
def _to_array(column: Column, values: list[Any]) -> Any:
    if column.kind == "scalar":
        first = values[0] if values else None
        # Most columns of a batch hold one object over and over: ids of the run, versions, settings.
        if first is not None and all(map(operator.is_, values, itertools.repeat(first))):
            _check_types((first,), column.python_type, nullable=False)
            scalar: Any = pa.scalar(first, column.arrow)
            return pa.repeat(scalar, len(values))
        _check_types(values, column.python_type, nullable=column.nullable)
        return pa.array(values, type=column.arrow)
    _check_containers(values, tuple if column.kind == "tuple" else np.ndarray)
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum(np.fromiter(map(len, values), dtype=np.int32, count=len(values)), out=offsets[1:])
    lists: Any = pa.ListArray
    return lists.from_arrays(pa.array(offsets), _flat_array(column, values), type=column.arrow)


def _flat_array(column: Column, values: list[Any]) -> Any:
    if column.kind == "array":
        dtype = np.dtype(column.python_type)
        flat = np.concatenate(values) if values else np.zeros(0, dtype)
        if flat.dtype != dtype or flat.ndim != 1:
            raise TypeError(f"expected {dtype} of one dimension, got {flat.dtype} of {flat.ndim}")
        return pa.array(flat)
    elements = list(itertools.chain.from_iterable(values))
    _check_types(elements, column.python_type, nullable=False)
    return pa.array(elements, type=_SCALARS[column.python_type])


def _from_array(column: Column, data: Any) -> list[Any]:
    if column.kind == "scalar":
        scalars: list[Any] = data.to_pylist()
        return scalars
    out: list[Any] = []
    for chunk in data.chunks:
        offsets = chunk.offsets.to_numpy().tolist()
        flat = (
            chunk.values.to_numpy(zero_copy_only=True)
            if column.kind == "array"
            else tuple(chunk.values.to_pylist())
        )
        out.extend(flat[begin:end] for begin, end in itertools.pairwise(offsets))
    return out
