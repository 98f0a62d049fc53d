"""Every allowed combination of the recipe's choices makes a learner that takes a finite step, blind to masked tokens."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import batch_of, make_batch, make_decoder
from pydantic import ValidationError

from hotpot.config.sections import LearnerSection
from hotpot.experience import TrainingSequence
from hotpot.learner import Learner
from hotpot.learner.update.shaping import RunningScales, shaped_batch
from hotpot.models import checksum

CHOICES = {
    "advantages": ("group_mean", "group_normalized", "rloo", "reinforce_pp", "gae", "vtrace"),
    "advantage_normalization": ("none", "group", "batch", "running", "minibatch"),
    "reward_normalization": ("none", "group", "batch", "running"),
    "aggregation": ("token_mean", "sequence_mean", "fixed_length"),
    "kl_in": ("loss", "reward"),
    "critic": ("none", "head", "separate"),
}

VALUED = ("gae", "vtrace")


def allowed() -> list[LearnerSection]:
    """The sections of all combinations that the recipe does not refuse."""
    found = []
    for values in itertools.product(*CHOICES.values()):
        choice = dict(zip(CHOICES, values, strict=True))
        length = 16 if choice["aggregation"] == "fixed_length" else 0
        extra = 1 if choice["critic"] == "separate" else 0
        try:
            found.append(
                LearnerSection(
                    **choice,
                    aggregation_tokens=length,
                    critic_extra_epochs=extra,
                    kl_coefficient=0.1,
                    minibatches=1,
                )
            )
        except ValidationError:
            continue
    return found


ALLOWED = allowed()


def named(section: LearnerSection) -> str:
    return "-".join(getattr(section, name) for name in CHOICES)


def small() -> list[TrainingSequence]:
    return make_batch(groups=2, samples=2)


def with_other_masked(sequences: list[TrainingSequence]) -> list[TrainingSequence]:
    """The same with other values wherever nothing was sampled, tokens apart: those are read as context."""
    return [
        dataclasses.replace(
            one,
            behaviour_logprobs=np.where(one.loss_mask, one.behaviour_logprobs, -7).astype(np.float32),
            model_logprobs=np.where(one.loss_mask, one.model_logprobs, -9).astype(np.float32),
        )
        for one in sequences
    ]


def stepped(section: LearnerSection, sequences: list[TrainingSequence]) -> tuple[Learner, object]:
    learner = Learner(
        make_decoder(), section, total_updates=3, seed=0, temperature=1.0, reference=make_decoder(seed=7)
    )
    return learner, learner.update(sequences, update=1, policy_version=3)


def test_there_are_as_many_as_are_known() -> None:
    kinds = {(one.advantages, one.critic) for one in ALLOWED}
    assert kinds == {(name, "none") for name in CHOICES["advantages"] if name not in VALUED} | {
        (name, critic) for name in VALUED for critic in ("head", "separate")
    }
    by_advantages = {name: sum(one.advantages == name for one in ALLOWED) for name in CHOICES["advantages"]}
    assert by_advantages == {
        "group_mean": 4 * 4 * 6,
        "group_normalized": 4 * 1 * 6,
        "rloo": 4 * 4 * 6,
        "reinforce_pp": 1 * 4 * 6,
        "gae": 5 * 1 * 6 * 2,
        "vtrace": 5 * 1 * 6 * 2,
    }


@pytest.mark.slow
@pytest.mark.parametrize("section", ALLOWED, ids=named)
def test_a_step_is_finite_and_blind_to_masked_tokens(section: LearnerSection) -> None:
    learner, result = stepped(section, small())
    assert len(result.taken) == 1
    assert result.skipped_steps == 0
    for column in (result.losses, result.grad_norms, result.value_losses, result.critic_grad_norms):
        assert np.isfinite(column).all()
    assert result.grad_norms[0] > 0
    assert all(torch.isfinite(tensor).all() for tensor in learner.weights().values())
    for one in result.learned:
        masked = one.loss_mask == 0
        for values in (one.advantages, one.returns, one.old_logprobs, one.new_logprobs):
            assert np.isfinite(values).all()
            assert not values[masked].any()
    other, again = stepped(section, with_other_masked(small()))
    assert checksum(other.weights()) == checksum(learner.weights())
    assert again.losses.tobytes() == result.losses.tobytes()


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), groups=st.integers(1, 4), equal=st.booleans())
def test_gae_normalised_within_groups_is_the_float64_reference(seed: int, groups: int, equal: bool) -> None:
    batch = batch_of(make_batch(groups=groups, samples=3))
    values = np.random.default_rng(seed).normal(2.0, 3.0, batch.num_loss_tokens)
    owner = np.array([batch.sequences[n].sequence.group_id for n in batch.sequence_numbers])
    if equal:
        values[owner == "g0"] = 1.5  # a group without any difference has nothing to say
    section = LearnerSection(advantages="gae", critic="head", advantage_normalization="group")
    shaped, _ = shaped_batch(batch.with_advantages(values), section, RunningScales())
    for group in np.unique(owner):
        own = values[owner == group].astype(np.float64)
        apart = own - own.mean()
        wanted = np.zeros_like(own) if np.ptp(own) == 0 else apart / own.std(ddof=0)
        np.testing.assert_allclose(shaped.advantages[owner == group], wanted, rtol=1e-6, atol=1e-5)
