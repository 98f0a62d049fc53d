"""A learner on disk: continuing is bit-identical, damage is refused, nothing is half-loaded."""

import json
import shutil
from pathlib import Path

import pytest
from learner_cases import make_batch, make_decoder, make_sequence

from hotpot.config.sections import LearnerSection
from hotpot.errors import ModelFilesError
from hotpot.learner import Learner
from hotpot.models import checksum, load_decoder

FILES = {"tokenizer.json": b"{}"}


def make_learner(seed: int = 0, **shape) -> Learner:
    section = LearnerSection(learning_rate=1e-2, minibatches=2)
    return Learner(make_decoder(seed, **shape), section, total_updates=10, seed=0, temperature=1.0)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    learner = make_learner()
    learner.update(make_batch(), update=1, policy_version=3)
    learner.save(tmp_path / "checkpoint", FILES)
    return tmp_path / "checkpoint"


def test_continuing_is_bit_identical(saved: Path) -> None:
    straight, resumed = make_learner(), make_learner(seed=5)
    straight.update(make_batch(), update=1, policy_version=3)
    resumed.load(saved)
    assert (resumed.update_number, resumed.optimizer_steps) == (1, 2)
    assert checksum(resumed.weights()) == checksum(straight.weights())
    for update in (2, 3):
        one, two = (
            learner.update(make_batch(), update=update, policy_version=3) for learner in (straight, resumed)
        )
        assert one.losses.tobytes() == two.losses.tobytes()
    assert checksum(resumed.weights()) == checksum(straight.weights())


def test_the_folder_is_an_ordinary_model_folder_without_pickle(saved: Path) -> None:
    names = {path.name for path in saved.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "learner.json", "learner"}
    assert [path.name for path in (saved / "learner").iterdir()] == ["optimizer.safetensors"]
    assert load_decoder(saved).config == make_decoder().config


def test_a_learner_that_never_stepped_can_be_saved(tmp_path: Path) -> None:
    make_learner().save(tmp_path, FILES)
    resumed = make_learner(seed=5)
    resumed.update(make_batch(), update=1, policy_version=3)
    resumed.load(tmp_path)
    assert resumed.optimizer_steps == 0
    one, two = (
        learner.update(make_batch(), update=1, policy_version=3) for learner in (make_learner(), resumed)
    )
    assert one.losses.tobytes() == two.losses.tobytes()


def test_skips_in_a_row_survive(tmp_path: Path) -> None:
    learner = make_learner()
    learner.decoder.norm.weight.register_hook(lambda gradient: gradient * float("nan"))
    result = learner.update(
        [make_sequence(0, i, reward=float(i)) for i in range(2)], update=1, policy_version=3
    )
    assert result.skipped_steps == 2
    learner.save(tmp_path, FILES)
    resumed = make_learner()
    resumed.load(tmp_path)
    resumed.save(tmp_path / "again", FILES)
    texts = [json.loads((folder / "learner.json").read_text()) for folder in (tmp_path, tmp_path / "again")]
    assert len(texts[0]["skipped_in_a_row"]) == 2
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "learner/optimizer.safetensors", "learner.json", "config.json"]
)
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_damage_is_refused_and_changes_nothing(saved: Path, name: str, damage: str) -> None:
    path = saved / name
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif name.endswith(".json"):
        path.write_bytes(b"[1]" if name == "learner.json" else data.replace(b"0", b"\xff", 1))
    else:
        data[-3] ^= 0x40
        path.write_bytes(data)
    learner = make_learner(seed=5)
    learner.update(make_batch(), update=1, policy_version=3)
    before = checksum(learner.weights())
    with pytest.raises(ModelFilesError):
        learner.load(saved)
    assert checksum(learner.weights()) == before
    assert learner.optimizer_steps == 2


def test_a_mixture_of_two_checkpoints_is_refused(saved: Path, tmp_path: Path) -> None:
    other = make_learner(seed=1)
    other.update(make_batch(), update=1, policy_version=3)
    other.save(tmp_path / "other", FILES)
    name = "learner/optimizer.safetensors"
    shutil.copy(tmp_path / "other" / name, saved / name)
    with pytest.raises(ModelFilesError, match="the optimizer in"):
        make_learner().load(saved)


def test_a_model_of_another_shape_is_refused(saved: Path) -> None:
    with pytest.raises(ModelFilesError, match="shape"):
        make_learner(num_layers=1).load(saved)
