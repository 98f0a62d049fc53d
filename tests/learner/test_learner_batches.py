"""Batches: fixed order and hash, even deals, what is refused."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import VOCAB, batch_of, make_batch, make_sequence

from hotpot.errors import LearnerError
from hotpot.learner.batches.batches import deal
from hotpot.learner.update.checks import check_arrays, check_sequences


def test_arrival_order_changes_nothing() -> None:
    sequences = make_batch(groups=12)
    expected = batch_of(sequences)
    ids = [member.sequence.trajectory_id for member in expected.sequences]
    assert ids[:4] == ["0.0.0", "0.1.0", "0.2.0", "0.3.0"]
    assert ids.index("2.0.0") < ids.index("10.0.0")
    for seed in range(3):
        found = batch_of(random.Random(seed).sample(sequences, len(sequences)))
        assert found.hash == expected.hash
        assert [member.sequence.trajectory_id for member in found.sequences] == ids


@pytest.mark.parametrize("field", ["tokens", "behaviour_logprobs", "reward", "loss_mask"])
def test_the_hash_sees_what_is_learned(field: str) -> None:
    sequences = make_batch()
    target = sequences[0]
    value = getattr(target, field)
    if field == "reward":
        changed = value + 0.5
    else:
        changed = value.copy()
        last = np.flatnonzero(target.loss_mask)[-1]
        changed[last] = not changed[last] if field == "loss_mask" else changed[last] + 1
    assert (
        batch_of([dataclasses.replace(target, **{field: changed}), *sequences[1:]]).hash
        != batch_of(sequences).hash
    )


def test_the_hash_ignores_what_stands_under_the_mask_and_dropped_groups() -> None:
    sequences = make_batch()
    poisoned = [
        dataclasses.replace(
            s, behaviour_logprobs=np.where(s.loss_mask, s.behaviour_logprobs, np.nan).astype(np.float32)
        )
        for s in sequences
    ]
    dropped = [make_sequence(50, sample, reward=1.0) for sample in range(4)]
    assert batch_of([*poisoned, *dropped]).hash == batch_of(sequences).hash


@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=40),
    minibatches=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_deals_are_complete_even_and_reproducible(lengths: list[int], minibatches: int, seed: int) -> None:
    sequences = [
        make_sequence(0, index, reward=float(index), turns=turns) for index, turns in enumerate(lengths)
    ]
    sequences.append(make_sequence(0, 99, reward=-1.0))
    batch = batch_of(sequences)
    hands = deal(batch, minibatches=minibatches, seed=seed, update=1, epoch=0)
    assert sorted(m.start for hand in hands for m in hand) == [m.start for m in batch.sequences]
    assert len(hands) == min(minibatches, len(batch.owners))
    counts = [len(hand) for hand in hands]
    tokens = [sum(len(m.sequence.tokens) for m in hand) for hand in hands]
    assert max(counts) - min(counts) <= 1
    assert max(tokens) - min(tokens) <= max(len(s.tokens) for s in sequences)
    again = deal(batch_of(sequences[::-1]), minibatches=minibatches, seed=seed, update=1, epoch=0)
    assert [[m.start for m in hand] for hand in again] == [[m.start for m in hand] for hand in hands]


def test_deals_differ_by_seed_update_and_epoch() -> None:
    batch = batch_of(make_batch(groups=6))
    keys = [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1)]
    dealt = {
        key: tuple(
            tuple(m.start for m in hand)
            for hand in deal(batch, minibatches=3, seed=key[0], update=key[1], epoch=key[2])
        )
        for key in keys
    }
    assert len(set(dealt.values())) == len(keys)


def test_deals_are_random_even_where_all_lengths_differ() -> None:
    sequences = [
        dataclasses.replace(
            make_sequence(0, index, reward=float(index)),
            **{
                name: np.concatenate([np.zeros(index, value.dtype), value])
                for name, value in arrays_of(make_sequence(0, 0)).items()
            },
        )
        for index in range(8)
    ]
    batch = batch_of(sequences)
    found = {
        tuple(m.start for m in deal(batch, minibatches=2, seed=seed, update=1, epoch=0)[0])
        for seed in range(40)
    }
    assert len(found) > 8  # of the 16 that take one of each pair of neighbours


def test_numbers_in_ids_order_the_batch() -> None:
    batch = batch_of([make_sequence(0, sample, reward=float(sample)) for sample in range(12)])
    assert [m.sequence.trajectory_id for m in batch.sequences] == [f"0.{sample}.0" for sample in range(12)]


def arrays_of(sequence) -> dict[str, np.ndarray]:
    names = ("tokens", "loss_mask", "behaviour_logprobs", "model_logprobs", "token_policy_version")
    return {name: getattr(sequence, name) for name in names}


def test_segments_of_a_trajectory_stay_together() -> None:
    sequences = [*make_batch(), make_sequence(0, 1, reward=1.0, segment=1)]
    for hand in deal(batch_of(sequences), minibatches=4, seed=0, update=1, epoch=0):
        ids = [m.sequence.trajectory_id for m in hand]
        assert ids.count("0.1.0") in (0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": np.ones(4, dtype=bool)}, "first token"),
        ({"loss_mask": np.ones(4, dtype=np.int32)}, "bool"),
        ({"tokens": np.array([1, 2, 3, VOCAB], dtype=np.int32)}, "tokenizer"),
        ({"tokens": np.array([1, 2, 3, -1], dtype=np.int32)}, "tokenizer"),
        ({"behaviour_logprobs": np.zeros(3, dtype=np.float32)}, "shapes"),
    ],
)
def test_impossible_sequences_are_refused_by_name(change, message: str) -> None:
    good = dataclasses.replace(
        make_sequence(4, 2),
        tokens=np.array([1, 2, 3, 4], dtype=np.int32),
        loss_mask=np.array([False, False, True, True]),
        behaviour_logprobs=np.zeros(4, dtype=np.float32),
        model_logprobs=np.zeros(4, dtype=np.float32),
        token_policy_version=np.zeros(4, dtype=np.int32),
    )
    check_arrays([good], vocab_size=VOCAB)
    with pytest.raises(LearnerError, match=message) as caught:
        check_arrays([dataclasses.replace(good, **change)], vocab_size=VOCAB)
    assert "4.2.0" in str(caught.value)
    check_sequences([good], max_context_tokens=4)
    with pytest.raises(LearnerError, match="context"):
        check_sequences([good], max_context_tokens=3)


def test_duplicates_and_contradictions_are_refused() -> None:
    one = make_sequence(0, 0, reward=1.0)
    limits = {"max_context_tokens": 96}
    with pytest.raises(LearnerError, match="twice"):
        check_sequences([one, make_sequence(0, 1), one], **limits)
    with pytest.raises(LearnerError, match="reward"):
        check_sequences([one, make_sequence(0, 0, reward=2.0, segment=1)], **limits)
    check_sequences([one, make_sequence(0, 0, reward=1.0, segment=1)], **limits)
