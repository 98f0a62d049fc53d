"""Whole trajectories side by side in Arrow: a round of hot, or a log segment of cold.

Owns the form: table ``rows`` has a line per trajectory, table ``steps`` their steps, a trajectory's one after the other
and in the order of ``rows``. So every list column of a trajectory is one contiguous run of values, and taking many
trajectories apart is a matter of few large copies. Knows no file and no policy.

Invariants: ``Block.of(trajectories).trajectories(...)`` gives back equal trajectories; a block holds a trajectory with
all its steps or not at all.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotpot.experience.records.schema import COLUMNS, from_table, to_table
from hotpot.experience.replay.keys import id_keys
from hotpot.types import Trajectory

_SCALAR_BYTES = 8
"""What a scalar, an offset or a list entry of a width of its own is counted as; none takes more."""


class Block:
    """Trajectories of one block. ``rows`` and ``steps`` have the columns of their tables, in one chunk each."""

    def __init__(self, rows: pa.Table, steps: pa.Table) -> None:
        """Take tables whose steps are in the order of the rows; :meth:`arranged` makes that so."""
        self.rows, self.steps = rows.combine_chunks(), steps.combine_chunks()

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Self:
        """Return a block of ``trajectories``, in their order."""
        steps = [step for trajectory in trajectories for step in trajectory.steps]
        return cls(to_table("trajectories", [t.row for t in trajectories]), to_table("steps", steps))

    @classmethod
    def arranged(cls, rows: pa.Table, steps: pa.Table) -> Self:
        """Return a block of those trajectories of ``rows`` whose steps are all in ``steps``.

        ``steps`` of one trajectory are in order; they may lie between those of others.
        """
        found: Any = pc.index_in(steps.column("trajectory_id"), value_set=rows.column("trajectory_id"))
        owners = found.combine_chunks().fill_null(-1).to_numpy()
        counts = np.bincount(owners[owners >= 0], minlength=rows.num_rows)
        whole = counts == rows.column("num_steps").to_numpy()
        # The entry more is for steps of no row, whose owner is -1.
        kept = np.flatnonzero(np.append(whole, False)[owners])
        kept = kept[np.argsort(owners[kept], kind="stable")]
        if not np.array_equal(kept, np.arange(steps.num_rows)):
            steps = steps.take(kept)
        return cls(rows.filter(pa.array(whole)), steps)

    @cached_property
    def keys(self) -> NDArray[np.uint64]:
        """Key of each trajectory, uint64 ``[n]``."""
        ids: list[Any] = self.rows.column("trajectory_id").to_pylist()
        return id_keys(ids)

    @cached_property
    def step_bounds(self) -> NDArray[np.int64]:
        """Where each trajectory's steps begin, int64 ``[n + 1]``, with the end of the last."""
        return np.concatenate([[0], np.cumsum(self.rows.column("num_steps").to_numpy())])

    @cached_property
    def _sorter(self) -> NDArray[np.int64]:
        return np.argsort(self.keys)

    def places_of(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the places of the trajectories with ``keys``, int64 ``[n]``; -1 where the block has none."""
        if not self.rows.num_rows:
            return np.full(len(keys), -1, np.int64)
        found = np.searchsorted(self.keys, keys, sorter=self._sorter)
        places = self._sorter[np.minimum(found, len(self.keys) - 1)]
        return np.where(self.keys[places] == keys, places, -1)

    def take(self, places: NDArray[np.int64]) -> "Block":
        """Return a block of its own of the trajectories at ``places``, in their order."""
        begins, ends = self.step_bounds[places], self.step_bounds[places + 1]
        steps = ranges(begins, ends - begins)
        return Block(self.rows.take(places), self.steps.take(steps))

    def trajectories(self, places: NDArray[np.int64]) -> list[Trajectory]:
        """Return the trajectories at ``places``, in their order."""
        part = self.take(places)
        rows, steps = from_table("trajectories", part.rows), from_table("steps", part.steps)
        bounds = part.step_bounds
        return [
            Trajectory(row=row, steps=tuple(steps[bounds[place] : bounds[place + 1]]))
            for place, row in enumerate(rows)
        ]

    def sizes(self) -> NDArray[np.int64]:
        """Return the bytes of each trajectory, int64 ``[n]``: a bound on what it takes in memory, the same in any block."""
        steps = np.concatenate([[0], np.cumsum(_line_bytes("steps", self.steps))])
        return _line_bytes("trajectories", self.rows) + np.diff(steps[self.step_bounds])


def ranges(begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return begin, begin + 1, ..., begin + length - 1 of each pair, one after the other."""
    firsts = np.cumsum(lengths) - lengths
    return np.repeat(begins - firsts, lengths) + np.arange(int(lengths.sum()))


def _line_bytes(table: str, data: pa.Table) -> NDArray[np.int64]:
    total = np.zeros(data.num_rows, np.int64)
    for column in COLUMNS[table]:
        values: Any = data.column(column.name).combine_chunks()
        total += _SCALAR_BYTES
        if column.kind != "scalar":
            lengths = values.value_lengths().to_numpy()
            total += lengths * (_SCALAR_BYTES if column.kind == "tuple" else _width(column.python_type))
            if column.python_type is str:
                texts = np.concatenate([[0], np.cumsum(_text_bytes(values.flatten()))])
                total += np.diff(texts[np.concatenate([[0], np.cumsum(lengths)])])
        elif column.python_type is str:
            total += _text_bytes(values)
    return total


def _width(kind: type) -> int:
    return int(np.dtype(kind).itemsize)


def _text_bytes(values: Any) -> NDArray[np.int64]:
    lengths: Any = pc.binary_length(values)
    counted: NDArray[np.int64] = lengths.fill_null(0).to_numpy().astype(np.int64)
    return counted
