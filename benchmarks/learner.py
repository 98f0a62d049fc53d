"""How fast an iteration is, and its learning alone, against TRL's GRPOTrainer on the same work; one run, in turns.

Both sides start from the same model folder and do the same: completions of exactly the same length for the same prompts
(single-turn, as GRPOTrainer is), the same reward of their text, one epoch in the same number of optimiser steps, float32 on
the CPU, no reference, no logging, no evaluation. Ours is the engine and the learner of a run
(``learner_parts/hotpot_side.py``), without the environment's steps and the store that a run has beside them. An
iteration is generating, rewarding, learning and handing the weights back to the generator. After one to warm up, each
thread count is tried on each side, and the rounds that count have each side's best. ``tiny`` is the decoder of the default
recipe, ``smollm2`` a model of SmolLM2-135M's shape with random weights and few completions; it is null where it took longer
than SMOLLM2_S seconds.

The last line is JSON; exits with 1 where a bound is missed. Needs the extra ``parity``.

``samples_per_s_over_trl``  completions a second of a whole iteration, over TRL's, by model
``learner_over_trl``        speed of learning one given batch, over TRL's: ours is all of ``Learner.update``, TRL's its training
                            steps and its pass for old log-probabilities, nothing else. We need no such pass (the engine
                            recorded them) and compare with the sampler on the first minibatch (``learner.agreement``)
``cpu_over_trl``            both by processor time, which other programs beside the run change less; no bound
``padding_share``           of the tokens our passes compute
``gae_over_…``              of ``learner_parts/gae.py``
"""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

ROUNDS = int(os.environ.get("ROUNDS", "5"))
SMOLLM2_S = float(os.environ.get("SMOLLM2_S", "900"))
BOUNDS = {
    "samples_per_s_over_trl.tiny": (">=", 3.0),
    "learner_over_trl": (">=", 1.3),
    "padding_share": ("<=", 0.05),
    "gae_over_torchrl": (">=", 1.0),
    "gae_over_loop": (">=", 10.0),
}
"""What must hold; ``samples_per_s_over_trl.smollm2`` at least 1.5 is the aim, and reported only."""


def main() -> None:
    if find_spec("trl") is None:
        sys.exit("trl is not installed: `make bench-learner` installs the extra 'parity'")
    folder = Path("bench-runs") / time.strftime("learner-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    try:
        tiny = part(folder, "tiny")
        smollm2 = part(folder, "smollm2", limit_s=SMOLLM2_S) if SMOLLM2_S else {}
    finally:
        shutil.rmtree(folder)
    gae = run(Path(__file__).with_name("learner_parts") / "gae.py")
    line = {
        "samples_per_s_over_trl": {
            "tiny": tiny["over_trl"],
            "smollm2": smollm2.get("over_trl"),
        },
        "learner_over_trl": tiny["learner_over_trl"],
        "padding_share": tiny["padding_share"],
        "gae_over_torchrl": gae["gae_over_torchrl"],
        "gae_over_loop": gae["gae_over_loop"],
        "cpu_over_trl": {
            "tiny": tiny["cpu_over_trl"],
            "smollm2": smollm2.get("cpu_over_trl"),
            "learner": tiny["learner_cpu_over_trl"],
        },
        "samples_per_s": {"tiny": tiny["samples_per_s"], "smollm2": smollm2.get("samples_per_s")},
        "threads": {"tiny": tiny["threads"], "smollm2": smollm2.get("threads")},
    }
    missed = [name for name in BOUNDS if not holds(name, line)]
    for name in missed:
        print(f"missed: {name}, the bound is {' '.join(map(str, BOUNDS[name]))}")
    print(json.dumps(line))
    if missed:
        sys.exit(1)


def holds(name: str, line: dict[str, Any]) -> bool:
    """Return whether the bound of ``name`` holds in ``line``."""
    sign, bound = BOUNDS[name]
    value: Any = line
    for key in name.split("."):
        value = value[key]
    return value is not None and (value >= bound if sign == ">=" else value <= bound)


def part(folder: Path, name: str, limit_s: float | None = None) -> dict[str, Any]:
    """Return what was measured of model ``name``, in a process of its own; nothing where it took longer."""
    try:
        return run(Path(__file__), name, str(folder), limit_s=limit_s)
    except subprocess.TimeoutExpired:
        print(f"{name}: given up after {limit_s:.0f} s; SMOLLM2_S allows more", flush=True)
        return {}


def run(path: Path, *arguments: str, limit_s: float | None = None) -> dict[str, Any]:
    """Run a script; show what it prints but the JSON of its last line, which is returned."""
    command = [sys.executable, str(path), *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=limit_s)
    *before, last = done.stdout.splitlines()
    print("\n".join(before), flush=True)
    found: dict[str, Any] = json.loads(last)
    return found


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Measure model ``name`` in this process; ``folder`` holds the models."""
    from learner_parts import turns
    from learner_parts.against import learning, whole
    from learner_parts.work import Work, make_openings, make_smollm2, make_tiny

    tiny = folder / "tiny"
    if not tiny.exists():
        make_tiny(tiny)
    if name == "smollm2":
        make_smollm2(folder / name, tiny)
    small = name != "tiny"
    rounds = min(ROUNDS, 2) if small else ROUNDS
    work = Work(
        folder=folder / name,
        openings=(),
        tasks=2 if small else 16,
        samples=4 if small else 8,
        length=16 if small else 48,
        minibatches=2 if small else 4,
    )
    work = replace(work, openings=make_openings(4 * work.tasks))
    line = whole(work, folder, rounds, trials=1 if small else turns.TRIALS)
    if not small:
        line |= learning(work, folder, rounds)
    return line


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
    else:
        main()
