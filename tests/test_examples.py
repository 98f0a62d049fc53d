"""The example environment keeps the contract, plays, and is what its page shows."""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotpot.envs import BoundEnvironment, bind, demonstrate, replay
from hotpot.testing.contracts_environment import demonstrator_contract, environment_contract
from hotpot.types import Action, Split, ToolCall

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "own_environment"
PAGE = ROOT / "docs" / "environments.md"


@pytest.fixture(scope="module")
def env() -> Iterator[BoundEnvironment]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        patch.setattr(sys, "dont_write_bytecode", True)
        from stock_count import SPEC

        yield bind(SPEC)


def test_it_keeps_the_contract(env: BoundEnvironment) -> None:
    environment_contract(env, num_tasks=32, num_episodes=8)
    demonstrator_contract(env, low=0.6, high=0.75, num_tasks=300)


def test_an_episode_by_hand(env: BoundEnvironment) -> None:
    task = env.task(Split.TRAIN, 0, 0)
    item = re.search(r'"item":"(\w+)"', task.content)
    assert item is not None
    calls = [
        Action(tool_call=ToolCall(name="on_shelf", arguments=f'{{"item":"{item[1]}"}}')),
        Action(tool_call=ToolCall(name="set_aside", arguments='{"item":"unicorn"}')),
        Action(tool_call=ToolCall(name="set_aside", arguments=f'{{"item":"{item[1]}"}}')),
    ]
    observation, results = replay(env, task, 0, calls)
    assert observation.messages[0].content == f"how many {item[1]} are free?"
    assert [result.tool_error for result in results] == [False, True, False]
    assert results[1].messages[0].content == "error: no item unicorn"
    counts = [int(results[at].messages[0].content.split()[0]) for at in (0, 2)]
    right, wrong = (
        replay(env, task, 0, [*calls, Action(answer=str(counts[0] - counts[1] + off))])[1] for off in (0, 1)
    )
    assert (right[-1].success, right[-1].rewards[0].value) == (True, 1.0)
    assert (wrong[-1].success, wrong[-1].rewards[0].value) == (False, 0.0)


def test_its_reward_is_versioned_apart(env: BoundEnvironment) -> None:
    assert "stock_count/world.py" in env.env_version.manifest
    assert "stock_count/reward/__init__.py" not in env.env_version.manifest
    assert "stock_count/reward/__init__.py" in env.reward_version.manifest
    assert demonstrate(env, env.task(Split.HOLDOUT, 0, 0), 0).exchanges[-1].result.done


def test_the_entry_point_names_the_spec(env: BoundEnvironment) -> None:
    points = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points == {"hotpot.environments": {env.name: "stock_count:SPEC"}}


def test_the_page_shows_the_files_as_they_are() -> None:
    blocks = re.findall(
        r"^`(examples/own_environment/\S+)`:\n\n```\w+\n(.*?)^```$", PAGE.read_text(), re.M | re.S
    )
    shown = dict(blocks)
    assert set(shown) == {
        path.relative_to(ROOT).as_posix()
        for path in EXAMPLE.rglob("*")
        if path.suffix in (".py", ".toml") and "build" not in path.parts
    }
    for name, text in shown.items():
        assert text == (ROOT / name).read_text(), (
            f"docs/environments.md shows another {name}; copy the file in"
        )
