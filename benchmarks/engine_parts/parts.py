"""What is measured: each part starts its sides, lets them take turns, and returns figures by name."""

import os
import sys
from dataclasses import asdict
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from engine_parts import settings as stated
from engine_parts.processes import Worker
from engine_parts.turns import Measured, describe, in_turns
from engine_parts.vllm_side import VllmSide
from engine_parts.work import ROOT, BatchSizes, EpisodeSizes
from hotpot.engine.embedded import EmbeddedEngine

WORKLOADS = ("episodes", "smollm2", "tiny")
VLLM = Path(os.environ.get("VLLM_VENV", str(ROOT / ".venv-vllm"))) / "bin" / "vllm"
RECIPE, SEED = ROOT / "recipes" / "order_desk.toml", 301

Found = dict[str, Any]


class Ours(Worker):
    """The embedded engine in a process; ``told`` keeps what each round said beside its seconds."""

    def __init__(self, told: list[Found], **settings: Any) -> None:
        super().__init__("hotpot_side.py", settings)
        self._told = told

    def round(self, number: int) -> float:
        """Do a round and keep what it said."""
        seconds = super().round(number)
        self._told.append(self.last)
        return seconds


def measure(name: str, folder: Path) -> Found:
    """Measure part ``name``; ``folder`` is for logs and the tiny model."""
    return {"vllm": _vllm, "transformers": _transformers, "prefix": _prefix, "deterministic": _deterministic}[
        name
    ](folder)


def _vllm(folder: Path) -> Found:
    sizes, model = stated.EPISODES, smollm2()
    told: dict[str, list[Found]] = {}
    ours = {
        name: partial(Ours, told.setdefault(name, []), **_our_settings(model, "episodes", sizes, **chosen))
        for name, chosen in stated.ours(sizes.episodes).items()
    }
    theirs = {}
    if VLLM.is_file():
        theirs = {
            name: partial(VllmSide, VLLM, model, sizes, folder / f"vllm-{number}.log", **chosen)
            for number, (name, chosen) in enumerate(stated.vllm().items())
        }
    else:
        print(f"there is no {VLLM}: `make setup-vllm` makes it, or VLLM_VENV names one", flush=True)
    own, other = in_turns(ours, theirs, stated.ROUNDS)
    found = _rates("episodes", own, sizes.num_sampled) | _costs("episodes", told[own.best])
    if other.seconds:
        found |= _rates("episodes_vllm", other, sizes.num_sampled)
        found["over_vllm"] = _ratio(other.median(other.best), own.median(own.best))
    middle = _middle(told[own.best])
    return found | {
        "floor_ratio": _ratio(middle["seconds"], middle["floor_s"]),
        "reused_share": round(middle["reused"] / middle["prompt"], 3),
        "gflops": round(middle["gflops"], 1),
    }


def _transformers(folder: Path) -> Found:
    found: Found = {}
    for name, model in (("tiny", tiny(folder)), ("smollm2", smollm2())):
        sizes = stated.BATCHES[name]
        told: dict[str, list[Found]] = {}
        ours = {
            setting: partial(
                Ours, told.setdefault(setting, []), **_our_settings(model, "batch", sizes, **chosen)
            )
            for setting, chosen in stated.ours(sizes.prompts).items()
        }
        theirs = {
            setting: partial(
                Worker, "transformers_side.py", {"folder": str(model), "sizes": asdict(sizes), **chosen}
            )
            for setting, chosen in stated.transformers().items()
        }
        own, other = in_turns(ours, theirs, stated.ROUNDS)
        found |= _rates(name, own, sizes.num_sampled) | _costs(name, told[own.best])
        found |= _rates(f"{name}_transformers", other, sizes.num_sampled)
        found[f"over_transformers.{name}"] = _ratio(other.median(other.best), own.median(own.best))
    return found


def _prefix(folder: Path) -> Found:
    """Prefill with and without reuse; the first of our stated settings does both."""
    del folder
    sizes = stated.PREFILL
    chosen = next(iter(stated.ours(sizes.episodes).values()))
    given = _our_settings(smollm2(), "episodes", sizes, **chosen)
    reusing, whole = in_turns(
        {"reusing": partial(Ours, [], **given)}, {"whole": partial(Ours, [], nonces=True, **given)}, 1
    )
    for name, side in (("prefill, reusing", reusing), ("prefill, whole", whole)):
        print(describe(name, side, sizes.num_prompt), flush=True)
    return {"prefix_cache_gain": _ratio(whole.median("whole"), reusing.median("reusing"))}


def _deterministic(folder: Path) -> Found:
    """Episodes in deterministic mode and without it, both on the one thread that the mode has; null without such a mode."""
    del folder
    if "exact" not in signature(EmbeddedEngine).parameters:
        print("this engine has no deterministic mode", flush=True)
        return {}
    sizes = stated.FEW
    given = _our_settings(smollm2(), "episodes", sizes, threads=1, engine={"max_concurrency": sizes.episodes})
    exact, without = in_turns(
        {"deterministic": partial(Ours, [], exact=True, **given)},
        {"without": partial(Ours, [], **given)},
        stated.ROUNDS,
    )
    found = _rates("deterministic", exact, sizes.num_sampled) | _rates(
        "one_thread", without, sizes.num_sampled
    )
    ratio = _ratio(exact.median("deterministic"), without.median("without"))
    return found | {"deterministic_cost": ratio}


def smollm2() -> Path:
    """Return SmolLM2's model folder; ends with a message where the extra is missing."""
    from hotpot.errors import ModelFilesError
    from hotpot.testing.pretrained import smollm2_folder

    try:
        return smollm2_folder(ROOT / "runs" / "models")
    except ModelFilesError as error:
        sys.exit(str(error))


def tiny(folder: Path) -> Path:
    """Return the decoder of the default recipe, imitated for some steps only: speed does not hang on what it can do."""
    from hotpot.config.load import load_recipe
    from hotpot.topology import warmstart

    made = folder / "tiny"
    if not made.exists():
        warmstart(load_recipe(RECIPE, [f"run.seed={SEED}", "run.threads=1", "warmstart.steps=40"]), made)
    return made


def _our_settings(model: Path, kind: str, sizes: EpisodeSizes | BatchSizes, **chosen: Any) -> Found:
    return {"folder": str(model), "kind": kind, "sizes": asdict(sizes), **chosen}


def _rates(name: str, measured: Measured, tokens: int) -> Found:
    print(describe(name, measured, tokens), flush=True)
    return {f"tokens_per_s.{name}": round(measured.rate(tokens), 1), f"settings.{name}": measured.best}


def _costs(name: str, told: list[Found]) -> Found:
    share = _middle(told)["overhead"]
    return {f"overhead.{name}": None if share is None else round(share, 4)}


def _middle(told: list[Found]) -> Found:
    """Return what the round of median length said."""
    return sorted(told, key=lambda one: float(one["seconds"]))[len(told) // 2]


def _ratio(one: float, other: float) -> float:
    return round(one / other, 3)
