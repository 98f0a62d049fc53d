"""Whether replay helps: paired runs with and without it, from the same starting model, on the same tasks.

``sparse``  A policy that succeeds in about 2 of 100 orders learns with few episodes an update; the replaying arm draws
            its successes again (only positive advantages, hot).
``switch``  A policy trained to charge agreed prices (A) goes on with orders at list price (B), then comes back to A; the
            replaying arm draws A's history (cold) while it learns B.

Both arms of a pair have the same seed, starting model (for ``switch`` the same run of A), number of episodes and number
of updates, and the same settings but those named in ``SPARSE_ARMS`` and ``SWITCH_ARMS``. They were chosen on seeds 900 and 910;
``docs/replay-results.md`` says what was tried. Success is measured on hold-out tasks at the training temperature.

Figures, each by seed and arm, with the paired differences (replay minus plain). Of ``sparse``: ``final`` success, and
``area``, the mean of the success curve over the updates (trapezoids). Of ``switch``: ``a`` success on A before the
switch; after B ``b`` on B and ``a_kept`` on A; after the return to A ``a_back`` on A.

Ends with one JSON line; exits with 1 where the mean difference of ``area`` or ``a_kept`` is not above 0. Environment:
SEEDS (numbers, by default 901,902,903), PARTS (by default sparse,switch), FOLDER (go on in it: models and runs that are
there are kept, one that was cut off goes on).
"""

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HOTPOT = [sys.executable, "-m", "hotpot.cli"]
MEASURE = ["run.threads=1", "run.trace=false", "evaluation.greedy=false", "evaluation.num_tasks=128"]

SPARSE = "recipes/order_desk_sparse.toml"
SPARSE_ARMS = {"plain": ["replay.share=0"], "replay": []}

SWITCH = "recipes/order_desk_switch.toml"
SWITCH_ARMS = {"plain": ["replay.share=0"], "replay": ["replay.share=0.4"]}
A, B, BOTH = (f"env.params.price_basis={basis}" for basis in ("agreed", "list", "either"))
UPDATES_A, UPDATES_B, UPDATES_BACK = 10, 20, 4

JUDGED = (("sparse", "area"), ("switch", "a_kept"))

Pair = dict[str, dict[str, float]]
"""Figures of one seed: arm, then figure."""


def main() -> None:
    seeds = [int(seed) for seed in os.environ.get("SEEDS", "901,902,903").split(",")]
    parts = os.environ.get("PARTS", "sparse,switch").split(",")
    folder = Path(os.environ.get("FOLDER", Path("bench-runs") / time.strftime("replay-%Y%m%d-%H%M%S")))
    folder.mkdir(parents=True, exist_ok=True)
    experiments = {"sparse": sparse, "switch": switch}
    line = {name: summed(seeds, [experiments[name](folder, seed) for seed in seeds]) for name in parts}
    print(json.dumps(line))
    if any(statistics.mean(line[name][figure]["difference"]) <= 0 for name, figure in JUDGED if name in line):
        sys.exit(1)


def sparse(folder: Path, seed: int) -> Pair:
    """Return final success and area under the curve of both arms."""
    model = warmstart(folder, "sparse", SPARSE, seed)
    found = {}
    for arm, settings in SPARSE_ARMS.items():
        start = [SPARSE, f"model.path={model}", f"run.seed={seed}", *settings]
        summary = train(folder / f"sparse-{seed}-{arm}", start)
        curve = [(row["update"], row["mean"]) for row in summary["evaluations"]]
        print(f"sparse {seed} {arm}: " + " ".join(f"{at}:{mean:.3f}" for at, mean in curve), flush=True)
        found[arm] = {"final": curve[-1][1], "area": area(curve)}
    return found


