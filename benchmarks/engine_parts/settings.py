"""The stated settings of each side, three at most; the best of a side counts.

Threads: one, or all cores of the process up to two (a benchmark of two cores; on more, CORES says how many).
"""

import os
from dataclasses import replace
from typing import Any

from engine_parts.work import BatchSizes, EpisodeSizes

CORES: list[int] = sorted(os.sched_getaffinity(0))[: int(os.environ.get("CORES", "2"))]
MOST = int(os.environ.get("SETTINGS", "3"))
"""Settings tried of each side."""
ROUNDS = int(os.environ.get("ROUNDS", "2"))
"""Rounds of each setting that count."""

EPISODES = EpisodeSizes(episodes=int(os.environ.get("EPISODES", "32")))
FEW = replace(EPISODES, episodes=min(8, EPISODES.episodes))
PREFILL = replace(FEW, sampled=1)
BATCHES = {
    "smollm2": BatchSizes(prompts=EPISODES.episodes, shortest=16, longest=256, sampled=32),
    "tiny": BatchSizes(prompts=2 * EPISODES.episodes, shortest=32, longest=256, sampled=48),
}

Settings = dict[str, Any]


def ours(concurrency: int) -> dict[str, Settings]:
    """Return the embedded engine's: threads, and the largest size of a forward pass."""
    many = len(CORES)
    found = {
        f"{many} threads": {"threads": many, "engine": {"max_concurrency": concurrency}},
        f"{many} threads, prefill 512": {
            "threads": many,
            "engine": {"max_concurrency": concurrency, "prefill_tokens": 512},
        },
        "1 thread": {"threads": 1, "engine": {"max_concurrency": concurrency}},
    }
    return _first(found)


def transformers() -> dict[str, Settings]:
    """Return those of ``generate_batch``: threads, and how many tokens are in a forward pass. Sizes of the cache are given,
    since it takes them from a GPU's memory otherwise."""
    many, cache = len(CORES), {"num_blocks": 128, "page_size": 256}
    found = {
        f"{many} threads": {"threads": many, "batching": {**cache, "max_batch_tokens": 2048}},
        f"{many} threads, batches of 512": {"threads": many, "batching": {**cache, "max_batch_tokens": 512}},
        "1 thread": {"threads": 1, "batching": {**cache, "max_batch_tokens": 2048}},
    }
    return _first(found)


def vllm() -> dict[str, Settings]:
    """Return those of ``vllm serve``: compiled or not, and whether a core is left for its server and the driver."""
    every, most = ",".join(map(str, CORES)), str(max(EPISODES.episodes, 2))
    space = {"VLLM_CPU_KVCACHE_SPACE": "4"}
    found = {
        "eager, all cores": {
            "options": ["--max-num-seqs", most, "--enforce-eager"],
            "environment": {**space, "VLLM_CPU_OMP_THREADS_BIND": every},
        },
        "compiled, all cores": {
            "options": ["--max-num-seqs", most],
            "environment": {**space, "VLLM_CPU_OMP_THREADS_BIND": every},
        },
        "eager, not bound, batches of 2048": {
            "options": ["--max-num-seqs", most, "--enforce-eager", "--max-num-batched-tokens", "2048"],
            "environment": {
                **space,
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(len(CORES)),
            },
        },
    }
    return _first(found)


def _first(found: dict[str, Settings]) -> dict[str, Settings]:
    return dict(list(found.items())[:MOST])
