"""Exact resume: a run that broke off goes on as if nothing had been, to the bit; where it can't, it says why.

The processes here break off by an exception at a crash point, so these tests are fast; real kills at every place are
``make bench-resume``, some of them :mod:`test_benchmark_resume`.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from redo_cases import SHAPES

from hotpot.errors import RecipeError, RunFolderError
from hotpot.experience import RunReader
from hotpot.experience.crashpoints import arm
from hotpot.learner.checkpoint import read_manifest
from hotpot.topology import train
from hotpot.topology.parts import ingredients
from hotpot.topology.resume import roll_forward
from hotpot.topology.resume.checkpoints import checkpoint_folder, list_checkpoints
from hotpot.topology.resume.rebuild import Comparison
from hotpot.topology.resume.run_state import read_run_state

COMMON = (
    "topology.updates=3", "checkpoint.every_updates=0", "learner.final_learning_rate_share=0.5", "engine.max_concurrency=5",
    "evaluation.every_updates=0", "evaluation.num_tasks_final=2",
)  # fmt: skip


class Broke(BaseException):
    """The process broke off."""


@pytest.fixture
def broken_at(run, tmp_path, monkeypatch):
    """Train until a crash point is reached and return the run's folder."""

    def kill(_pid: int, _signal: int) -> None:
        raise Broke

    def go(place: str, count: int = 1, *overrides: str, resume: Path | None = None) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", kill)
            arm(place, count)
            try:
                with pytest.raises(Broke):
                    run(*COMMON, *overrides, resume=resume)
            finally:
                arm("")
        return tmp_path / "run"

    return go


def learned(folder: Path) -> tuple[Any, ...]:
    """What a finished run computed: every update on the way, and the weights."""
    rows = {row["update"]: row for row in RunReader.open(folder).table("updates").to_pylist()}
    at, chain = max(rows), []
    while at:
        row = rows[at]
        chain.append((at, row["batch_hash"], row["losses"], row["grad_norms"], row["staleness_max"]))
        at = row["parent_update"]
    last = checkpoint_folder(folder, max(rows))
    return chain[::-1], len(rows), read_manifest(last)["weights_checksum"]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    rows = RunReader.open(folder).table("events", ["detail"], where=f"kind = '{kind}'").to_pylist()
    return [json.loads(row["detail"]) for row in rows]


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory) -> tuple[Any, ...]:
    """What the run computes when nothing happens to it."""
    from coin_recipe import SETTINGS, use_coin

    from hotpot.config.load import build_recipe

    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        use_coin(patch)
        base = [f"model.path={model}", f"run.folder={folder}", "run.id=run"]
        return learned(train(build_recipe(SETTINGS, [*base, *COMMON], origin="test")))


@pytest.mark.parametrize(
    ("place", "count", "rolled", "kept"),
    [
        ("kept", 4, [1], 16),
        ("learned", 3, [1, 2], 16),
        ("update_recorded", 2, [1, 2], 0),
        ("leased", 4, [], 5),
    ],
)
def test_it_goes_on_to_the_bit(broken_at, run, whole, place, count, rolled, kept) -> None:
    folder = broken_at(place, count)
    run(*COMMON, resume=folder)
    (told,) = events(folder, "resumed")
    assert (told["exact"], told["inexact_because"]) == (True, [])
    assert (told["rolled_forward"], told["kept_episodes"] >= min(kept, 1)) == (rolled, True)
    assert learned(folder) == whole
    assert events(folder, "roll_forward_failed") == events(folder, "resume_differs") == []


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["critic", "head"])
def test_a_critic_goes_on_to_the_bit(broken_at, run, shape) -> None:
    straight = run(*COMMON, *SHAPES[shape], "run.id=straight")
    folder = broken_at("learned", 3, *SHAPES[shape])
    run(*COMMON, *SHAPES[shape], resume=folder)
    (told,) = events(folder, "resumed")
    assert (told["exact"], told["rolled_forward"]) == (True, [1, 2])
    assert learned(folder) == learned(straight)
    columns = ["update", "value_losses", "critic_losses", "critic_grad_norms", "explained_variance"]
    tables = [RunReader.open(path).table("updates", columns).to_pylist() for path in (folder, straight)]
    assert tables[0] == tables[1]
    last = [read_manifest(checkpoint_folder(path, 3)) for path in (folder, straight)]
    assert last[0]["modules"] == last[1]["modules"]


