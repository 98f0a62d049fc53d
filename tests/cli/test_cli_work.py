"""The commands that do work, with the topology replaced: what they hand over, and what they make of the end."""

from pathlib import Path
from typing import Any

import pytest
from small_runs import json_of, write_model_folder

from hotpot import topology
from hotpot.errors import EngineError
from hotpot.testing.records import make_row
from hotpot.topology.supervision.stopping import StopRequested
from hotpot.types import EvaluationRow


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def train(recipe: Any, **more: Any) -> Path:
        seen.update(recipe=recipe, **more)
        if "raise" in seen:
            raise seen["raise"]
        run = tmp_path / "made"
        run.mkdir()
        (run / "summary.json").write_text('{"updates": 3}')
        return run

    def evaluate_run(run: Path, **more: Any) -> list[EvaluationRow]:
        seen.update(run=run, **more)
        if "raise" in seen:
            raise seen["raise"]
        return [make_row(EvaluationRow, label="manual", success_rate=0.5)]

    def warmstart(recipe: Any, out: Path, **more: Any) -> dict[str, Any]:
        seen.update(recipe=recipe, out=out, **more)
        return {"success": 0.2}

    for name, fake in (("train", train), ("evaluate_run", evaluate_run), ("warmstart", warmstart)):
        monkeypatch.setattr(topology, name, fake, raising=False)
    return seen


def test_train_hands_over_the_recipe_and_ends_with_the_summary(
    hotpot, recipe_file: Path, called: dict[str, Any]
) -> None:
    found = json_of(hotpot("train", recipe_file, "run.seed=7", "--json"))
    assert called["recipe"].run.seed == 7
    assert called["recipe"].topology.updates == 3
    assert (called["resume"], called["json_output"], called["console"].stderr) == (None, True, True)
    assert found["updates"] == 3
    assert found["run"].endswith("made")


def test_train_goes_on_with_a_run_by_its_own_recipe(hotpot, runs: Path, called: dict[str, Any]) -> None:
    result = hotpot("train", "--resume", "new", "topology.updates=9", "run.seed=3", "--runs", runs)
    assert result.exit_code == 0
    assert called["resume"] == runs / "new"
    recipe = called["recipe"]
    assert (recipe.learner.learning_rate, recipe.topology.updates, recipe.run.seed) == (2e-4, 9, 3)
    assert hotpot("train", "--resume", "nwe", "--runs", runs).exit_code == 2


def test_a_run_ended_by_ctrl_c_exits_with_130(hotpot, recipe_file: Path, called: dict[str, Any]) -> None:
    called["raise"] = StopRequested("stopped by signal 2")
    assert hotpot("train", recipe_file).exit_code == 130
    called["raise"] = KeyboardInterrupt()
    assert hotpot("train", recipe_file).exit_code == 130


def test_work_that_failed_is_a_message_and_code_1(hotpot, recipe_file: Path, called: dict[str, Any]) -> None:
    called["raise"] = EngineError("no memory; lower engine.max_concurrency")
    result = hotpot("train", recipe_file)
    assert result.exit_code == 1
    assert result.stderr == "failed: no memory; lower engine.max_concurrency\n"


def test_eval_takes_a_run_and_a_checkpoint(
    hotpot, runs: Path, tmp_path: Path, called: dict[str, Any]
) -> None:
    (row,) = json_of(
        hotpot("eval", "old", "--runs", runs, "--tasks", 5, "--no-greedy", "--checkpoint", "first", "--json")
    )
    assert (row["label"], row["success_rate"]) == ("manual", 0.5)
    assert {key: called[key] for key in ("run", "checkpoint", "num_tasks", "greedy")} == {
        "run": runs / "old", "checkpoint": "first", "num_tasks": 5, "greedy": False,
    }  # fmt: skip
    called["raise"] = StopRequested("stopped by signal 2")
    assert hotpot("eval", "old", "--runs", runs).exit_code == 130
    assert hotpot("eval", write_model_folder(tmp_path / "m"), "--runs", runs).exit_code == 2
    assert hotpot("eval", "nowhere", "--runs", runs).exit_code == 2


def test_warmstart_writes_to_out_or_to_the_recipes_folder(
    hotpot, recipe_file: Path, called: dict[str, Any]
) -> None:
    found = json_of(hotpot("model", "warmstart", recipe_file, "warmstart.steps=5", "--out", "m/x", "--json"))
    assert (called["out"], called["recipe"].warmstart.steps, called["overwrite"]) == (Path("m/x"), 5, False)
    assert found == {"folder": "m/x", "success": 0.2}
    assert "m/y" in hotpot("model", "warmstart", recipe_file, "model.path=m/y", "--overwrite").stdout
    assert called["overwrite"] is True
    assert hotpot("model", "warmstart", recipe_file).exit_code == 2
