"""Every metric there is: a query over the lake with a declared mask and denominator.

A metric's value is ``numerator / denominator`` over the rows of its table that pass its mask, in each cut. Nothing is
averaged twice and no padding is ever counted, because the rows are the records themselves. Process gauges (memory,
idle share, queue depth) are rows of table ``metrics`` under their registered name; nothing unregistered is recorded.
Every metric can be cut by policy version and environment version.

``definition`` what a metric is, and its SQL · ``rollout`` · ``engine`` · ``context`` · ``gate`` · ``training`` · ``replay`` ·
``queue`` · ``evaluation`` · ``system`` · ``supervision`` the metrics
"""

from difflib import get_close_matches
from types import MappingProxyType

from hotpot.errors import UsageError
from hotpot.metrics import (
    context,
    engine,
    evaluation,
    gate,
    queue,
    replay,
    rollout,
    supervision,
    system,
    training,
)
from hotpot.metrics.definition import CUTS, SAMPLING_CUTS, Metric, quoted, sql

__all__ = ["CUTS", "METRICS", "SAMPLING_CUTS", "Metric", "gauge_names", "metric", "quoted", "sql"]

METRICS = MappingProxyType(
    {
        found.name: found
        for found in (
            *rollout.METRICS,
            *context.METRICS,
            *engine.METRICS,
            *gate.METRICS,
            *training.METRICS,
            *replay.METRICS,
            *queue.METRICS,
            *evaluation.METRICS,
            *system.METRICS,
            *supervision.METRICS,
        )
    }
)
"""Every metric by name, in the order of the documentation."""


def metric(name: str) -> Metric:
    """Return the metric called ``name``.

    Raises
    ------
    UsageError: there is none; names the nearest.
    """
    found = METRICS.get(name)
    if found is not None:
        return found
    endings = {known: known.rsplit("/", 1)[-1] for known in METRICS}
    near = get_close_matches(name, [*METRICS, *endings.values()], n=1, cutoff=0.5)
    meant = [known for known, ending in endings.items() if near and near[0] in {known, ending}]
    hint = f"nearest: {' or '.join(meant)}" if meant else "docs/metrics.md lists them"
    raise UsageError(f"metric {name!r} is not registered; {hint}")


def gauge_names() -> frozenset[str]:
    """Return the names that may be recorded in table ``metrics``."""
    return frozenset(found.name for found in METRICS.values() if found.gauge)
