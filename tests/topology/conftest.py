"""A warm-started coin policy, made once, and a way to train it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from coin_recipe import SETTINGS, use_coin

from hotpot.config import Recipe
from hotpot.config.load import build_recipe
from hotpot.topology import train, warmstart

Train = Callable[..., Path]


@pytest.fixture(autouse=True)
def coin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the recipes' environment ``coin`` be found; it is not installed as a package."""
    use_coin(monkeypatch)


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
