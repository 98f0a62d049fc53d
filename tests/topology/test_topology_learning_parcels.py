"""Records on their way to the learner's process and back: equal to the last bit, and nothing but what is known."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from learning_cases import make_work

from hotpot.errors import LearnerError, ModelFilesError
from hotpot.learner import Finding, NonFiniteError, UpdateResult
from hotpot.models import checksum
from hotpot.topology.learning.memory import Box, Progress, WeightBuffers, nameless
from hotpot.topology.learning.parcels import Save, describe, pack, revive, unpack
from hotpot.topology.parts.ingredients import read_model
from hotpot.topology.parts.learners import make_learner


def through(record):
    return unpack(bytearray(b"".join(pack(record))))


def assert_same(one, other, where="") -> None:
    assert type(one) is type(other), where
    if dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name), f"{where}.{field.name}")
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype, where
        assert one.shape == other.shape, where
        assert one.tobytes() == other.tobytes(), where
        assert other.flags.writeable, where
    elif isinstance(one, tuple | list):
        assert len(one) == len(other), where
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{number}]")
    elif isinstance(one, float) and one == one:
        assert np.float64(one).tobytes() == np.float64(other).tobytes(), where
    else:
        assert one == other or (one != one and other != other), where


@pytest.fixture
def learner(recipe):
    made = recipe("learner.advantages=gae", "learner.critic=separate", "learner.max_skipped_in_a_row=1")
    return make_learner(made, read_model(made), None)


def test_work_arrives_to_the_last_bit() -> None:
    work = make_work(1)
    odd = np.array([0.0, -0.0, np.nan, np.inf], np.float32)
    sequence = dataclasses.replace(
        work.sequences[0], behaviour_logprobs=odd[::2], tokens=np.empty(0, np.int32), reward=float("nan")
    )
    assert_same(
        dataclasses.replace(work, sequences=[sequence, *work.sequences]),
        through(dataclasses.replace(work, sequences=[sequence, *work.sequences])),
    )
    save = Save(folder=Path("a"), files={"x": b"\x00\xff", "y": b""}, run={"deep": {"n": [1, None, "é"]}})
    assert_same(save, through(save))


def test_what_an_update_came_to_arrives_to_the_last_bit_also_where_it_failed(learner) -> None:
    work = make_work(1)
    result = learner.update(work.sequences, update=1, policy_version=0, peers=work.peers)
    assert_same(result, through(result))
    with torch.no_grad():
        next(learner.decoder.parameters()).fill_(float("nan"))
    with pytest.raises(NonFiniteError) as caught:
        learner.update(make_work(2).sequences, update=2, policy_version=0)
    arrived = revive(through(describe(caught.value)))
    assert isinstance(arrived, NonFiniteError)
    assert str(arrived) == str(caught.value)
    assert isinstance(arrived.result, UpdateResult)
    assert isinstance(arrived.result.steps[0].finding, Finding)
    assert_same(caught.value.result, arrived.result)
    assert "check_skips" in arrived.__notes__[0]


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (ModelFilesError("gone"), ModelFilesError),
        (MemoryError("full"), MemoryError),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError),
        (FileNotFoundError(2, "no such file", "there"), OSError),
        (type("Own", (LearnerError,), {"__init__": lambda self, a, b: None})(1, 2), LearnerError),
        (type("Later", (NotImplementedError,), {})("not yet"), RuntimeError),
    ],
)
def test_errors_arrive_as_themselves_or_as_the_nearest_known(error, arrives) -> None:
    arrived = revive(through(describe(error)))
    assert type(arrived) is arrives
    assert str(error) in str(arrived)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(TypeError, match="ProcessLike is not a record"):
        pack(dataclasses.make_dataclass("ProcessLike", ["a"])(1))
    with pytest.raises(TypeError, match="object"):
        pack({"a": np.array([object()])})
    with pytest.raises(TypeError, match="set can't be given"):
        pack({"a": {1}})


def test_a_box_is_empty_once_it_was_taken_from() -> None:
    descriptor = nameless("test")
    here, there = Box(descriptor), Box(os.dup(descriptor))
    for size in (100_000, 3):
        here.put({"a": np.arange(size)})
        np.testing.assert_array_equal(there.take()["a"], np.arange(size))
        assert os.fstat(descriptor).st_size == 0
    with pytest.raises(LearnerError, match="no whole record"):
        there.take()
    os.close(descriptor)
    os.close(there._descriptor)


def test_weights_are_equal_in_their_buffer_and_the_other_one_is_left_alone() -> None:
    descriptor = nameless("test")
    first = {
        "a": torch.randn(3, 5),
        "half": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(3),
        "none": torch.empty(0, 4),
    }
    second = {name: tensor + 1 for name, tensor in first.items()}
    writer, reader = WeightBuffers.make(descriptor, first), WeightBuffers.find(descriptor)
    writer.write(0, first)
    served = reader.read(0)
    writer.write(1, second)
    assert checksum(served) == checksum(first)
    assert checksum(reader.read(1)) == checksum(second) != checksum(first)
    writer.write(0, second)
    assert checksum(served) == checksum(second)
    os.close(descriptor)


def test_progress_is_seen_by_both() -> None:
    descriptor = nameless("test")
    here, there = Progress(descriptor), Progress(descriptor)
    here.count()
    here.count()
    count, last = there.read()
    assert count == 2
    assert last > 0
    os.close(descriptor)
