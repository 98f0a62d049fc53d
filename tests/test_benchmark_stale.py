"""The benchmark of stale data: its arms are recipes, its delay is exact on the record, its intervals are Student's."""

import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from rich.console import Console

from hotpot.config.load import build_recipe, load_recipe
from hotpot.testing.coin import coin_environment
from hotpot.topology import runs, warmstart
from hotpot.topology.parts import ingredients

ROOT = Path(__file__).parents[1]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    monkeypatch.delitem(sys.modules, "replay", raising=False)
    monkeypatch.delitem(sys.modules, "stale", raising=False)
    import stale

    return stale


def test_arms_differ_in_how_they_learn_and_in_nothing_else(benchmark: ModuleType) -> None:
    made = {
        arm: load_recipe(ROOT / benchmark.RECIPE, [*benchmark.COMMON, *settings])
        for arm, settings in benchmark.ARMS.items()
    }
    rest = {arm: recipe.model_dump(exclude={"learner"}) for arm, recipe in made.items()}
    assert all(one == rest["none"] for one in rest.values())
    assert {recipe.learner.learning_rate for recipe in made.values()} == {made["none"].learner.learning_rate}
    assert made["fresh"].learner == made["ppo"].learner
    assert benchmark.EVERY * (benchmark.STALENESS + 1) == benchmark.UPDATES


def test_the_interval_is_that_of_paired_differences(benchmark: ModuleType) -> None:
    rng = np.random.default_rng(0)
    base = [{"area": value} for value in rng.normal(size=5)]
    arm = [{"area": one["area"] + shift} for one, shift in zip(base, (0.1, 0.2, 0.3, 0.4, 0.5), strict=True)]
    found = benchmark.differences(arm, base)["area"]
    half = 2.776 * np.std([0.1, 0.2, 0.3, 0.4, 0.5], ddof=1) / 5**0.5
    assert (found["mean"], found["low"], found["high"]) == pytest.approx(
        (0.3, 0.3 - half, 0.3 + half), abs=1e-3
    )
    assert benchmark.differences(arm[:1], base[:1])["area"]["low"] is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_batch_is_learned_as_late_as_was_asked_for(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stale_parts.delayed import run_delayed

    monkeypatch.setattr(ingredients, "load_environment", lambda _kind, params: coin_environment(params))
    settings = {
        "env": {"kind": "coin"},
        "run": {"deterministic": True, "folder": str(tmp_path), "id": "late"},
        "warmstart": {
            "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 2, "steps": 20, "batch_size": 8,
            "max_context_tokens": 128,
        },
        "rollout": {"tasks_per_batch": 2, "samples_per_task": 2, "max_context_tokens": 128, "max_step_tokens": 16},
        # The bonus moves the weights whatever the rewards are.
        "learner": {"minibatches": 1, "advantages": "vtrace", "critic": "head", "entropy_coefficient": 0.01},
        "topology": {"updates": 5},
        "evaluation": {"num_tasks": 2, "num_tasks_final": 2, "every_updates": 0},
    }  # fmt: skip
    warmstart(build_recipe(settings, [], origin="test"), tmp_path / "model")
    recipe = build_recipe(settings, [f"model.path={tmp_path / 'model'}"], origin="test")
    monkeypatch.setitem(runs.TOPOLOGIES, "sync", partial(run_delayed, staleness=2))
    folder = runs.train(recipe, console=Console(quiet=True))
    benchmark.check_staleness(folder, 2)
    with pytest.raises(SystemExit, match=r"update 3 of .* is not 1 updates stale, but \(2\.0, 2\)"):
        benchmark.check_staleness(folder, 1)
