"""What a metric is, and how its query is written.

Owns the form of a definition and the SQL text (DuckDB). Knows no metric by name, no reader, no run and no clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from hotpot.errors import UsageError
from hotpot.types import TABLES

CUTS = (
    "update",
    "policy_version",
    "env_version",
    "reward_version",
    "prompt_version",
    "actor_id",
    "actor_group",
    "split",
    "purpose",
)
"""Columns a metric can be cut by, where its table has them."""

SAMPLING_CUTS = ("temperature", "top_p", "top_k", "repetition_penalty", "engine", "precision")
"""Further cuts of the metrics over sampling parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric.

    ``source`` is what stands after FROM: the table's name, or a query over it that gives one row per trajectory.
    ``numerator`` and ``denominator`` are SQL aggregates over it, ``mask`` its WHERE. ``healthy`` and ``remedy`` are for
    the operator: the range to expect, and what to do outside it. ``cuts`` are the columns it can be cut by.
    """

    name: str
    unit: str
    meaning: str
    table: str
    source: str
    numerator: str
    denominator: str
    mask: str
    healthy: str
    remedy: str
    cuts: tuple[str, ...]

    @property
    def gauge(self) -> bool:
        """Whether the value is recorded in table ``metrics`` rather than derived from other tables."""
        return self.table == "metrics"


def sql(metric: Metric, by: Sequence[str] = (), where: str = "") -> str:
    """Return the query for ``metric``: one row per cut with the ``by`` columns and ``value`` (null where undefined).

    ``where`` is a further SQL condition over the columns of the metric's table. Rows are ordered by the cuts.

    Raises
    ------
    UsageError: a column in ``by`` is none of the metric's cuts.
    """
    for column in by:
        if column not in metric.cuts:
            raise UsageError(
                f"metric {metric.name} cannot be cut by {column!r}: table {metric.table} has no such cut; "
                f"use one of {', '.join(metric.cuts)}"
            )
    cuts = ", ".join(f'"{column}"' for column in by)
    conditions = " AND ".join(f"({condition})" for condition in (metric.mask, where) if condition)
    value = f"({metric.numerator})::DOUBLE / nullif(({metric.denominator})::DOUBLE, 0) AS value"
    lines = [
        f"SELECT {cuts + ', ' if cuts else ''}{value}",
        f"FROM {metric.source}",
        f"WHERE {conditions}" if conditions else "",
        f"GROUP BY {cuts}\nORDER BY {cuts}" if cuts else "",
    ]
    return "\n".join(line for line in lines if line)


def define_gauge(
    name: str, unit: str, meaning: str, healthy: str, remedy: str, *, largest: bool = False
) -> Metric:
    """Return a gauge, whose values are rows of table ``metrics``: the mean over the samples taken, or the largest of them."""
    return define(
        name, "metrics", unit, meaning,
        "max(value)" if largest else "sum(value)", "1" if largest else "count(*)",
        mask=f"name = {quoted(name)}", healthy=healthy, remedy=remedy,
    )  # fmt: skip


def quoted(text: str) -> str:
    """Return ``text`` as a SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def define(
    name: str,
    table: str,
    unit: str,
    meaning: str,
    numerator: str,
    denominator: str,
    *,
    healthy: str,
    remedy: str,
    mask: str = "",
    source: str = "",
    more_cuts: tuple[str, ...] = (),
    without_cuts: tuple[str, ...] = (),
    cuts: tuple[str, ...] = (),
) -> Metric:
    """Return a metric over ``table`` whose cuts are the columns that table has, ``without_cuts`` apart, or ``cuts``: those
    that its ``source`` has."""
    columns = {column.name for column in fields(TABLES[table])}
    cuts = cuts or tuple(cut for cut in (*CUTS, *more_cuts) if cut in columns and cut not in without_cuts)
    return Metric(
        name=name,
        unit=unit,
        meaning=meaning,
        table=table,
        source=source or table,
        numerator=numerator,
        denominator=denominator,
        mask=mask,
        healthy=healthy,
        remedy=remedy,
        cuts=cuts,
    )
