"""A training run in a process of its own that is killed at a named place, and what a run came to.

Owns the tiny recipe (the coin of ``hotpot.testing``), the process, and the fingerprint that two runs are compared by.
Processes are forked from a server that has imported everything. Knows no expectation.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hotpot.config import Recipe
from hotpot.config.load import build_recipe
from hotpot.experience import RunReader
from hotpot.experience.crashpoints import arm, watch
from hotpot.learner.checkpoint import read_manifest
from hotpot.models import use_threads
from hotpot.testing.coin import coin_environment
from hotpot.topology import train, warmstart
from hotpot.topology.parts import ingredients
from hotpot.topology.resume.checkpoints import checkpoint_folder

TIMEOUT_S = 120.0
"""Longest life of one process."""

UPDATES = 6

SETTINGS: dict[str, Any] = {
    "env": {"kind": "coin"},
    "run": {"deterministic": True, "id": "run"},
    "warmstart": {
        "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 2, "steps": 50, "batch_size": 8,
        "max_context_tokens": 128, "learning_rate": 1e-2,
    },
    "engine": {"max_concurrency": 6},
    "rollout": {"tasks_per_batch": 4, "samples_per_task": 4, "max_context_tokens": 128, "max_step_tokens": 16},
    "learner": {"minibatches": 2, "learning_rate": 3e-3, "final_learning_rate_share": 0.5},
    "topology": {"updates": UPDATES},
    "evaluation": {"every_updates": 2, "num_tasks": 2, "num_tasks_final": 2},
    "checkpoint": {"every_updates": 3, "keep": 1},
    "store": {"archive_every_batches": 12, "archive_every_s": 30.0},
}  # fmt: skip


def settings(model: Path, folder: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a run in ``folder`` that begins with ``model``."""
    base = [f"model.path={model}", f"run.folder={folder}"]
    return build_recipe(SETTINGS, [*base, *overrides], origin="benchmark")


def make_model(model: Path) -> None:
    """Warm-start the policy, in a process of its own."""
    _finish(_start(_warmstart, str(model)))


def go(
    model: Path, folder: Path, overrides: Sequence[str], place: str = "", count: int = 1
) -> tuple[bool, set[str]]:
    """Start the run in ``folder``, or take it up, to be killed at the ``count``-th passing of ``place``.

    Return whether it was killed, and the places it passed where it was not. Raises RuntimeError where it failed.
    """
    process, pipe = _start(_train, str(model), str(folder), tuple(overrides), place, count)
    return _finish((process, pipe))


def fingerprint(folder: Path) -> dict[str, Any]:
    """Return what a run has computed so far: of each update on the way everything that was learned, and the weights."""
    rows = RunReader.open(folder / "run").table("updates").to_pylist()
    by_number = {row["update"]: row for row in rows}
    at, chain = max(by_number, default=0), []
    while at:
        row = by_number[at]
        arrays = [tuple(row[name]) for name in ("losses", "grad_norms")]
        chain.append((at, row["batch_hash"], *arrays, row["learning_rate"], row["staleness_max"]))
        at = row["parent_update"]
    last = checkpoint_folder(folder / "run", len(chain))
    weights = read_manifest(last)["weights_checksum"] if last.is_dir() else None
    return {"updates": chain[::-1], "recorded": len(rows), "weights": weights}


def resumes(folder: Path) -> list[dict[str, Any]]:
    """Return what each resume of the run said of itself."""
    events = RunReader.open(folder / "run").table("events", ["detail"], where="kind = 'resumed'")
    return [json.loads(row["detail"]) for row in events.to_pylist()]


def _start(target: Any, *arguments: Any) -> tuple[Any, Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hotpot.topology", "hotpot.testing.coin"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _finish(started: tuple[Any, Any]) -> tuple[bool, set[str]]:
    process, pipe = started
    try:
        answer = pipe.recv() if pipe.poll(TIMEOUT_S) else None
    except EOFError:
        answer = None
    process.join(TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()
        raise RuntimeError(f"the run did not end within {TIMEOUT_S:.0f} s")
    if process.exitcode == -signal.SIGKILL:
        return True, set()
    if not isinstance(answer, set):
        raise RuntimeError(f"the run failed: {answer}")
    return False, answer


def _use_coin() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    use_threads(1)
    for module in (ingredients, sys.modules["hotpot.topology.warmstart"]):
        module.load_environment = lambda _kind, params: coin_environment(params)  # type: ignore[attr-defined]


def _warmstart(pipe: Any, model: str) -> None:
    _use_coin()
    warmstart(build_recipe(SETTINGS, [], origin="benchmark"), Path(model))
    pipe.send(set())


def _train(pipe: Any, model: str, folder: str, overrides: Sequence[str], place: str, count: int) -> None:
    _use_coin()
    passed = watch()
    arm(place, count)
    try:
        run = Path(folder) / "run"
        begun = (run / "manifest.json").is_file()
        train(settings(Path(model), Path(folder), overrides), resume=run if begun else None, json_output=True)
    except Exception as error:
        pipe.send(repr(error))
        raise
    pipe.send(set(passed))
