"""Rows that are looked for in a table by the values of some of its columns, as SQL and over Arrow alike.

Owns both forms of the same condition. Knows no table.
"""

import functools
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True, slots=True, kw_only=True)
class Sought:
    """The rows in which ``columns`` have one of the ``values``, each with one for every column."""

    columns: tuple[str, ...]
    values: tuple[tuple[str | int, ...], ...]

    @property
    def condition(self) -> str:
        """The condition as SQL."""
        either = (
            " AND ".join(f"{name} = {_literal(one)}" for name, one in zip(self.columns, values, strict=True))
            for values in self.values
        )
        return f"({' OR '.join(f'({each})' for each in either) or 'false'})"

    def of(self, rows: pa.Table) -> pa.Table:
        """Return those of ``rows`` that are sought; ``rows`` has the columns."""
        none = pc.field(self.columns[0]).is_null() & pc.field(self.columns[0]).is_valid()
        either = [
            functools.reduce(
                lambda one, two: one & two,
                [pc.field(name) == pa.scalar(one) for name, one in zip(self.columns, values, strict=True)],
            )
            for values in self.values
        ]
        return rows.filter(functools.reduce(lambda one, two: one | two, either, none))


def _literal(value: str | int) -> str:
    return str(value) if isinstance(value, int) else f"'{value.replace(chr(39), chr(39) * 2)}'"
