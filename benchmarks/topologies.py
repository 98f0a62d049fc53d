"""The three topologies on an environment that answers late: trajectories learned per second, and whether the policies are as good.

The order desk behind injected latency: each call really waits, by the long-tailed law of
``benchmarks/topologies_parts/settings.py``. It is fixed in units of what a core takes to generate and learn one trajectory, measured
first, so that the synchronous loop, over-issue on, leaves 70 to 75 % of two cores idle. Nothing here waits but for it. Shape:
16 groups of 32 environments, 64 trajectories an update, queue depth 200, weights broadcast every 10 updates.
In turns, seed by seed, from the same starting model on the same tasks: `sync`, `async`, `batched`.

`sync_idle_share`           1 - processor time of all the run's processes / (cores x wall time), of the measured phase
`async_over_sync`, `batched_over_sync`   trajectories learned per second; medians over the seeds of the ratio of runs beside each other
`async_over_ideal`          time of two cores that share generating and learning without a rest, at the rates of one core for
                            each, over the run's: measured by itself, without latency, environments inline, by the token
                            (`benchmarks/topologies_parts/rates.py`)
`holdout_difference_low`    hold-out success after the last update minus that of sync, lower end of the paired 95 % interval:
                            same tasks, same number of trajectories, all seeds together (pairs are tasks)

The measured phase leaves out the first tenth of the updates, evaluations and the start of processes. Prints how loaded the
machine is beside each figure, and the staleness and length bias of each run. Ends with one JSON line; exits with 1 where a
bound is missed. Environment: UPDATES (200), SEEDS (731,732,733), SCALE (1: the reference shape), HOLDOUT (512 tasks), MODEL
(one starting model for all seeds, by default each has its own), FOLDER (go on in it: what is there is not done again).
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topologies_parts.judge import Run, difference_low, ideal_s, read_run, tables
from topologies_parts.settings import (
    COMMON,
    CORES,
    DEPTH,
    ENVIRONMENTS,
    GROUPS,
    POLICY,
    RECIPE,
    SAMPLES,
    TASKS,
    TOPOLOGIES,
    UPDATES,
    law,
    waiting,
)

PARTS = Path(__file__).parent / "topologies_parts"
HOLDOUT = int(os.environ.get("HOLDOUT", "512"))
IDLE = (0.70, 0.75)
BOUNDS = {"async_over_sync": 2.6, "batched_over_sync": 1.8, "async_over_ideal": 0.75}
LOWEST_DIFFERENCE = -0.03


def main() -> None:
    seeds = [int(seed) for seed in os.environ.get("SEEDS", "731,732,733").split(",")]
    folder = Path(os.environ.get("FOLDER", Path("bench-runs") / time.strftime("topologies-%Y%m%d-%H%M%S")))
    folder.mkdir(parents=True, exist_ok=True)
    take_cores()
    models = {seed: starting_model(folder, seed) for seed in seeds}
    parts = [one_core(folder, seed, model) for seed, model in models.items()]
    waits = law_of(folder, parts[0])
    print(
        f"latency is injected: {waits}; {GROUPS} groups of {ENVIRONMENTS} environments, {TASKS * SAMPLES} trajectories an "
        f"update, queue depth {DEPTH}, {UPDATES} updates, {CORES} cores",
        flush=True,
    )
    runs: dict[str, list[Run]] = {name: [] for name in TOPOLOGIES}
    for seed, model in models.items():
        for name in TOPOLOGIES:
            runs[name].append(one(folder, seed, name, model, waits))
    line = judged(runs, parts)
    print(json.dumps(line))
    if missed(line):
        sys.exit(1)


def law_of(folder: Path, parts: Mapping[str, float]) -> dict[str, str | float]:
    """Return the law of waiting of all runs in ``folder``: made once, of what one core does, and kept there."""
    path = folder / "law.json"
    if not path.is_file():
        if done := sorted(run.name for name in TOPOLOGIES for run in folder.glob(f"*-{name}.json")):
            raise SystemExit(
                f"{folder} has runs ({', '.join(done)}) and no law.json that says how they waited; use another FOLDER"
            )
        path.write_text(json.dumps(law(parts["tokens"] * (parts["generate_s"] + parts["learn_s"]))))
    found: dict[str, str | float] = json.loads(path.read_text())
    return found


def judged(runs: dict[str, list[Run]], parts: list[dict[str, float]]) -> dict[str, Any]:
    """Return the figures of all runs."""

    def over_sync(name: str) -> float:
        pairs = zip(runs[name], runs["sync"], strict=True)
        return statistics.median(one.rate / other.rate for one, other in pairs)

    lows = {}
    for name in ("async", "batched"):
        mean, lows[name] = difference_low(runs[name], runs["sync"])
        seeds = ", ".join(
            f"{difference_low([one], [other])[0]:+.4f}"
            for one, other in zip(runs[name], runs["sync"], strict=True)
        )
        print(
            f"hold-out success of {name} minus sync: {mean:+.4f}, at least {lows[name]:+.4f}; by seed {seeds}",
            flush=True,
        )
    over_ideal = statistics.median(
        ideal_s(one, CORES, run.tokens) / run.wall_s for run, one in zip(runs["async"], parts, strict=True)
    )
    return {
        "sync_idle_share": round(statistics.median(run.idle_share(CORES) for run in runs["sync"]), 4),
        "async_over_sync": round(over_sync("async"), 3),
        "batched_over_sync": round(over_sync("batched"), 3),
        "async_over_ideal": round(over_ideal, 3),
        "holdout_difference_low": {name: round(low, 4) for name, low in lows.items()},
    }


def missed(line: dict[str, Any]) -> list[str]:
    """Return what does not keep its bound, each told."""
    found = [
        f"{name} = {line[name]}, at least {bound}" for name, bound in BOUNDS.items() if line[name] < bound
    ]
    if not IDLE[0] <= line["sync_idle_share"] <= IDLE[1]:
        found.append(f"sync_idle_share = {line['sync_idle_share']}, from {IDLE[0]} to {IDLE[1]}")
    found += [
        f"holdout_difference_low.{name} = {low}, at least {LOWEST_DIFFERENCE}"
        for name, low in line["holdout_difference_low"].items()
        if low < LOWEST_DIFFERENCE
    ]
    for each in found:
        print(f"missed: {each}", file=sys.stderr)
    return found


def one(folder: Path, seed: int, name: str, model: Path, waits: Mapping[str, str | float]) -> Run:
    """Return what one topology came to on one seed; a run that is there is not done again."""
    run = folder / f"{seed}-{name}"
    figures = measured(
        "measured.py",
        folder,
        run.name,
        seed,
        model,
        [*waiting(waits), *TOPOLOGIES[name], f"evaluation.num_tasks_final={HOLDOUT}"],
    )
    found = read_run(run, figures)
    spans = ", ".join(
        f"{span} {seconds / figures['wall_s']:.2f}" for span, seconds in figures["spans"].items()
    )
    print(
        f"{seed} {name}: {found.rate:.1f} trajectories/s ({found.trajectories} in {found.wall_s:.1f} s), idle "
        f"{found.idle_share(CORES):.3f}, processor ms a trajectory: main loop {1e3 * figures['loop_s'] / found.trajectories:.2f}, "
        f"its other threads {1e3 * (figures['main_s'] - figures['loop_s']) / found.trajectories:.2f}, "
        f"learner {1e3 * figures['children_s'] / found.trajectories:.2f}; hold-out success "
        f"{statistics.mean(found.solved.values()):.3f}; main loop: {spans}; load {figures['load']}",
        flush=True,
    )
    for text in tables(run):
        print(f"  {text}", flush=True)
    return found


def one_core(folder: Path, seed: int, model: Path) -> dict[str, float]:
    """Return what one core generates and learns with one seed's starting model."""
    figures = measured(
        "rates.py",
        folder,
        f"{seed}-rates",
        seed,
        model,
        ["run.self_test=false", "evaluation.num_tasks_final=1"],
    )
    size = figures["tokens"]
    print(
        f"{seed} ideal: {CORES / size / (figures['generate_s'] + figures['learn_s']):.1f} trajectories/s of {size:.0f} tokens; "
        f"one core: {1e3 * size * figures['generate_s']:.2f} ms to generate one, {1e3 * size * figures['learn_s']:.2f} ms to "
        f"learn one ({figures['trajectories']} of them); load {figures['load']}",
        flush=True,
    )
    return figures


