"""A run for analysis: its tables as attributes, whole columns as NumPy arrays, reward by any pair of versions.

::

    run = hotpot.open_run("runs/first")
    run.steps.to_arrow(["reward"], where="purpose = 'training'")  # pyarrow.Table
    run.trajectories.to_numpy("reward")                           # float64 [trajectories]
    run.steps.column("behaviour_logprobs").values                 # float32 [tokens], a view of the Arrow buffer

Owns the way from Arrow to NumPy. How rows and columns are found is :class:`~hotpot.experience.reading.reader.RunReader`, of
which a :class:`Run` is one. Views are read-only, as Arrow's buffers are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotpot.errors import UsageError
from hotpot.experience.reading.reader import Parameters, RunReader, column_schema

GROUPABLE = (
    "env_version", "reward_version", "prompt_version", "policy_version", "schema_version", "split", "purpose", "env",
    "actor_id", "actor_group", "end_reason",
)  # fmt: skip
"""Columns of table ``trajectories`` that :meth:`Run.rewards_by` takes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatColumn:
    """A list column as its parts: the list of row ``i`` is ``values[offsets[i]:offsets[i + 1]]``.

    ``offsets`` int32 ``[rows + 1]``, ``values`` of the column's own dtype; both are views of the buffers of ``arrow``,
    which torch takes without a copy and without a warning by ``torch.from_dlpack(column.arrow.values)``.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int32]
    arrow: "pa.ListArray[Any]"


class TableColumns:
    """One table of a run. Each call sees the run as it is then."""

    def __init__(self, run: RunReader, name: str) -> None:
        self._run = run
        self.name = name

    def to_arrow(
        self, columns: Sequence[str] | None = None, *, where: str = "true", params: Parameters | None = None
    ) -> pa.Table:
        """Return the named columns (default: all) of the rows that meet ``where``, in the order of recording.

        ``where`` is an SQL condition with ``params`` for its ``?``; it is applied while reading. Raises :class:`UsageError`
        where column or condition is wrong.
        """
        return self._run.table(self.name, columns, where=where, params=params)

    def scan(
        self,
        columns: Sequence[str] | None = None,
        *,
        where: str = "true",
        params: Parameters | None = None,
        batch_rows: int = 65_536,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the same batch by batch, for more than fits into memory; rows come once each, in no promised order."""
        return self._run.batches(self.name, columns, where=where, params=params, batch_rows=batch_rows)

    def column(self, name: str, *, where: str = "true", params: Parameters | None = None) -> FlatColumn:
        """Return a list column of numbers as flat values and offsets.

        Files are joined by one copy; what comes from one file, or from one batch of :meth:`scan` through :func:`flat`, is
        copied nowhere. Raises :class:`UsageError` where it is no list of numbers, or as :meth:`to_arrow`.
        """
        return flat(self.to_arrow([name], where=where, params=params).column(0))

    def to_numpy(self, name: str, *, where: str = "true", params: Parameters | None = None) -> NDArray[Any]:
        """Return a column of one value a row: int64, float64 (NaN where an integer or float is null), bool or text.

        Raises :class:`UsageError` where it is a list (:meth:`column` takes those), or as :meth:`to_arrow`.
        """
        if pa.types.is_list(column_schema(self.name, [name]).field(0).type):
            raise UsageError(f"{self.name}.{name} holds a list a row; take column({name!r})")
        return self.to_arrow([name], where=where, params=params).column(0).to_numpy()


class _Table:
    """Gives a run the attribute that the table is named by."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, run: RunReader, owner: type | None = None) -> TableColumns:
        return TableColumns(run, self._name)


class Run(RunReader):
    """A :class:`RunReader` with an attribute for every table."""

    steps = _Table()
    trajectories = _Table()
    groups = _Table()
    updates = _Table()
    learned_tokens = _Table()
    metrics = _Table()
    evaluations = _Table()
    events = _Table()
    versions = _Table()
    quarantine = _Table()
    attempts = _Table()
    consumptions = _Table()
    discards = _Table()

    def rewards_by(self, *columns: str, where: str = "purpose = 'training'") -> pa.Table:
        """Return mean and population variance of the trajectories' reward for each combination of ``columns``.

        ``run.rewards_by("policy_version", "env_version")`` has these two columns, ``num_trajectories``, ``reward_mean`` and
        ``reward_variance``, ordered by the first two. Raises :class:`UsageError` where a column is none of ``GROUPABLE``.
        """
        unknown = [column for column in columns if column not in GROUPABLE]
        if unknown or not columns:
            raise UsageError(f"rewards can't be had by {unknown}; give one or more of {', '.join(GROUPABLE)}")
        cuts = ", ".join(columns)
        return self.sql(
            f"SELECT {cuts}, count(*) AS num_trajectories, avg(reward) AS reward_mean, "
            f"var_pop(reward) AS reward_variance FROM trajectories WHERE ({where}) GROUP BY {cuts} ORDER BY {cuts}"
        )

    def importance_ratios(self) -> pa.Table:
        """Return, for each update, the importance ratios exp(new - old) of its loss tokens, each token once.

        At the weights the update started from, before it learned: 1 everywhere where the sampler's log-probabilities are
        right and nothing is stale. Columns: ``update``, ``num_tokens``, ``ratio_mean``, ``ratio_min``, ``ratio_max`` and
        ``effective_share``, (sum of ratios)^2 / (number x sum of squares), 1 where all are equal (Kish 1965).
        """
        return self.sql(IMPORTANCE_RATIOS)


IMPORTANCE_RATIOS = """
SELECT "update", count(*) AS num_tokens, avg(ratio) AS ratio_mean, min(ratio) AS ratio_min, max(ratio) AS ratio_max,
  sum(ratio) ** 2 / (count(*) * sum(ratio ** 2)) AS effective_share
FROM (
  SELECT "update", exp(unnest(new_logprobs)::DOUBLE - unnest(old_logprobs)::DOUBLE) AS ratio, unnest(loss_mask) AS mask
  FROM learned_tokens)
WHERE mask = 1 GROUP BY "update" ORDER BY "update"
"""
"""The query of :meth:`Run.importance_ratios`."""


def open_run(run: Path | str) -> Run:
    """Open a run for reading, by its folder or as ``LAKE#RUN_ID``; see :class:`Run`."""
    return Run.open(run)


def flat(column: "pa.ChunkedArray[Any] | pa.Array[Any]") -> FlatColumn:
    """Return a list column of numbers as values and offsets, without a copy where it is one piece.

    Raises :class:`UsageError` where it is no list of numbers.
    """
    kind = column.type
    if not (
        pa.types.is_list(kind)
        and (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type))
    ):
        raise UsageError(f"{kind} is no list of numbers; take to_arrow or to_numpy")
    joined: Any = column
    if isinstance(column, pa.ChunkedArray):
        joined = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if isinstance(joined, pa.ChunkedArray):  # no chunk at all
            joined = pa.array([], kind)
    return FlatColumn(
        values=joined.values.to_numpy(zero_copy_only=True),
        offsets=joined.offsets.to_numpy(zero_copy_only=True),
        arrow=joined,
    )
