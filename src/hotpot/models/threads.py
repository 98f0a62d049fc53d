"""How many threads to compute with: measured at the start of a run on the policy itself.

Two contended cores, a tiny model and a large one want different counts, so nothing is assumed: each candidate does the
same short piece of work a few times and the best median wins. A fixed count (or deterministic mode, always 1) skips it.
"""

import math
import os
import statistics
import time
from collections.abc import Callable

import torch

from hotpot.models.policy import Policy

ROUNDS = 5
SLOWER = 2.0
"""A candidate is given up after two rounds this many times slower than the best: on cores that others use, threads wait
for each other so long that measuring it to the end would cost more than any choice could save."""
HOPELESS = 10.0
"""A candidate whose first round, which also starts its threads, is this many times slower is given up at once."""
MARGIN = 1.4
"""More threads must be at least this much faster: where another process takes a core, threads that wait for each other
lose many times what they gain, and the archive writer and the environments want a core too."""


def measure_threads(work: Callable[[], object]) -> tuple[int, dict[int, float]]:
    """Return the best thread count for ``work`` and the seconds measured for each candidate (1, 2, 4 ... all cores)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    candidates = [count for count in (1, 2, 4, 8, 16, 32, 64) if count < cores] + [cores]
    seconds: dict[int, float] = {}
    before = torch.get_num_threads()
    try:
        for count in candidates:
            torch.set_num_threads(count)
            seconds[count] = _measure(work, best_s=min(seconds.values(), default=math.inf))
    finally:
        torch.set_num_threads(before)
    best = candidates[0]
    for count in candidates:
        if seconds[count] * MARGIN < seconds[best]:
            best = count
    return best, seconds


def use_threads(count: int) -> None:
    """Let tensor computation in this process use ``count`` threads from here on."""
    torch.set_num_threads(count)


def training_work(policy: Policy) -> Callable[[], object]:
    """Return a short piece of work like a learner's: forward and backward over 16 rows of up to 128 tokens."""
    length = min(128, policy.config.max_context_tokens)
    tokens = torch.zeros(16, length, dtype=torch.long)
    positions = torch.arange(length).expand_as(tokens)

    def work() -> None:
        policy.logits(policy(tokens, positions)).logsumexp(-1).mean().backward()  # type: ignore[no-untyped-call]
        policy.zero_grad(set_to_none=True)

    return work


def _measure(work: Callable[[], object], *, best_s: float) -> float:
    """Return the median seconds of a few rounds; of fewer, where ``best_s`` is out of reach."""
    first = _timed(work)
    if first > HOPELESS * best_s:
        return first
    found: list[float] = []
    while len(found) < ROUNDS and sum(length > SLOWER * best_s for length in found) < 2:
        found.append(_timed(work))
    return statistics.median(found)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
