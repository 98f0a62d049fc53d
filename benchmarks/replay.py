"""Whether replay helps: paired runs with and without it, from the same starting model, on the same tasks.

``sparse``  A policy that succeeds in about 2 of 100 orders learns with few episodes an update; the replaying arm draws
            its successes again (only positive advantages, hot).
``switch``  A policy trained on orders of one or two lines (A) goes on with orders of one line (B), then is measured on A
            again; the replaying arm draws from A's history (cold) while it learns B.

Both arms of a pair have the same seed, starting model (for ``switch`` the same run so far), number of episodes and number
of updates, and the same settings but those of replay. Settings were chosen on seed 900 for each arm; plain learning had
its choice of one and two epochs. Success is measured on hold-out tasks at the training temperature. ``area`` is the mean
of the success curve over the updates (trapezoids). Ends with one JSON line; exits with 1 where the mean difference of
an experiment is not above 0. Environment: SEEDS (numbers, by default 901,902,903), PARTS (sparse, which is the default, and
switch, whose settings are not chosen yet), FOLDER (go on in it: models and runs that are there are kept).
"""

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HOTPOT = [sys.executable, "-m", "hotpot.cli"]
SEEDS = tuple(int(seed) for seed in os.environ.get("SEEDS", "901,902,903").split(","))
PARTS = os.environ.get("PARTS", "sparse").split(",")
MEASURE = ["run.threads=1", "run.trace=false", "evaluation.greedy=false", "evaluation.num_tasks=128"]

SPARSE = "recipes/order_desk_sparse.toml"
SPARSE_ARMS = {"plain": ["replay.share=0"], "replay": []}

SWITCH = "recipes/order_desk_switch.toml"
SWITCH_ARMS = {"plain": ["replay.share=0"], "replay": []}
A, B = "env.params.max_lines=2", "env.params.max_lines=1"
UPDATES_A, UPDATES_B, UPDATES_BACK = 8, 12, 2


def main() -> None:
    folder = Path(os.environ.get("FOLDER", Path("bench-runs") / time.strftime("replay-%Y%m%d-%H%M%S")))
    folder.mkdir(parents=True, exist_ok=True)
    line: dict[str, Any] = {"seeds": len(SEEDS)}
    if "sparse" in PARTS:
        line |= report("sparse", ("final", "area"), [sparse(folder, seed) for seed in SEEDS])
    if "switch" in PARTS:
        line |= report("switch", ("a_kept", "b", "a_back"), [switch(folder, seed) for seed in SEEDS])
    print(json.dumps(line))
    judged = [line[name] for name in ("sparse_area_difference", "switch_a_kept_difference") if name in line]
    if any(statistics.mean(found) <= 0 for found in judged):
        sys.exit(1)


def sparse(folder: Path, seed: int) -> dict[str, dict[str, float]]:
    """Return final success and area under the curve of both arms."""
    model = warmstart(folder, "sparse", SPARSE, seed)
    found = {}
    for arm, settings in SPARSE_ARMS.items():
        run = folder / f"sparse-{seed}-{arm}"
        summary = train(run, [SPARSE, f"model.path={model}", f"run.seed={seed}", *settings])
        curve = [(row["update"], row["mean"]) for row in summary["evaluations"]]
        show(f"sparse seed {seed} {arm}", curve)
        found[arm] = {"final": curve[-1][1], "area": area(curve)}
    return found


def switch(folder: Path, seed: int) -> dict[str, dict[str, float]]:
    """Return, for both arms, success on A and B after B, and on A after a short return to it."""
    model = warmstart(folder, "switch", SWITCH, seed)
    base = folder / f"switch-{seed}-a"
    train(
        base, [SWITCH, A, f"model.path={model}", f"run.seed={seed}", f"topology.updates={UPDATES_A}", "replay.share=0"]
    )  # fmt: skip
    found = {}
    for arm, settings in SWITCH_ARMS.items():
        run = folder / f"switch-{seed}-{arm}"
        if not run.exists():
            shutil.copytree(base, run)
        done = UPDATES_A + UPDATES_B
        after_b = go_on(run, [B, f"topology.updates={done}", *settings])
        on_a = go_on(run, [A, f"topology.updates={done}", *settings])
        back = go_on(run, [A, f"topology.updates={done + UPDATES_BACK}", *settings])
        found[arm] = {"a_kept": on_a, "b": after_b, "a_back": back}
        print(f"switch seed {seed} {arm}: {found[arm]}", flush=True)
    return found


def warmstart(folder: Path, name: str, recipe: str, seed: int) -> Path:
    """Make the starting model of a seed, unless it is there."""
    model = folder / f"{name}-model-{seed}"
    if not model.exists():
        command = [
            *HOTPOT,
            "model",
            "warmstart",
            recipe,
            f"run.seed={seed}",
            "run.threads=1",
            "--out",
            str(model),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return model


def train(run: Path, arguments: list[str]) -> dict[str, Any]:
    """Train a new run, unless it is there, and return its summary."""
    if not (run / "summary.json").exists():
        where = [f"run.folder={run.parent}", f"run.id={run.name}"]
        command = [*HOTPOT, "train", *arguments, *where, *MEASURE]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def go_on(run: Path, settings: list[str]) -> float:
    """Go on with a run under other settings; return the hold-out success it ends with."""
    command = [*HOTPOT, "train", "--resume", run.name, "--runs", str(run.parent), *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return float(json.loads((run / "summary.json").read_text())["holdout"]["after"]["mean"])


def area(curve: list[tuple[int, float]]) -> float:
    """Return the mean of a curve over its updates, by trapezoids."""
    parts = [(right[0] - left[0]) * (left[1] + right[1]) / 2 for left, right in itertools.pairwise(curve)]
    return sum(parts) / (curve[-1][0] - curve[0][0])


def show(title: str, curve: list[tuple[int, float]]) -> None:
    print(f"{title}: " + " ".join(f"{update}:{success:.3f}" for update, success in curve), flush=True)


def report(
    name: str, keys: tuple[str, ...], found: list[dict[str, dict[str, float]]]
) -> dict[str, list[float]]:
    """Return both arms' figures by seed, and the paired differences (replay minus plain)."""
    line = {}
    for key in keys:
        for arm in ("plain", "replay"):
            line[f"{name}_{key}_{arm}"] = [round(pair[arm][key], 4) for pair in found]
        line[f"{name}_{key}_difference"] = [
            round(pair["replay"][key] - pair["plain"][key], 4) for pair in found
        ]
    return line


if __name__ == "__main__":
    main()
