"""What a correction is worth on data that is stale to the bound: paired runs of the order desk, 8 updates behind.

Every batch is learned 8 updates after it was sampled (``benchmarks/stale_parts/delayed.py``; the record of each run is held to
that), with a learning rate at which the policy has moved far by then. Arms, from the same starting model, on the same
tasks, with the same number of trajectories learned:

``none``       the old log-probabilities are the learner's own: stale tokens are learned from as if they were fresh
``ppo``        the recorded ones, as by default: PPO's clip around the policy that sampled, which is a correction
``truncated``  ``learner.decoupled = "all"``: clip around the policy the update starts from, importance at most 2
``decoupled``  ``learner.decoupled = "stale"`` with a bound of the importance that nothing reaches (decoupled PPO)
``gae``        a critic, generalised advantages, and no correction: what ``vtrace`` is to be compared with
``vtrace``     a critic and V-trace
``fresh``      waiting: every batch is learned at once (topology ``sync``)
``discarding`` the same trajectories are sampled as elsewhere, and what is not fresh is dropped: of nine batches under way
               when the weights change, eight. It is the first ninth of ``fresh``

Figures by arm and seed: ``final`` hold-out success at the training temperature, and ``area``, the mean of the hold-out
curve over the updates (trapezoids). Differences are arm minus ``none`` (``vtrace`` also minus ``gae``), with the paired 95 %
interval of Student's t. The learning rate was chosen on seed 700; docs/off-policy.md says what was tried.

Ends with one JSON line; exits with 1 where the interval of none of the corrections' ``area`` is above 0. Environment: SEEDS
(by default 711 to 715), ARMS (by default all), UPDATES (by default 36, in ninths), SETTINGS (further overrides, separated by
spaces), MODEL (one starting model for all seeds, by default each has its own), FOLDER (go on in it: models and finished runs
that are there are kept).
"""

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from replay import area

from hotpot.experience import open_run

RECIPE = "recipes/order_desk.toml"
STALENESS = 8
UPDATES = int(os.environ.get("UPDATES", "36"))
EVERY = UPDATES // (STALENESS + 1)
"""Updates between two evaluations: at the first of them discarding is read off."""

