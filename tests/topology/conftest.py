"""A warm-started coin policy, made once, and a way to train it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hotpot.config import Recipe
from hotpot.config.load import build_recipe
from hotpot.testing.coin import coin_environment
from hotpot.topology import ingredients, train, warmstart

Train = Callable[..., Path]

SETTINGS: dict[str, Any] = {
    "env": {"kind": "coin"},
    "run": {"deterministic": True},
    "warmstart": {
        "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 2, "steps": 60, "batch_size": 8,
        "max_context_tokens": 128, "learning_rate": 1e-2,
    },
    "rollout": {"tasks_per_batch": 4, "samples_per_task": 4, "max_context_tokens": 128, "max_step_tokens": 16},
    "learner": {"minibatches": 2, "learning_rate": 3e-3},
    "topology": {"updates": 3},
    "evaluation": {"every_updates": 2, "num_tasks": 8, "num_tasks_final": 16},
    "checkpoint": {"every_updates": 1},
}  # fmt: skip


@pytest.fixture(autouse=True)
def coin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the recipes' environment ``coin`` be found; it is not installed as a package."""
    use_coin(monkeypatch)


def use_coin(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ingredients, sys.modules["hotpot.topology.warmstart"]):
        monkeypatch.setattr(module, "load_environment", lambda _kind, params: coin_environment(params))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The warm-started policy."""
    folder = tmp_path_factory.mktemp("coin") / "model"
    with pytest.MonkeyPatch.context() as patch:
        use_coin(patch)
        warmstart(build_recipe(SETTINGS, [], origin="test"), folder)
    return folder


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """Return the coin recipe with overrides; its runs lie in the test's folder."""

    def build(*overrides: str) -> Recipe:
        base = [f"model.path={model}", f"run.folder={tmp_path}", "run.id=run"]
        return build_recipe(SETTINGS, [*base, *overrides], origin="test")

    return build


@pytest.fixture
def run(recipe: Callable[..., Recipe]) -> Train:
    """Train the coin policy with overrides and return the run folder."""
    torch.set_num_threads(1)
    return lambda *overrides, resume=None: train(recipe(*overrides), resume=resume)
