"""The demo on seeds that were not used for tuning: hold-out success before and after, and the seconds it took.

Each seed is what `make demo SEED=n` does: warm start, then training, in a process of its own. Prints one line a seed and
ends with one JSON line: seeds, before_max, after_min, seconds_max.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

SEEDS = (101, 102, 103, 104, 105)
HOTPOT = [sys.executable, "-m", "hotpot.cli"]
RECIPE = "recipes/order_desk.toml"


def run_seed(seed: int, folder: Path) -> dict[str, float]:
    """Warm-start and train one seed; return what its summary says, and the wall time of both commands."""
    started = time.perf_counter()
    run_id, model = f"bench-demo-{seed}", folder / f"model-{seed}"
    common = [RECIPE, f"run.seed={seed}"]
    subprocess.run(
        [*HOTPOT, "model", "warmstart", *common, "--out", str(model)], check=True, stdout=subprocess.DEVNULL
    )
    train = [*HOTPOT, "train", *common, f"run.id={run_id}", f"run.folder={folder}", f"model.path={model}"]
    subprocess.run(train, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    summary = json.loads((folder / run_id / "summary.json").read_text())
    holdout = summary["holdout"]
    return {"before": holdout["before"]["mean"], "after": holdout["after"]["mean"], "seconds": seconds}


def main() -> None:
    seeds = SEEDS[: int(os.environ.get("SEEDS", len(SEEDS)))]
    folder = Path("bench-runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    results = []
    for seed in seeds:
        results.append(run_seed(seed, folder))
        print(
            f"seed {seed}: " + "  ".join(f"{key} {value:.3f}" for key, value in results[-1].items()),
            flush=True,
        )
    line = {
        "seeds": len(seeds),
        "before_max": max(result["before"] for result in results),
        "after_min": min(result["after"] for result in results),
        "seconds_max": round(max(result["seconds"] for result in results), 1),
    }
    print(json.dumps(line))
    if line["before_max"] > 0.35 or line["after_min"] < 0.90:
        sys.exit(1)


if __name__ == "__main__":
    main()
