"""``hotpot replay`` with the doing over replaced: what it hands over, what it says, how it exits."""

from pathlib import Path
from typing import Any

import pytest
from small_runs import json_of

from hotpot.topology import redo
from hotpot.topology.redo import Figure, Findings, Redone, RewardFindings, Way
from hotpot.topology.redo.rewards import RewardChange

SAME = Figure(name="batch_hash", recorded="a", redone="a")
OFF = Figure(name="losses[0]", recorded=0.1, redone=0.1 + 1e-12)
FAR = Figure(name="losses[1]", recorded=0.1, redone=None)
OTHER = Figure(name="torch_build", recorded="2.0", redone="2.1")
THREADS = Figure(name="num_threads", recorded=1, redone=1)


def redone(update: int, *figures: Figure, kernels: tuple[Figure, ...] = (THREADS,), **values: Any) -> Redone:
    base: dict[str, Any] = {"off_at": None, "gone": (), "rewards": None, "seconds": 0.25}
    return Redone(
        update=update,
        way=Way(start=0, updates=tuple(range(1, update + 1))),
        findings=Findings(figures=(SAME, *figures), kernels=kernels),
        **(base | values),
    )


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the doing over; what it is to yield stands under ``results``."""
    seen: dict[str, Any] = {}

    def fake(folder: Path, updates: str, changes: Any) -> Any:
        seen.update(folder=folder, updates=updates, changes=changes)
        yield from seen["results"]

    monkeypatch.setattr(redo, "redo", fake)
    return seen


def test_identical_is_said_and_exits_with_0(hotpot, runs: Path, done: dict[str, Any]) -> None:
    done["results"] = [redone(1), redone(2)]
    result = hotpot("replay", "old", "--updates", "1..2", "--runs", runs)
    assert result.exit_code == 0
    assert (done["folder"], done["updates"], done["changes"].any) == (runs / "old", "1..2", False)
    assert "update 2: identical, bit for bit (from the checkpoint of update 0 over 1 update," in result.stdout
    assert "2 updates done over: 2 identical" in result.stdout


def test_a_difference_is_a_table_and_exits_with_1(hotpot, runs: Path, done: dict[str, Any]) -> None:
    done["results"] = [redone(3, OFF, FAR, off_at=2, gone=("0.1.0",))]
    result = hotpot("replay", "old", "--update", 3, "--runs", runs)
    assert result.exit_code == 1
    assert done["updates"] == "3"
    for text in ("losses[0]", "0.100000000001", "losses[1]", "since update 2", "1 trajectory of it", "0.1.0"):
        assert text in result.stdout
    assert "batch_hash" not in result.stdout
    done["results"] = [redone(3, OFF)]
    assert "as small as rounding" in hotpot("replay", "old", "--update", 3, "--runs", runs).stdout


def test_another_kind_of_machine_is_named(hotpot, runs: Path, done: dict[str, Any]) -> None:
    done["results"] = [redone(1, OFF, kernels=(THREADS, OTHER))]
    result = hotpot("replay", "old", "--update", 1, "--runs", runs)
    assert result.exit_code == 0
    assert "torch_build: recorded with 2.0, now 2.1" in result.stdout
    done["results"] = [redone(1, FAR, kernels=(THREADS, OTHER))]
    assert hotpot("replay", "old", "--update", 1, "--runs", runs).exit_code == 1


def test_changes_show_every_figure_and_agree_with_nothing(hotpot, runs: Path, done: dict[str, Any]) -> None:
    change = RewardChange(
        trajectory_id="0.0.0", group_id="g0", reward=1.0, new_reward=0.5, advantage=0.5, new_advantage=-0.25
    )
    rewards = RewardFindings(
        reward_version="json.loads@recomputed+1", changes=(change,), kept=("g0",), new_kept=()
    )
    done["results"] = [redone(1, FAR, rewards=rewards)]
    settings = ("--with", "learner.epochs=2", "--with", "learner.clip_low=0.1")
    command = ("replay", "old", "--update", 1, *settings, "--reward", "hotpot.ids:group_id", "--runs", runs)
    result = hotpot(*command)
    assert result.exit_code == 0
    assert done["changes"].settings == ("learner.epochs=2", "learner.clip_low=0.1")
    assert done["changes"].reward.version.version.startswith("hotpot.ids.group_id@recomputed+")
    for text in ("batch_hash", "losses[1]", "0.0.0", "1 of 1 rewards differ", "1 advantages change sign"):
        assert text in result.stdout
    (found,) = json_of(hotpot(*command, "--json"))["updates"]
    assert [figure["name"] for figure in found["figures"]] == ["batch_hash", "losses[1]"]
    assert found["rewards"]["changes"][0]["new_advantage"] == -0.25


def test_programs_get_the_differences(hotpot, runs: Path, done: dict[str, Any]) -> None:
    done["results"] = [redone(1)]
    (found,) = json_of(hotpot("replay", "old", "--updates", "all", "--runs", runs, "--json"))["updates"]
    assert (found["verdict"], found["differences"], found["num_figures"]) == ("identical", [], 1)
    assert found["kernels"] == {"num_threads": [1, 1]}
    done["results"] = [redone(1, FAR)]
    assert hotpot("replay", "old", "--updates", "all", "--runs", runs, "--json").exit_code == 1


def test_wrong_use_exits_with_2(hotpot, runs: Path) -> None:
    for words in ((), ("--update", 1, "--updates", "all"), ("--updates", "1-2"), ("--update", 7)):
        assert hotpot("replay", "old", *words, "--runs", runs).exit_code == 2
    assert "schema version" not in hotpot("replay", "old", "--update", 7, "--runs", runs).stderr
    assert hotpot("replay", "odl", "--update", 1, "--runs", runs).exit_code == 2
