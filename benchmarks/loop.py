"""Where the loop's wall time goes, and its speed against the reference loop on the same work.

Both sides start from the same warm-started policy and train on the default recipe's sizes for UPDATES updates, in turns,
each in a process of its own (ROUNDS rounds; `tokens_per_s` and `over_reference` are medians). The reference gets the best of its thread
counts, measured in the first round; Hotpot chooses its own. Tokens are those of the training trajectories, given and
sampled; seconds are wall time of the update loop, evaluation and warm start apart. The shares are those of one whole
run with its evaluations. Ends with one JSON line.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = int(os.environ.get("ROUNDS", "3"))
UPDATES = int(os.environ.get("UPDATES", "15"))
SEED = 201
RECIPE = "recipes/order_desk.toml"
HOTPOT = [sys.executable, "-m", "hotpot.cli"]
SECONDS = ("generate", "learn", "environment", "store", "evaluate", "other")


def main() -> None:
    folder = Path("bench-runs") / time.strftime("loop-%Y%m%d-%H%M%S")
    model = folder / "model"
    folder.mkdir(parents=True)
    warm = [*HOTPOT, "model", "warmstart", RECIPE, f"run.seed={SEED}", "--out", str(model)]
    subprocess.run(warm, check=True, stdout=subprocess.DEVNULL)
    shares = run_hotpot(folder, model, "whole", ["topology.updates=40"])
    total = sum(shares["seconds"].values())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    trial = {threads: run_reference(model, threads, 3) for threads in {1, cores}}
    best = max(trial, key=lambda threads: trial[threads])
    print(
        f"reference by threads: {', '.join(f'{n}: {rate:.0f} tokens/s' for n, rate in sorted(trial.items()))}"
    )
    ours, theirs = [], []
    for round_ in range(ROUNDS):
        short = run_hotpot(
            folder, model, f"round-{round_}", [f"topology.updates={UPDATES}", "evaluation.every_updates=0",
                                               "evaluation.num_tasks_final=1", "evaluation.greedy=false"]
        )  # fmt: skip
        seconds = sum(short["seconds"][name] for name in SECONDS if name != "evaluate")
        ours.append(short["tokens"] / seconds)
        theirs.append(run_reference(model, best, UPDATES))
        print(
            f"round {round_}: hotpot {ours[-1]:.0f} tokens/s, reference {theirs[-1]:.0f} tokens/s", flush=True
        )
    line = {f"{name}_share": round(shares["seconds"][name] / total, 4) for name in SECONDS}
    line["tokens_per_s"] = round(statistics.median(ours), 1)
    line["over_reference"] = round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)
    print(json.dumps(line))
    if line["store_share"] + line["other_share"] > 0.10 or line["over_reference"] < 1:
        sys.exit(1)


def run_hotpot(folder: Path, model: Path, run_id: str, settings: list[str]) -> dict[str, dict[str, float]]:
    """Train with the command a user gives and return the summary."""
    base = [f"run.seed={SEED}", f"run.folder={folder}", f"run.id={run_id}", f"model.path={model}"]
    subprocess.run([*HOTPOT, "train", RECIPE, *base, *settings], check=True, stdout=subprocess.DEVNULL)
    summary: dict[str, dict[str, float]] = json.loads((folder / run_id / "summary.json").read_text())
    return summary


def run_reference(model: Path, threads: int, updates: int) -> float:
    """Return tokens per second of the reference loop, measured in a process of its own."""
    command = [sys.executable, __file__, "reference", str(model), str(threads), str(updates)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure_reference(model_folder: Path, threads: int, updates: int) -> float:
    """Run the reference loop's rollout and learning from ``model_folder``; return its tokens per second."""
    import torch

    from hotpot.envs import load_environment
    from hotpot.models import PolicyTokenizer, load_decoder
    from hotpot.types import Split

    spec = importlib.util.spec_from_file_location("reference_loop", "examples/reference_loop.py")
    assert spec is not None
    assert spec.loader is not None
    loop = importlib.util.module_from_spec(spec)
    sys.modules["reference_loop"] = loop
    spec.loader.exec_module(loop)
    torch.set_num_threads(threads)
    model, tokenizer = load_decoder(model_folder), PolicyTokenizer.load(model_folder)
    environment, generator = load_environment("order_desk", {}), torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=loop.LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0
    )
    tokens, started = 0, time.perf_counter()
    for update in range(updates):
        tasks = [environment.task(Split.TRAIN, SEED, update * 16 + i) for i in range(16)]
        episodes, batch = loop.collect(model, tokenizer, environment, tasks, generator)
        loop.learn(model, optimizer, [batch[i::4] for i in range(4)] if len(batch) >= 4 else [])
        tokens += sum(len(episode.tokens) for episode in episodes)
    return tokens / (time.perf_counter() - started)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "reference":
        print(measure_reference(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
    else:
        main()
