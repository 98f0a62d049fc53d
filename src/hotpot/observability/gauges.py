"""Gauges of this process: memory, processor time, threads; and the numbers others hand in.

Reads ``/proc`` where there is one and ``resource`` elsewhere. Imports no torch: GPU figures come as arguments. Only
names registered in ``hotpot.metrics`` are ever recorded.
"""

import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hotpot.errors import UsageError
from hotpot.metrics import gauge_names
from hotpot.types import SCHEMA_VERSION, MetricRow

_STATM = Path("/proc/self/statm")


class ProcessGauges:
    """Samples the gauges of one process; idle share is over the time since the sample before.

    Parameters
    ----------
    run_id: the run the rows belong to.
    num_processors: processors open to the process; by default its affinity.
    wall_s, cpu_s: clocks in seconds (the processor time of all threads together).
    """

    def __init__(
        self,
        run_id: str,
        *,
        num_processors: int | None = None,
        wall_s: Callable[[], float] = time.perf_counter,
        cpu_s: Callable[[], float] = time.process_time,
    ) -> None:
        self._run_id = run_id
        self._processors = num_processors or available_processors()
        self._wall_s, self._cpu_s = wall_s, cpu_s
        self._marks = (wall_s(), cpu_s())

    def sample(
        self,
        *,
        update: int,
        policy_version: int,
        env_version: str,
        engine_queue_depth: float | None = None,
        experience_backlog: int | None = None,
        gpu_memory_bytes: int | None = None,
        gpu_utilisation: float | None = None,
        others: Mapping[str, float] | None = None,
    ) -> tuple[MetricRow, ...]:
        """Return one row per gauge that has a value now.

        ``engine_queue_depth`` in requests, ``experience_backlog`` in log segments not archived, ``gpu_utilisation`` as
        a share. Those left out are not recorded. ``others`` are further registered gauges by name.
        """
        found = {
            "system/memory_rss_bytes": resident_bytes(),
            "system/processor_idle_share": self._idle_share(),
            "system/num_threads": threading.active_count() if (count := num_threads()) is None else count,
            "system/engine_queue_depth": engine_queue_depth,
            "system/experience_backlog": experience_backlog,
            "system/gpu_memory_bytes": gpu_memory_bytes,
            "system/gpu_utilisation": gpu_utilisation,
            **(others or {}),
        }
        return gauge_rows(
            {name: value for name, value in found.items() if value is not None},
            run_id=self._run_id,
            update=update,
            policy_version=policy_version,
            env_version=env_version,
        )

    def _idle_share(self) -> float | None:
        wall_s, cpu_s = self._wall_s(), self._cpu_s()
        passed_s, used_s = wall_s - self._marks[0], cpu_s - self._marks[1]
        if passed_s <= 0:
            return None
        self._marks = (wall_s, cpu_s)
        return min(1.0, max(0.0, 1.0 - used_s / (passed_s * self._processors)))


def gauge_rows(
    values: Mapping[str, float], *, run_id: str, update: int, policy_version: int, env_version: str
) -> tuple[MetricRow, ...]:
    """Return ``values`` by registered gauge name as rows of table ``metrics``, measured now.

    Raises
    ------
    UsageError: a name is not registered as a gauge.
    """
    unknown = sorted(set(values) - gauge_names())
    if unknown:
        raise UsageError(
            f"gauge {unknown[0]!r} is not registered; define it in hotpot.metrics before recording it"
        )
    now_us = time.time_ns() // 1_000
    return tuple(
        MetricRow(
            run_id=run_id,
            name=name,
            value=float(value),
            update=update,
            policy_version=policy_version,
            env_version=env_version,
            time_us=now_us,
            schema_version=SCHEMA_VERSION,
        )
        for name, value in values.items()
    )


def available_processors() -> int:
    """Return how many processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes (its peak, where there is no ``/proc``)."""
    try:
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def num_threads() -> int | None:
    """Return the number of threads of this process, native ones too; None where there is no ``/proc``."""
    try:
        return sum(1 for _ in Path("/proc/self/task").iterdir())
    except OSError:
        return None
