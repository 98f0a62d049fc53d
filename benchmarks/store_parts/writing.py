"""What acknowledging and archiving cost as a run grows, and the memory it takes.

A chunk of batches is made first, then appended one batch at a time, then flushed: an append is timed alone, the chunk's
appends and the wait for the lake together are its cost. The archive thread starts in the middle of a chunk, as in a run.
"""

import gc
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from hotpot.config import StoreSection
from hotpot.experience import ExperienceStore
from store_parts.load import Load

BATCH = 128
CHUNK_BATCHES = 24
MIN_CHUNKS = 20
MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What writing measured. Growths are the last tenth of the run over its first (medians)."""

    num_trajectories: int
    num_tokens: int
    ack_ms: float
    ack_ms_p99: float
    ack_ms_growth: float
    cost_ms: float
    cost_growth: float
    memory_growth_mb: float
    memory_mb: float


def write(folder: Path, load: Load, num_trajectories: int) -> Written:
    """Write ``num_trajectories`` replicas into a new run in ``folder``, in batches of :data:`BATCH`."""
    batches = max(2 * MIN_CHUNKS, -(-num_trajectories // BATCH))
    chunk = max(1, min(CHUNK_BATCHES, batches // MIN_CHUNKS))
    acks: list[float] = []
    costs: list[float] = []
    memory: list[float] = []
    tokens = 0
    with ExperienceStore.open(
        folder, run_id=folder.name, settings=StoreSection(), vocabulary_size=load.vocabulary_size
    ) as store:
        for first in range(0, batches, chunk):
            made = [load.batch(BATCH * number, BATCH) for number in range(first, min(batches, first + chunk))]
            tokens += sum(t.row.num_prompt_tokens + t.row.num_sampled_tokens for batch in made for t in batch)
            for batch in made:
                store.ledger.lease(load.leases(batch))
            began = time.perf_counter()
            for batch in made:
                before = time.perf_counter()
                report = store.append(batch)
                acks.append(time.perf_counter() - before)
                if report.quarantined:
                    raise RuntimeError(
                        f"the gate refused {report.quarantined[0]}; correct store_parts/load.py"
                    )
            store.flush()
            costs.append((time.perf_counter() - began) / (len(made) * BATCH))
            del made
            memory.append(resident_mb())
            _tell(first + chunk, batches, acks[-chunk:], costs[-1], memory[-1])
    early = memory[max(0, len(memory) // 10 - 1)]
    return Written(
        num_trajectories=batches * BATCH,
        num_tokens=tokens,
        ack_ms=1e3 * statistics.median(acks),
        ack_ms_p99=1e3 * sorted(acks)[int(0.99 * len(acks))],
        ack_ms_growth=_growth(acks),
        cost_ms=1e3 * statistics.median(costs),
        cost_growth=_growth(costs),
        memory_growth_mb=memory[-1] - early,
        memory_mb=memory[-1],
    )


def resident_mb() -> float:
    """Return the process's resident memory in MiB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MEBIBYTE


def _growth(values: list[float]) -> float:
    tenth = max(1, len(values) // 10)
    return statistics.median(values[-tenth:]) / statistics.median(values[:tenth])


def _tell(done: int, batches: int, acks: list[float], cost: float, memory: float) -> None:
    print(
        f"  {BATCH * min(done, batches):>7} trajectories: {1e3 * statistics.median(acks):6.1f} ms to acknowledge {BATCH}, "
        f"{1e3 * cost:.3f} ms a trajectory with its way to the lake, {memory:.0f} MiB",
        flush=True,
    )
