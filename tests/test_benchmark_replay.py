"""The benchmark of replay: what it computes of its runs, and that a benchmark cut off goes on."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hotpot.config.load import load_recipe


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    monkeypatch.delitem(sys.modules, "replay", raising=False)
    import replay

    return replay


def test_arms_are_recipes_that_differ_in_what_they_name(benchmark: ModuleType) -> None:
    root = Path(__file__).parents[1]
    for recipe, arms in (
        (benchmark.SPARSE, benchmark.SPARSE_ARMS),
        (benchmark.SWITCH, benchmark.SWITCH_ARMS),
    ):
        plain, replay = (
            load_recipe(root / recipe, [*benchmark.MEASURE, *arms[arm]]) for arm in ("plain", "replay")
        )
        assert plain.replay.share == 0 < replay.replay.share
        assert plain.rollout == replay.rollout
        assert plain.topology == replay.topology
        assert plain.env == replay.env


def test_the_area_is_the_mean_of_the_curve(benchmark: ModuleType) -> None:
    assert benchmark.area([(0, 0.5), (10, 0.5)]) == 0.5
    assert benchmark.area([(0, 0.0), (2, 1.0), (10, 1.0)]) == pytest.approx(0.9)


def test_differences_are_replay_minus_plain_by_seed(benchmark: ModuleType) -> None:
    pairs = [
        {"plain": {"final": 0.5}, "replay": {"final": 0.75}},
        {"plain": {"final": 0.5}, "replay": {"final": 0.25}},
    ]
    assert benchmark.summed([1, 2], pairs) == {
        "seeds": [1, 2],
        "final": {"plain": [0.5, 0.5], "replay": [0.75, 0.25], "difference": [0.25, -0.25]},
    }


def test_runs_that_are_there_are_kept_and_those_cut_off_go_on(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def fake(*arguments: str) -> None:
        called.append(arguments)
        (tmp_path / arguments[2] / "summary.json").write_text(json.dumps({"status": "finished", "at": "b"}))

    monkeypatch.setattr(benchmark, "hotpot", fake)
    source = tmp_path / "a"
    source.mkdir()
    (source / "manifest.json").write_text("{}")
    (source / "summary.json").write_text(json.dumps({"status": "finished", "at": "a"}))
    assert benchmark.train(source, ["recipe.toml"])["at"] == "a"
    assert not called
    assert benchmark.go_on(tmp_path, "a", "b", ["x=1"])["at"] == "b"
    assert benchmark.go_on(tmp_path, "a", "b", ["x=1"])["at"] == "b"
    assert called == [("train", "--resume", "b", "--runs", str(tmp_path), "x=1")]
    (tmp_path / "b" / "summary.json").write_text(json.dumps({"status": "stopped"}))
    assert benchmark.go_on(tmp_path, "a", "b", ["x=1"])["at"] == "b"
    assert len(called) == 2
