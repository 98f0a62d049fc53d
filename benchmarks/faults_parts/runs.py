"""A small training run in a process of its own, with a plan of faults and an outer deadline.

Owns the recipe (the coin of ``hotpot.testing``), the process and its end. Processes are forked from a server that has
imported everything; each is the leader of a session, so that what it started ends with it. Knows no expectation.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotpot.config.load import build_recipe
from hotpot.experience import crashpoints
from hotpot.models import use_threads
from hotpot.testing.faults import VARIABLE, Bite, Fault, FaultPlan, read_bites
from hotpot.topology import warmstart

UPDATES = 3

PATIENCE = float(os.environ.get("PATIENCE", "1"))
"""How many times slower than an idle machine this one is: every deadline is as many times longer."""

SURVIVE_S = 5.0 * PATIENCE
"""Time that the processes a run has started have to end after it."""

DEADLINE_S = 90.0 * PATIENCE
"""Longest life of one process; then it is killed and counts as hung."""

SETTINGS: dict[str, Any] = {
    "env": {"kind": "hotpot.testing.coin:SPEC"},
    "run": {"deterministic": True, "id": "run"},
    "warmstart": {
        "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 2, "steps": 50, "batch_size": 8,
        "max_context_tokens": 128, "learning_rate": 1e-2,
    },
    "engine": {"max_concurrency": 8},
    "rollout": {"tasks_per_batch": 4, "samples_per_task": 4, "max_context_tokens": 128, "max_step_tokens": 16},
    "learner": {"minibatches": 2, "learning_rate": 3e-3},
    "topology": {"updates": UPDATES},
    "evaluation": {"every_updates": 2, "num_tasks": 2, "num_tasks_final": 2, "greedy": False},
    "checkpoint": {"every_updates": 1, "keep": 2},
    "store": {"archive_every_batches": 2, "archive_every_s": 0.05, "flush_timeout_s": 20.0},
    "supervision": {
        "beat_s": 0.2, "dead_after_s": 5.0 * PATIENCE, "stop_after_s": 12.0 * PATIENCE, "breaker_rest_s": 1.0,
    },
    "actors": {"call_timeout_s": 2.0 * PATIENCE, "start_timeout_s": 12.0 * PATIENCE},
}  # fmt: skip

BENCHMARKS = Path(__file__).resolve().parents[1]

PRELOADED = [
    "hotpot.topology",
    "hotpot.cli.main",
    "hotpot.testing.faults",
    "hotpot.testing.coin",
    "torch._dynamo",
]
"""What every run imports, the last one at its first optimiser step."""

ASYNCHRONOUS = ("run.deterministic=false", "actors.kind=threads", "actors.actors_per_group=2")
"""What the topologies whose learner has a process of its own have beside that."""

MARK = "HOTPOT_BENCH_FAULTS_RUN"
"""Environment variable that tells the processes of one run from all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one process ended: ``code`` None where the outer deadline killed it; what it printed; which faults bit."""

    code: int | None
    output: str
    bites: tuple[Bite, ...]
    seconds: float
    survivors: bool
    """Whether processes that it had started were still alive some seconds after it had ended."""


def make_model(folder: Path) -> None:
    """Warm-start the policy, in a process of its own. Raises RuntimeError where that fails."""
    process = _context().Process(target=_warmstart, args=(str(folder),))
    process.start()
    process.join(DEADLINE_S)
    if process.exitcode != 0:
        process.kill()
        raise RuntimeError(f"the warm start ended with {process.exitcode}")


def start(
    folder: Path, model: Path, topology: str, faults: Sequence[Fault], overrides: Sequence[str], seed: int
) -> Ended:
    """Start the run in ``folder``/run under ``faults`` and wait for its end."""
    folder.mkdir(parents=True)
    recipe = folder / "recipe.toml"
    recipe.write_text("", encoding="utf-8")
    more = [
        *(() if topology == "sync" else ASYNCHRONOUS),
        f"topology.kind={topology}",
        f"run.seed={seed}",
        *overrides,
    ]
    base = [*_flat(SETTINGS), f"model.path={model}", f"run.folder={folder}"]
    return _go(folder, "start", ["train", str(recipe), *base, *more], faults, seed)


def resume(folder: Path, faults: Sequence[Fault], seed: int, turn: str = "resume") -> Ended:
    """Take the run in ``folder`` up as an operator would, and wait for its end."""
    return _go(folder, turn, ["train", "--resume", "run", "--runs", str(folder)], faults, seed)


def _go(folder: Path, turn: str, arguments: list[str], faults: Sequence[Fault], seed: int) -> Ended:
    plan = FaultPlan(faults=tuple(faults), log=folder / f"{turn}.bites", seed=seed)
    environment = plan.write(folder / f"{turn}.plan.json") if faults else {}
    environment[MARK] = str(folder)
    output = folder / f"{turn}.txt"
    process = _context().Process(target=_train, args=(arguments, environment, str(output)), name="hotpot-run")
    began_s = time.monotonic()
    process.start()
    process.join(DEADLINE_S)
    code = process.exitcode
    survivors = code is not None and _survive(folder)
    process.kill()
    for pid in _processes(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.join()
    text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
    return Ended(
        code=code, output=text, bites=tuple(read_bites(plan.log)), seconds=time.monotonic() - began_s, survivors=survivors
    )  # fmt: skip


def _survive(folder: Path) -> bool:
    """Return whether a process of the run is left; those that are just ending get some seconds."""
    deadline_s = time.monotonic() + SURVIVE_S
    while _processes(folder):
        if time.monotonic() > deadline_s:
            return True
        time.sleep(0.1)
    return False


def _processes(folder: Path) -> list[int]:
    """Return the processes of the run in ``folder`` that are alive, whoever started them."""
    wanted, found = f"{MARK}={folder}".encode(), list[int]()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            alive = (entry / "stat").read_text().rpartition(") ")[2][0] not in "ZX"
            if alive and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # it is gone, or not ours
            continue
    return found


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _flat(settings: dict[str, Any]) -> list[str]:
    return [
        f"{section}.{key}={str(value).lower() if isinstance(value, bool) else value}"
        for section, values in settings.items()
        for key, value in values.items()
    ]


def _warmstart(folder: str) -> None:
    use_threads(1)
    warmstart(build_recipe(SETTINGS, [], origin="benchmark"), Path(folder))


def _train(arguments: list[str], environment: dict[str, str], output: str) -> None:
    os.setsid()
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.pop(VARIABLE, None)
    os.environ.update(environment, OMP_NUM_THREADS="1")
    use_threads(1)
    crashpoints.listen()
    sys.argv = ["hotpot", *arguments]
    from hotpot.cli.main import main

    main()
