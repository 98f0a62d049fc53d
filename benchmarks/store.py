"""The experience store at scale, in one run: what acknowledging, archiving, reading and sampling cost, as ratios.

SCALE (default 1) times 100,000 trajectories of about 1,000 tokens, recorded from real episodes and replicated with
jitter (``store_parts/load.py``). Prints what it measures as it goes and ends with one JSON line; exits with 1 where a
bound is missed. Needs the extra ``bench``. Its folder under ``bench-runs`` is removed at the end.

``ack_ms``              median of one ``append`` of 128 trajectories; ``ack_ms_growth`` the last tenth over the first
``cost_growth``         append and archive per trajectory, the last tenth over the first
``memory_growth_mb``    resident memory of the writing process from a tenth of the run to its end
``append_over_parquet`` speed of bulk writing through the lake over a bare write of the same columns
``scan_…``              reading one column: bytes over the column's compressed bytes, speed over bare pyarrow
``bytes_over_jsonl``    bytes of the lake over compact JSON lines of the same values
``sample_over_…``       speed of drawing 256 random trajectories from the lake over the other's
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parent))

T = TypeVar("T")

HOTPOT = [sys.executable, "-m", "hotpot.cli"]
TRAJECTORIES = 100_000
BOUNDS: dict[str, tuple[str, float]] = {
    "ack_ms_growth": ("<=", 1.2),
    "append_over_parquet": (">=", 0.7),
    "scan_bytes_over_column": ("<=", 1.2),
    "scan_over_parquet": (">=", 0.9),
    "bytes_over_jsonl": ("<=", 0.35),
    "cost_growth": ("<=", 1.2),
}
"""What must hold; ``sample_over_…`` at least 1 is the aim, and reported only."""


def main() -> None:
    folder = Path("bench-runs") / time.strftime("store-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    try:
        line = measure(folder.resolve(), round(TRAJECTORIES * float(os.environ.get("SCALE") or 1)))
    finally:
        shutil.rmtree(folder)
    missed = [name for name in BOUNDS if not holds(name, line[name])]
    for name in missed:
        print(f"missed: {name} = {line[name]}, the bound is {' '.join(map(str, BOUNDS[name]))}")
    print(json.dumps(line))
    if missed:
        sys.exit(1)


def measure(folder: Path, num_trajectories: int) -> dict[str, float]:
    """Write, weigh, read and sample one run in ``folder``; return the figures of the last line."""
    from store_parts import bulk, sampling, sizes
    from store_parts.load import Load, record
    from store_parts.writing import write

    line: dict[str, float] = {}
    load = tell("recording real episodes", lambda: Load(record(folder, HOTPOT), run_id="store"))
    print(f"  {load.num_recorded} recorded episodes to replicate")
    run = folder / "store"
    written = tell("writing", lambda: write(run, load, num_trajectories))
    line["trajectories"], line["tokens"] = written.num_trajectories, written.num_tokens
    for name in ("ack_ms", "ack_ms_p99", "ack_ms_growth", "cost_ms", "cost_growth", "memory_growth_mb"):
        line[name] = getattr(written, name)
    line["bytes_over_jsonl"] = tell(
        "writing as JSON lines", lambda: sizes.lake_bytes(run) / sizes.json_bytes(run, folder)
    )
    columns = sizes.column_bytes(sizes.lake_files(run, "steps"))
    print("  " + ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in columns.most_common(8)))
    line["append_over_parquet"] = tell("writing in bulk", lambda: bulk.append_over_parquet(run, folder))
    tell("compacting", lambda: bulk.compact_run(run))
    line["scan_bytes_over_column"], line["scan_over_parquet"] = tell("scanning", lambda: bulk.scan(run))
    for name, ratio in tell("sampling", lambda: sampling.sample(run, folder)).items():
        line[f"sample_over_{name}"] = ratio
    return {name: round(value, 4) for name, value in line.items()}


def tell(what: str, act: Callable[[], T]) -> T:
    """Do it, and say how long it took."""
    print(f"{what} ...", flush=True)
    began = time.perf_counter()
    result = act()
    print(f"{what}: {time.perf_counter() - began:.1f} s", flush=True)
    return result


def holds(name: str, value: float) -> bool:
    """Whether ``value`` keeps the bound of ``name``."""
    sign, bound = BOUNDS[name]
    return value <= bound if sign == "<=" else value >= bound


if __name__ == "__main__":
    main()