def switch(folder: Path, seed: int) -> Pair:
    """Return success of both arms on A and B along A, B and back to A."""
    model = warmstart(folder, "switch", SWITCH, seed, BOTH)
    name, at_b = f"switch-{seed}", UPDATES_A + UPDATES_B
    start = [SWITCH, A, f"model.path={model}", f"run.seed={seed}", f"topology.updates={UPDATES_A}"]
    on_a = train(folder / f"{name}-a", [*start, "replay.share=0"])
    found = {}
    for arm, settings in SWITCH_ARMS.items():
        after_b = go_on(folder, f"{name}-a", f"{name}-{arm}-b", [B, f"topology.updates={at_b}", *settings])
        # With no update left the run only measures: A, with the weights that B has left.
        kept = go_on(folder, f"{name}-{arm}-b", f"{name}-{arm}-kept", [A])
        back = [A, f"topology.updates={at_b + UPDATES_BACK}"]
        returned = go_on(folder, f"{name}-{arm}-kept", f"{name}-{arm}-back", back)
        summaries = {"a": on_a, "b": after_b, "a_kept": kept, "a_back": returned}
        found[arm] = {figure: float(at["holdout"]["after"]["mean"]) for figure, at in summaries.items()}
        print(f"switch {seed} {arm}: {found[arm]}", flush=True)
    return found


def warmstart(folder: Path, name: str, recipe: str, seed: int, *settings: str) -> Path:
    """Make the starting model of a seed, unless it is there."""
    model = folder / f"{name}-model-{seed}"
    if not model.exists():
        hotpot(
            "model", "warmstart", recipe, *settings, f"run.seed={seed}", "run.threads=1", "--out", str(model)
        )
    return model


def train(run: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Train a new run to its end, unless it is there, and return its summary."""
    if (run / "manifest.json").is_file():
        return finished(run) or resume(run, [])
    hotpot("train", *arguments, f"run.folder={run.parent}", f"run.id={run.name}", *MEASURE)
    return summary_of(run)


def go_on(folder: Path, source: str, name: str, settings: Sequence[str]) -> dict[str, Any]:
    """Go on with a copy of a run under other settings, unless that is done; return the copy's summary."""
    run = folder / name
    if not run.exists():
        copy_run(folder / source, run)
    return finished(run) or resume(run, settings)


def resume(run: Path, settings: Sequence[str]) -> dict[str, Any]:
    hotpot("train", "--resume", run.name, "--runs", str(run.parent), *settings)
    return summary_of(run)


def copy_run(source: Path, target: Path) -> None:
    """Copy a run so that the copy is there whole or not at all, and not finished yet."""
    draft = target.with_name(f".{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(source, draft, ignore=shutil.ignore_patterns("summary.json"))
    draft.replace(target)


def finished(run: Path) -> dict[str, Any] | None:
    """Return the summary of a run that came to its end, None for one that was cut off."""
    if not (run / "summary.json").is_file():
        return None
    summary = summary_of(run)
    return summary if summary["status"] == "finished" else None


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def hotpot(*arguments: str) -> None:
    subprocess.run([*HOTPOT, *arguments], check=True, stdout=subprocess.DEVNULL)


def area(curve: Sequence[tuple[int, float]]) -> float:
    """Return the mean of a curve over its updates, by trapezoids."""
    parts = [(right[0] - left[0]) * (left[1] + right[1]) / 2 for left, right in itertools.pairwise(curve)]
    return sum(parts) / (curve[-1][0] - curve[0][0])


def summed(seeds: Sequence[int], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the seeds, and by figure both arms' values by seed and the differences (replay minus plain)."""
    line: dict[str, Any] = {"seeds": list(seeds)}
    for figure in pairs[0]["plain"]:
        plain, replay = ([round(pair[arm][figure], 4) for pair in pairs] for arm in ("plain", "replay"))
        differences = [round(right - left, 4) for left, right in zip(plain, replay, strict=True)]
        line[figure] = {"plain": plain, "replay": replay, "difference": differences}
    return line


if __name__ == "__main__":
    main()