def test_it_breaks_off_again_and_again(broken_at, run, whole) -> None:
    folder = broken_at("collected", 2)
    broken_at("resume_learned", resume=folder)
    broken_at("update_unrecorded", resume=folder)
    broken_at("checkpoint_pointed", resume=folder)
    run(*COMMON, resume=folder)
    assert learned(folder) == whole
    attempts = RunReader.open(folder).table("attempts", ["attempt_id"])["attempt_id"].to_pylist()
    assert len(set(attempts)) == len(attempts)
    versions = RunReader.open(folder).table("versions", ["version"], where="kind = 'policy'")
    assert len(set(versions["version"].to_pylist())) == versions.num_rows


def test_a_record_that_does_not_come_out_the_same_is_left_with_a_word(broken_at, run, monkeypatch) -> None:
    folder = broken_at("update_begun", 3)
    compare = roll_forward.compare

    def differs(row: Any, result: Any) -> Comparison:
        if row.update == 2:
            return Comparison(differences=("batch_hash is x, recorded y",), same_batch=False, close=True)
        return compare(row, result)

    monkeypatch.setattr(roll_forward, "compare", differs)
    run(*COMMON, resume=folder)
    (failed,) = events(folder, "roll_forward_failed")
    assert failed == {"update": 2, "differences": ["batch_hash is x, recorded y"]}
    (told,) = events(folder, "resumed")
    assert (told["exact"], told["rolled_forward"], told["next_update"]) == (False, [1], 4)
    rows = RunReader.open(folder).table("updates", ["update", "parent_update"]).to_pylist()
    assert [(row["update"], row["parent_update"]) for row in rows] == [(1, 0), (2, 1), (4, 1), (5, 4)]
    assert list_checkpoints(folder) == [0, 1, 5]
    # The update that was left stays left, also for who takes the run up next.
    run(*COMMON, "topology.updates=4", resume=folder)
    assert events(folder, "resumed")[-1]["rolled_forward"] == []


def test_what_can_not_be_exact_says_so(broken_at, run) -> None:
    folder = broken_at("collected", 2)
    run(*COMMON, "sampling.training.temperature=0.9", "learner.learning_rate=1e-3", resume=folder)
    (told,) = events(folder, "resumed")
    assert not told["exact"]
    assert "learner.learning_rate was 0.003, is 0.001" in told["inexact_because"]
    assert "update 2 was left, since sampling.training.temperature changed" in told["inexact_because"]
    # Update 2's number and issues stand for what was begun under the other temperature.
    assert (told["next_update"], told["next_issue"], told["kept_episodes"]) == (3, 8, 0)
    rows = RunReader.open(folder).table("updates", ["update", "learning_rate"]).to_pylist()
    assert [row["update"] for row in rows] == [1, 3, 4]
    assert rows[0]["learning_rate"] == pytest.approx(3e-3)
    assert rows[-1]["learning_rate"] == pytest.approx(0.5e-3)


def test_another_environment_or_model_is_refused_with_the_difference(
    run, recipe, monkeypatch, tmp_path
) -> None:
    short = ("topology.updates=1", "evaluation.num_tasks_final=2")
    folder = run(*short)
    state = read_run_state(checkpoint_folder(folder, 1))
    assert state is not None
    assert (state.update, state.done, state.marks["issue"], state.run_id) == (1, 1, 3, "run")
    make = ingredients.load_environment

    def other(kind: str, params: Any) -> Any:
        return make(kind, {**params, "wrong": -1.0})

    more = (*short, "topology.updates=2")
    with monkeypatch.context() as patch:
        patch.setattr(ingredients, "load_environment", other)
        with pytest.raises(
            RunFolderError, match=r"(?s)reward version coin.reward@.*param wrong: 0.0 -> -1.0.*accept_changed"
        ):
            train(recipe(*more), resume=folder)
        train(recipe(*more, 'checkpoint.accept_changed=["reward"]'), resume=folder)
    (told,) = events(folder, "resumed")
    assert any(reason.startswith("reward version was coin.reward@") for reason in told["inexact_because"])
    with pytest.raises(RecipeError, match=r"model.path = .*a resume goes on from its checkpoints"):
        train(recipe(*more, f"model.path={checkpoint_folder(folder, 2)}"), resume=folder)


def test_a_finished_run_says_so_and_is_not_measured_twice(run, recipe, capsys) -> None:
    short = ("topology.updates=1", "evaluation.num_tasks_final=2")
    folder = run(*short)
    before = learned(folder)
    train(recipe(*short), resume=folder)
    assert "the run is finished: it has all its 1 updates, the last weights are measured" in " ".join(
        capsys.readouterr().out.split()
    )
    rows = RunReader.open(folder).table("evaluations", ["label"])["label"].to_pylist()
    assert rows == ["before", "before", "after", "after"]
    assert learned(folder) == before
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
