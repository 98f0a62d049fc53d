"""The example that plays CartPole: its bookkeeping, and that it learns."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium")

EXAMPLE = Path(__file__).parents[1] / "examples" / "cartpole.py"


@pytest.fixture(scope="module")
def cartpole() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("example_cartpole", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_fall_is_worth_nothing_and_a_cut_keeps_its_value(cartpole: ModuleType) -> None:
    torch.manual_seed(0)  # an episode that ends with the very last step leaves an empty one running
    agent = cartpole.Agent()
    actors = cartpole.Actors(agent, seed=0)
    episodes = actors.play()
    assert sum(len(episode.rewards) for episode in episodes) == cartpole.ENVS * cartpole.STEPS
    ended, running = episodes[: -cartpole.ENVS], episodes[-cartpole.ENVS :]
    # A random policy falls long before the limit; what is still running is bootstrapped.
    assert {episode.final_value for episode in ended} == {0.0}
    assert all(episode.final_value != 0 for episode in running)
    assert actors.lengths == [len(episode.rewards) for episode in ended]
    found = cartpole.advantages(ended[0])
    by_hand = 1.0 - ended[0].values[-1]
    assert found[-1] == pytest.approx(by_hand)
    assert found[-2] == pytest.approx(
        1.0 + 0.99 * ended[0].values[-1] - ended[0].values[-2] + 0.99 * 0.95 * by_hand
    )


@pytest.mark.slow
def test_it_learns_to_hold_the_pole(cartpole: ModuleType) -> None:
    lengths = cartpole.train(seed=1, steps=61_440)
    assert np.mean(lengths[:100]) < 40
    assert np.mean(lengths[-50:]) > 150