def measured(
    part: str, folder: Path, name: str, seed: int, model: Path, settings: list[str]
) -> dict[str, Any]:
    """Run a part in a process of its own, unless its figures are there; return them, with the load beside it."""
    out, run = folder / f"{name}.json", folder / name
    if not out.is_file():
        shutil.rmtree(run, ignore_errors=True)
        draft, began = out.with_suffix(".draft"), os.getloadavg()[0]
        start = [RECIPE, f"model.path={model}", f"run.seed={seed}", f"run.folder={folder}", f"run.id={name}"]
        command = [sys.executable, str(PARTS / part), str(draft), *start, *COMMON, *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        figures = json.loads(draft.read_text()) | {"load": [round(began, 1), round(os.getloadavg()[0], 1)]}
        draft.write_text(json.dumps(figures))
        draft.replace(out)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def starting_model(folder: Path, seed: int) -> Path:
    """Return the model that all runs of a seed start from; made unless it is there."""
    model = Path(os.environ.get("MODEL", folder / f"model-{seed}"))
    if not (model / "config.json").is_file():
        warm = [
            "model",
            "warmstart",
            RECIPE,
            f"run.seed={seed}",
            "run.threads=1",
            *POLICY,
            "--out",
            str(model),
        ]
        subprocess.run([sys.executable, "-m", "hotpot.cli", *warm], check=True, stdout=subprocess.DEVNULL)
    return model


def take_cores() -> None:
    """Keep this process, and what it starts, to :data:`CORES` cores. Raises SystemExit where there are fewer."""
    if not hasattr(os, "sched_setaffinity"):
        return
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < CORES:
        raise SystemExit(f"the law of waiting is made for {CORES} cores; this process may use {len(mine)}")
    os.sched_setaffinity(0, mine[:CORES])


if __name__ == "__main__":
    main()