COMMON = [
    "run.threads=1", "run.trace=false", "rollout.tasks_per_batch=8", f"topology.updates={UPDATES}",
    f"evaluation.every_updates={EVERY}", "evaluation.num_tasks=48", "evaluation.num_tasks_final=128",
    "evaluation.greedy=false", "checkpoint.every_updates=0", "learner.learning_rate=5e-4",
    "learner.final_learning_rate_share=1",
]  # fmt: skip
CRITIC = ["learner.critic=separate", "learner.critic_learning_rate=2e-3"]
UNCORRECTED = "learner.old_logprobs=recomputed"
ARMS: dict[str, list[str]] = {
    "none": [UNCORRECTED],
    "ppo": [],
    "truncated": ["learner.decoupled=all"],
    "decoupled": ["learner.decoupled=stale", "learner.importance_cap=1e9"],
    "gae": ["learner.advantages=gae", *CRITIC, UNCORRECTED],
    "vtrace": ["learner.advantages=vtrace", *CRITIC],
    "fresh": [],
}
CORRECTIONS = ("ppo", "truncated", "decoupled", "vtrace")
COMPARED = [*((arm, "none") for arm in (*ARMS, "discarding") if arm != "none"), ("vtrace", "gae")]
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t for an interval of 95 %, by the number of pairs."""

Figures = dict[str, float]


def main() -> None:
    seeds = [int(seed) for seed in os.environ.get("SEEDS", "711,712,713,714,715").split(",")]
    arms = os.environ.get("ARMS", ",".join(ARMS)).split(",")
    folder = Path(os.environ.get("FOLDER", Path("bench-runs") / time.strftime("stale-%Y%m%d-%H%M%S")))
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Figures]] = {}
    for seed in seeds:
        for arm in arms:
            curve = one(folder, seed, arm)
            found.setdefault(arm, []).append({"final": curve[-1][1], "area": area(curve)})
            if arm == "fresh":
                ninth = [point for point in curve if point[0] <= EVERY]
                found.setdefault("discarding", []).append({"final": ninth[-1][1], "area": area(ninth)})
    line = {
        "seeds": seeds,
        "staleness": STALENESS,
        "updates": UPDATES,
        "arms": {arm: by_figure(pairs) for arm, pairs in found.items()},
        "differences": {
            f"{arm} - {base}": differences(found[arm], found[base])
            for arm, base in COMPARED
            if {arm, base} <= found.keys()
        },
    }
    print(json.dumps(line))
    told = [line["differences"].get(f"{arm} - none") for arm in CORRECTIONS]
    if not any(each and (each["area"].get("low") or 0) > 0 for each in told):
        sys.exit(1)


def one(folder: Path, seed: int, arm: str) -> list[tuple[int, float]]:
    """Return the hold-out curve of one arm of one seed, (update, success); what is there already is not done again."""
    model, run = Path(os.environ.get("MODEL", folder / f"model-{seed}")), folder / f"{seed}-{arm}"
    if not (model / "config.json").is_file():
        call(
            "-m",
            "hotpot.cli",
            "model",
            "warmstart",
            RECIPE,
            f"run.seed={seed}",
            "run.threads=1",
            "--out",
            str(model),
        )
    staleness = 0 if arm == "fresh" else STALENESS
    if not (run / "summary.json").is_file():
        shutil.rmtree(run, ignore_errors=True)
        call(
            "benchmarks/stale_parts/delayed.py", str(staleness), RECIPE, f"model.path={model}", f"run.seed={seed}",
            f"run.folder={folder}", f"run.id={run.name}", *COMMON, *os.environ.get("SETTINGS", "").split(), *ARMS[arm],
        )  # fmt: skip
    check_staleness(run, staleness)
    summary = json.loads((run / "summary.json").read_text())
    curve = [(row["update"], row["mean"]) for row in summary["evaluations"]]
    print(f"{seed} {arm}: " + " ".join(f"{at}:{mean:.3f}" for at, mean in curve), flush=True)
    return curve


def check_staleness(run: Path, staleness: int) -> None:
    """Hold a run's record to the staleness that was asked for, token by token, wherever something was learned.

    Where no update in between took a step, the weights are those that sampled, and the record says so.
    """
    rows = open_run(run).sql('select * from updates order by "update"').to_pylist()
    steps = [row["optimizer_steps"] for row in rows]
    for place, row in enumerate(rows):
        wanted = min(place, staleness)
        moved = any(steps[place - wanted : place])
        found = (row["staleness_mean"], row["staleness_max"])
        if row["num_loss_tokens"] and found != ((wanted, wanted) if moved else (0, 0)):
            raise SystemExit(f"update {row['update']} of {run} is not {wanted} updates stale, but {found}")


def call(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def by_figure(pairs: Sequence[Figures]) -> dict[str, list[float]]:
    return {name: [round(one[name], 4) for one in pairs] for name in pairs[0]}


def differences(arm: Sequence[Figures], base: Sequence[Figures]) -> dict[str, dict[str, float | None]]:
    """Return, by figure, mean and paired 95 % interval of ``arm`` minus ``base``; no interval of one pair."""
    out: dict[str, dict[str, float | None]] = {}
    for name in base[0]:
        apart = [left[name] - right[name] for left, right in zip(arm, base, strict=True)]
        mean, half = statistics.mean(apart), None
        if len(apart) in T_95:
            half = T_95[len(apart)] * statistics.stdev(apart) / math.sqrt(len(apart))
        low, high = (None, None) if half is None else (round(mean - half, 4), round(mean + half, 4))
        out[name] = {"mean": round(mean, 4), "low": low, "high": high}
    return out


if __name__ == "__main__":
    main()
