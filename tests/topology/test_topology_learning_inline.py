"""Learning in the main loop: what the learner does, when it is told, and what stays as it is meanwhile."""

import dataclasses

import numpy as np
import pytest
from learning_cases import make_work

from hotpot.errors import LearnerError
from hotpot.models import checksum, copy_weights
from hotpot.topology.learning.inline import InlineLearning
from hotpot.topology.learning.protocol import Learned
from hotpot.topology.parts.ingredients import read_model
from hotpot.topology.parts.learners import make_learner


@pytest.fixture
def learner(recipe):
    made = recipe()
    return make_learner(made, read_model(made), None)


def test_it_learns_what_the_learner_learns(learner, recipe) -> None:
    learning, alone = (
        InlineLearning(learner, num_threads=1),
        make_learner(recipe(), read_model(recipe()), None),
    )
    for update in (1, 2):
        work = make_work(update)
        learning.begin(work)
        assert learning.busy
        learned = learning.poll()
        assert not learning.busy
        assert isinstance(learned, Learned)
        expected = alone.update(work.sequences, update=update, policy_version=0, peers=work.peers)
        assert learned.result.batch_hash == expected.batch_hash
        np.testing.assert_array_equal(learned.result.losses, expected.losses)
        assert learned.checksum == checksum(learning.weights()) == checksum(alone.weights())
    assert learning.poll() is None
    assert learning.beat()[0] == 2


def test_weights_stay_until_the_update_after_the_next_one_is_begun(learner) -> None:
    learning = InlineLearning(learner, num_threads=1)
    with pytest.raises(LearnerError, match="no update was learned"):
        learning.weights()
    learning.begin(make_work(1))
    learning.poll()
    served = learning.weights()
    before = checksum(copy_weights(served))
    learning.begin(make_work(2))
    assert checksum(served) == before


def test_what_the_learner_refuses_is_raised_when_asked_for(learner) -> None:
    learning = InlineLearning(learner, num_threads=1)
    learning.begin(dataclasses.replace(make_work(1), sequences=[]))
    with pytest.raises(LearnerError, match="poll first"):
        learning.begin(make_work(1))
    with pytest.raises(LearnerError, match="no sequences"):
        learning.poll()
    learning.begin(make_work(1))
    assert isinstance(learning.poll(), Learned)


def test_it_saves_as_the_learner_does(learner, tmp_path) -> None:
    learning = InlineLearning(learner, num_threads=1)
    learning.begin_save(tmp_path, {"tokenizer.json": b"{}"}, {"update": 0})
    assert learning.poll() == tmp_path
    assert (tmp_path / "learner.json").is_file()
