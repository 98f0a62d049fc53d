"""How many threads to compute with: measured at the start of a run on the policy itself.

Two contended cores, a tiny model and a large one want different counts, so nothing is assumed: each candidate does the
same short piece of work a few times and the best median wins. A fixed count (or deterministic mode, always 1) skips it.
"""

import os
import statistics
import time
from collections.abc import Callable

import torch

ROUNDS = 5
MARGIN = 1.1
"""More threads must be at least this much faster: they also take a core from the archive writer and the environments."""


def measure_threads(work: Callable[[], object]) -> tuple[int, dict[int, float]]:
    """Return the best thread count for ``work`` and the median seconds of each candidate (1, 2, 4 ... all cores)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    candidates = [count for count in (1, 2, 4, 8, 16, 32, 64) if count < cores] + [cores]
    seconds: dict[int, float] = {}
    before = torch.get_num_threads()
    try:
        for count in candidates:
            torch.set_num_threads(count)
            work()
            seconds[count] = statistics.median(_timed(work) for _ in range(ROUNDS))
    finally:
        torch.set_num_threads(before)
    best = 1
    for count in candidates:
        if seconds[count] * MARGIN < seconds[best]:
            best = count
    return best, seconds


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
