"""Whether records have the types their classes declare: what every other rule relies on. Pure.

Also how any value is written out in words, however odd it is.
"""

import itertools
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from hotpot.experience.records.schema import COLUMNS, Column
from hotpot.types import StepRow, Trajectory, TrajectoryRow


def shown(value: Any) -> str:
    """Return the ``repr`` of any value, or its type where that is too long or too deep for Python to write."""
    try:
        return repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that can't be written out"


class _TypeCheck:
    """Types of one record class. The types of a good row are remembered, so that the next such row costs one lookup."""

    def __init__(self, table: str) -> None:
        self._columns = COLUMNS[table]
        self._values = operator.attrgetter(*(column.name for column in self._columns))
        self._good: set[tuple[type, ...]] = set()
        self._tuples = [(c, operator.attrgetter(c.name)) for c in self._columns if c.kind == "tuple"]
        self._arrays = [
            (c, operator.attrgetter(c.name), np.dtype(c.python_type))
            for c in self._columns
            if c.kind == "array"
        ]

    def __call__(self, rows: Iterable[Any]) -> str | None:
        rows = tuple(rows)
        for row in rows:
            values = self._values(row)
            found = tuple(map(type, values))
            if found in self._good:
                continue
            for column, value in zip(self._columns, values, strict=True):
                if not _fits(column, value):
                    return _type_words(column, value)
            self._good.add(found)
        for column, getter in self._tuples:
            elements = tuple(itertools.chain.from_iterable(map(getter, rows)))
            if set(map(type, elements)) - {column.python_type}:
                return _type_words(column, elements)
        for column, getter, dtype in self._arrays:
            for value in map(getter, rows):
                if value.dtype != dtype or value.ndim != 1:
                    return _type_words(column, (value.dtype, value.shape))
        return None


def _fits(column: Column, value: Any) -> bool:
    if value is None:
        return column.nullable
    if column.kind == "tuple":
        return type(value) is tuple
    if column.kind == "array":
        return type(value) is np.ndarray
    # A StrEnum or a NumPy float is as good as its base; a bool where an int belongs is a mistake.
    return isinstance(value, column.python_type) and (type(value) is not bool or column.python_type is bool)


def _type_words(column: Column, value: Any) -> str:
    return (
        f"{column.name} = {shown(value):.200} is not {column.arrow}{' or null' if column.nullable else ''}; "
        "correct whoever filled the field"
    )


check_row_types = _TypeCheck("trajectories")
check_step_types = _TypeCheck("steps")
"""Return words on the first value of rows of the class that is not of its declared type, or None."""


def well_formed(trajectory: Trajectory) -> bool:
    """Whether it is a Trajectory of a TrajectoryRow and a tuple of StepRow, whatever their fields hold."""
    return (
        type(trajectory) is Trajectory
        and type(trajectory.row) is TrajectoryRow
        and type(trajectory.steps) is tuple
        and set(map(type, trajectory.steps)) <= {StepRow}
    )
