"""Upgrade steps: how a record of an older schema version becomes one of this release's.

Owns the steps. One step is one column that a version brought to one table, with the value that older records have in
it: a :class:`Constant`, or a :class:`Derived` value, a pure function of the older row. Each has two forms that say the
same, a Python function of one row and an SQL expression over the row's columns, and from those everything follows:

- tables in Arrow, read from an old log segment (:func:`upgrade_table`);
- files of the lake, where the reader's views supply what a file lacks (:func:`column_sql`);
- single records that another program brings to the gate (:func:`upgrade_row`).

Invariants: nothing that was recorded is changed or dropped, columns are only added; a stored row keeps the
``schema_version`` it was written with, which says who wrote it, not what the reader returns.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from hotpot.errors import StoreError
from hotpot.experience.records.schema import COLUMNS, SCHEMAS
from hotpot.types import SCHEMA_VERSION, ContextChange

OLDEST_VERSION = 1
"""The first schema version that ever landed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One value for every older row; the empty tuple for lists."""

    value: int | float | str | tuple[()] | None

    def of(self, row: Mapping[str, Any]) -> Any:
        """Return the value for ``row``, lists as plain Python has them in Arrow's records."""
        del row
        return [] if self.value == () else self.value

    @property
    def sql(self) -> str:
        """The value as SQL (DuckDB)."""
        if self.value is None:
            return "NULL"
        return "[]" if self.value == () else repr(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A value computed from the older row: ``of`` from one row as a mapping, ``sql`` the same over its columns."""

    of: Callable[[Mapping[str, Any]], Any]
    sql: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewColumn:
    """A column that schema ``version`` brought to ``table``, and what older rows have in it."""

    version: int
    table: str
    name: str
    older: Constant | Derived


_IDENTIFYING = ("time_us", "record_id", "reason", "detail", "payload")


def _quarantine_id(row: Mapping[str, Any]) -> str:
    text = "\n".join(str(row[name]) for name in _IDENTIFYING)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_CLAIM = '"schema_version": (-?[0-9]{1,9})'


def _claimed_version(row: Mapping[str, Any]) -> int:
    # A payload holds the trajectory's row before its steps, and text inside it has its quotes escaped.
    found = re.search(_CLAIM, row["payload"])
    return int(found[1]) if found else -1


_UNRECORDED: Mapping[str, int | float | str | tuple[()] | None] = {
    "collected_trajectories": (),
    "drawn_trajectories": (),
    "drawn_sources": (),
    "drawn_weights": (),
    "peer_trajectories": (),
    "skipped_at": (),
    "step_hashes": (),
    "pass_tokens": 0,
    "value_loss": None,
    "policy_losses": (),
    "kl_losses": (),
    "value_losses": (),
    "entropies": (),
    "weights_checksum": "",
    "learner_settings": "",
    "learner_state": "",
    "temperature": 0.0,
    "total_updates": 0,
    "lost_updates": 0,
    "reference_checksum": None,
    "proximal_policy_version": None,
    "deterministic": False,
    "cpu_capability": "",
    "torch_build": "",
}
"""What ``updates`` lacked before version 3: that an update was recorded without it is told by ``learner_settings``."""

_UNTOLD: Mapping[str, int | float | str | tuple[()] | None] = {
    "critic_steps": 0,
    "skipped_critic_steps": 0,
    "critic_learning_rate": None,
    "entropy_loss": 0.0,
    "entropy_losses": (),
    "critic_losses": (),
    "critic_grad_norms": (),
}
"""What ``updates`` lacked before version 4; its ``step_hashes`` left out the steps taken in which only the critic learned."""

_UNLIMITED: Mapping[str, int | float | str | tuple[()] | None] = {
    "context_change": ContextChange.NONE.value,
    "context_dropped_tokens": 0,
    "num_preemptions": 0,
}
"""What ``steps`` lacked before version 5: a full context ended the episode, and no engine took memory away."""


NEW_COLUMNS: tuple[NewColumn, ...] = (
    NewColumn(version=2, table="consumptions", name="weight", older=Constant(value=1.0)),
    NewColumn(version=2, table="learned_tokens", name="begin", older=Constant(value=0)),
    NewColumn(version=2, table="learned_tokens", name="weight", older=Constant(value=1.0)),
    NewColumn(version=2, table="updates", name="num_shared_tokens", older=Constant(value=0)),
    NewColumn(version=2, table="updates", name="num_replayed", older=Constant(value=0)),
    NewColumn(
        version=2,
        table="quarantine",
        name="quarantine_id",
        older=Derived(
            of=_quarantine_id, sql=f"left(sha256(concat_ws(chr(10), {', '.join(_IDENTIFYING)})), 16)"
        ),
    ),
    NewColumn(
        version=2,
        table="quarantine",
        name="payload_schema_version",
        older=Derived(
            of=_claimed_version,
            sql=f"coalesce(try_cast(nullif(regexp_extract(payload, '{_CLAIM}', 1), '') AS BIGINT), -1)",
        ),
    ),
    *(
        NewColumn(version=3, table="updates", name=name, older=Constant(value=value))
        for name, value in _UNRECORDED.items()
    ),
    *(
        NewColumn(version=4, table="updates", name=name, older=Constant(value=value))
        for name, value in _UNTOLD.items()
    ),
    *(
        NewColumn(version=5, table="steps", name=name, older=Constant(value=value))
        for name, value in _UNLIMITED.items()
    ),
)
"""Every upgrade step, in the order of the versions."""


def is_known(version: object) -> bool:
    """Whether records of schema ``version`` can be read: this release's, or an older one that has its upgrade steps."""
    return type(version) is int and OLDEST_VERSION <= version <= SCHEMA_VERSION


@functools.cache
def steps_from(table: str, version: int) -> tuple[NewColumn, ...]:
    """Return the columns that rows of ``table`` written under schema ``version`` lack, in the order of the versions."""
    return tuple(step for step in NEW_COLUMNS if step.table == table and step.version > version)


def upgrade_row(table: str, row: Mapping[str, Any], version: int) -> dict[str, Any]:
    """Return a record of ``table`` written under ``version`` with the columns it lacks; what it has stays.

    Raises KeyError where a column that another is derived from is missing.
    """
    upgraded = dict(row)
    for step in steps_from(table, version):
        if step.name not in upgraded:
            upgraded[step.name] = step.older.of(upgraded)
    return upgraded


def upgrade_table(table: str, data: pa.Table, version: int) -> pa.Table:
    """Return rows of ``table`` written under ``version`` with this release's columns, in their order.

    Raises :class:`StoreError` where ``data`` lacks a column that ``version`` had.
    """
    if version == SCHEMA_VERSION:
        return data
    for step in steps_from(table, version):
        if step.name not in data.column_names:
            data = data.append_column(SCHEMAS[table].field(step.name), _older_values(step, data))
    names = [column.name for column in COLUMNS[table]]
    missing = [name for name in names if name not in data.column_names]
    if missing:
        raise StoreError(
            f"rows of {table} of schema version {version} lack {missing}; restore the file from a copy"
        )
    return data.select(names)


def column_sql(table: str, name: str) -> str:
    """Return the SQL for a column of lake files of any version, null where a file lacks it: what older rows have then.

    The name alone for a column that every version had, so that conditions on it reach the files' statistics.
    """
    quoted = f'"{name}"'
    for step in steps_from(table, OLDEST_VERSION):
        if step.name == name:
            return f"coalesce({quoted}, {step.older.sql}) AS {quoted}"
    return quoted


def _older_values(step: NewColumn, data: pa.Table) -> Any:
    kind = SCHEMAS[step.table].field(step.name).type
    if isinstance(step.older, Constant):
        value: Any = pa.scalar(step.older.value, kind)
        return pa.repeat(value, data.num_rows)
    return pa.array(map(step.older.of, data.to_pylist()), type=kind)
