"""Updates done over from the record: proved bit for bit, told apart where they differ, learned otherwise on demand."""

import shutil
from pathlib import Path

import pytest
from coin_recipe import SETTINGS, use_coin
from redo_cases import SHAPES, everything, prove

from hotpot.config.load import build_recipe
from hotpot.errors import RecipeError, RunFolderError, UsageError
from hotpot.topology import train
from hotpot.topology.redo import Changes, load_reward, redo
from hotpot.topology.resume.checkpoints import checkpoint_folder


@pytest.fixture(scope="session")
def recorded(model, tmp_path_factory) -> Path:
    """A run of three updates with all its checkpoints, trained once."""
    base = tmp_path_factory.mktemp("recorded")
    overrides = [f"model.path={model}", f"run.folder={base}", "run.id=run", "checkpoint.keep=5"]
    with pytest.MonkeyPatch.context() as patch:
        use_coin(patch)
        return train(build_recipe(SETTINGS, overrides, origin="test"))


@pytest.fixture
def folder(recorded, tmp_path) -> Path:
    """A copy of that run, to take things away from."""
    return Path(shutil.copytree(recorded, tmp_path / "copy"))


def test_every_update_is_proved_from_the_first_checkpoint(folder) -> None:
    prove(folder)


def test_the_nearest_checkpoint_is_gone_on_from(folder) -> None:
    (one,) = redo(folder, "3")
    assert (one.way.start, one.way.updates, one.findings.verdict) == (2, (3,), "identical")


def test_weights_that_are_not_the_recorded_ones_are_told_at_their_first_update(folder) -> None:
    for name in ("config.json", "model.safetensors", "learner.json", "learner/optimizer.safetensors"):
        shutil.copy(checkpoint_folder(folder, 2) / name, checkpoint_folder(folder, 1) / name)
    shutil.rmtree(checkpoint_folder(folder, 2))
    shutil.rmtree(checkpoint_folder(folder, 3))
    (one,) = redo(folder, "2")
    assert one.findings.verdict == "differs"
    names = [figure.name for figure in one.findings.differences]
    assert names[0] == "starting_weights"
    assert "batch_hash" not in names
    (one,) = redo(folder, "3")
    assert one.off_at == 2


def test_changed_settings_show_every_figure_and_change_nothing_after(folder) -> None:
    changes = Changes(settings=("learner.learning_rate=1e-4", "learner.minibatches=1"))
    one, two = redo(folder, "1..2", changes)
    for done in (one, two):
        figures = {figure.name: figure for figure in done.findings.figures}
        assert figures["starting_weights"].same
        assert figures["batch_hash"].same
        assert figures["learning_rate"].redone == 1e-4
        assert figures["losses[1]"].redone is None
        assert not figures["weights_checksum"].same
    (same,) = redo(folder, "1", Changes(settings=("learner.micro_batch_tokens=16000",)))
    assert same.findings.verdict == "identical"
    with pytest.raises(RecipeError, match=r"rollout\.max_steps does not act"):
        list(redo(folder, "1", Changes(settings=("rollout.max_steps=3",))))
    with pytest.raises(RecipeError, match="clip_low"):
        list(redo(folder, "1", Changes(settings=("learner.clip_lov=3",))))


def test_how_a_critic_learns_may_be_changed_and_what_it_is_may_not(run) -> None:
    folder = run(*SHAPES["critic"], "topology.updates=2")
    changes = ("learner.value_coefficient=0.5", "learner.critic_extra_epochs=1")
    (one,) = redo(folder, "2", Changes(settings=changes))
    figures = {figure.name: figure for figure in one.findings.figures}
    assert all(figures[name].same for name in ("starting_weights", "batch_hash", "value_losses[0]"))
    assert not figures["losses[0]"].same
    critic = [figure for name, figure in figures.items() if name.startswith("critic_losses[")]
    assert [figure.redone is None for figure in critic] == [False] * 2 + [True] * 2
    with pytest.raises(RecipeError, match=r"started from what its critic \('separate'\) had learned"):
        list(redo(folder, "2", Changes(settings=("learner.critic=head", "learner.critic_extra_epochs=0"))))


REWARDS = """
def same(trajectory):
    assert trajectory.steps and trajectory.record.row.env == trajectory.env
    return trajectory.reward

def turned(trajectory):
    return -float(trajectory.reward)

def broken(trajectory):
    return None
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch) -> str:
    (tmp_path / "some_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    return "some_rewards"


def test_recomputed_rewards_change_advantages_and_nothing_recorded(folder, rewards) -> None:
    other_rewards(folder, rewards, "3")


@pytest.mark.slow
def test_recomputed_rewards_reach_what_was_drawn_and_its_peers(run, rewards) -> None:
    other_rewards(run(*SHAPES["replay"]), rewards, "4")


def other_rewards(folder: Path, rewards: str, last: str) -> None:
    before = everything(folder)
    (same,) = redo(folder, last, Changes(reward=load_reward(f"{rewards}:same")))
    assert (same.findings.verdict, same.rewards.num_changed, same.rewards.num_turned) == ("identical", 0, 0)
    assert same.rewards.kept == same.rewards.new_kept
    assert all(change.advantage == change.new_advantage for change in same.rewards.changes)
    (other,) = redo(folder, last, Changes(reward=load_reward(f"{rewards}:turned")))
    assert other.rewards.reward_version.startswith("some_rewards.turned@recomputed+")
    solved = sum(change.reward != 0 for change in other.rewards.changes)
    assert 0 < other.rewards.num_changed == solved < len(other.rewards.changes)
    learned = [change for change in other.rewards.changes if change.advantage]
    assert other.rewards.num_turned == len(learned) > 0
    assert all(change.new_advantage == -change.advantage for change in learned)
    assert not next(figure for figure in other.findings.figures if figure.name == "batch_hash").same
    assert other.rewards.new_kept == other.rewards.kept
    with pytest.raises(UsageError, match="returned None for trajectory"):
        list(redo(folder, last, Changes(reward=load_reward(f"{rewards}:broken"))))
    assert everything(folder) == before


def test_what_cannot_be_done_over_is_refused_in_words(folder) -> None:
    with pytest.raises(UsageError, match="no update 9; updates recorded: 1 to 3"):
        list(redo(folder, "9"))
    with pytest.raises(UsageError, match="names no updates"):
        list(redo(folder, "1-2"))
    shutil.rmtree(checkpoint_folder(folder, 0))
    with pytest.raises(RunFolderError, match="no checkpoint and no record"):
        list(redo(folder, "1"))
    for target in ("json", "json:absent", "absent_module:f"):
        with pytest.raises(UsageError, match="--reward"):
            load_reward(target)
