"""Learning from pieces: weights, advantages and counts are those of whole trajectories; long ones train in bounded memory."""

import dataclasses
import math
import resource

import numpy as np
import pytest
import torch
from learner_cases import VOCAB, batch_of, fork_of, make_batch, make_decoder, make_sequence

from hotpot.config.sections import LearnerSection
from hotpot.errors import LearnerError
from hotpot.experience import Cutting, Markup, cut_sequence, sequences
from hotpot.learner import Learner, UpdateResult
from hotpot.learner.update.checks import check_sequences
from hotpot.testing.records import make_trajectory

MARKUP = Markup(ids=frozenset({1, 2}), ends=frozenset({2}))


def make_learner(decoder=None, **settings) -> Learner:
    section = LearnerSection(
        **{"learning_rate": 1e-2, "minibatches": 2, "old_logprobs": "recomputed", **settings}
    )
    return Learner(
        decoder or make_decoder(max_context_tokens=256),
        section,
        total_updates=10,
        seed=0,
        temperature=1.0,
        markup=MARKUP,
    )


def long_batch() -> list:
    """Two groups of trajectories of unequal lengths, most of them longer than a piece of 64 tokens."""
    return [
        make_sequence(issue, sample, reward=float(sample % 2), turns=4 + 9 * sample)
        for issue in range(2)
        for sample in range(4)
    ]


def check_covered(result: UpdateResult, batch: list, segment_tokens: int) -> None:
    """Every action token is learned in exactly one row, and the rows are told apart by where they begin."""
    by_id = {s.trajectory_id: s for s in batch}
    counted = {s.trajectory_id: np.zeros(len(s.tokens), dtype=int) for s in batch}
    for learned in result.learned:
        whole = by_id[learned.trajectory_id].tokens
        part = slice(learned.begin, learned.begin + len(learned.tokens))
        assert len(learned.tokens) <= segment_tokens
        assert np.array_equal(whole[part], learned.tokens)
        counted[learned.trajectory_id][part] += learned.loss_mask
    keys = {(row.trajectory_id, row.segment, row.begin) for row in result.learned}
    assert len(keys) == len(result.learned)
    for name, count in counted.items():
        assert np.array_equal(count, by_id[name].loss_mask.astype(int)), name


@pytest.mark.parametrize("packing", ["padded", "packed"])
@pytest.mark.parametrize("overlap", [0, 16])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_trajectory_weighs_the_same_however_it_is_cut(aggregation: str, overlap: int, packing: str) -> None:
    """At ratio 1 the loss is minus the weighted mean advantage: it does not depend on how many pieces there are."""
    batch = long_batch()
    results = [
        make_learner(
            aggregation=aggregation, minibatches=1, packing=packing, segment_tokens=tokens,
            segment_overlap=overlap if tokens else 0,
        ).update(batch, update=1, policy_version=3)
        for tokens in (0, 64, 100)
    ]  # fmt: skip
    whole = results[0]
    lengths = [int(s.loss_mask.sum()) for s in batch]
    gains = [s.reward - 0.5 for s in batch]
    expected = np.mean(gains) if aggregation == "sequence_mean" else np.dot(lengths, gains) / sum(lengths)
    assert whole.loss == pytest.approx(-expected, abs=1e-12)
    for tokens, result in zip((64, 100), results[1:], strict=True):
        assert len(result.learned) > len(batch)
        check_covered(result, batch, tokens)
        assert result.loss == pytest.approx(whole.loss, abs=1e-12)
        assert result.ratio_mean == 1.0
        assert result.num_trajectories == whole.num_trajectories
        assert result.num_loss_tokens == whole.num_loss_tokens
        assert (result.advantage_mean, result.advantage_std) == pytest.approx(
            (whole.advantage_mean, whole.advantage_std)
        )
        assert result.num_tokens > whole.num_tokens if overlap else result.num_tokens >= whole.num_tokens
        for row in result.learned:
            gain = next(s.reward for s in batch if s.trajectory_id == row.trajectory_id) - 0.5
            assert (row.advantages[row.loss_mask == 1] == np.float32(gain)).all()


def test_a_piece_without_a_cut_before_it_is_compared_with_the_sampler() -> None:
    result = make_learner(segment_tokens=64).update(long_batch(), update=1, policy_version=3)
    first = sum(int(row.loss_mask.sum()) for row in result.learned if row.begin == 0)
    assert 0 < result.agreement.num_tokens == first < result.num_loss_tokens


def test_the_first_piece_is_scored_as_the_whole_trajectory_is() -> None:
    batch = long_batch()
    cut_rows, whole_rows = (
        {
            (row.trajectory_id, row.begin): row
            for row in make_learner(segment_tokens=tokens).update(batch, update=1, policy_version=3).learned
        }
        for tokens in (64, 0)
    )
    for (name, begin), whole in whole_rows.items():
        piece = cut_rows[name, begin]
        size = len(piece.tokens)
        np.testing.assert_allclose(piece.new_logprobs, whole.new_logprobs[:size], atol=1e-5)


@pytest.mark.parametrize("sharing", ["padded", "packed"])
def test_an_update_with_forks_equals_one_that_shares_nothing(sharing: str, monkeypatch) -> None:
    parents = [make_sequence(i, s, reward=float(s), turns=6, system=20) for i in range(2) for s in range(3)]
    batch = [*parents, *(fork_of(parent, number, share=0.8) for parent in parents for number in range(3))]
    outcomes = []
    for packing in (sharing, "none"):
        for name in ("PASS_OVERHEAD_TOKENS", "PREFIX_OVERHEAD_TOKENS"):
            monkeypatch.setattr(f"hotpot.learner.batches.families.{name}", 10**9 if packing == "none" else 0)
        # In float64: the first step's rounding is in the weights of those behind it.
        learner = make_learner(
            make_decoder(max_context_tokens=256).double(), minibatches=3, learning_rate=1e-4,
            packing="padded" if packing == "none" else packing,
        )  # fmt: skip
        result = learner.update(batch, update=1, policy_version=3)
        outcomes.append((result, [p.grad for p in learner.decoder.parameters()]))
    (shared, gradients), (apart, expected) = outcomes
    assert apart.num_shared_tokens == 0
    assert shared.num_shared_tokens > 0.4 * apart.num_tokens
    np.testing.assert_allclose(shared.losses, apart.losses, rtol=0, atol=1e-6)
    for one, two in zip(gradients, expected, strict=True):
        assert torch.allclose(one, two, rtol=0, atol=1e-6)
    assert shared.num_loss_tokens == sum(int(s.loss_mask.sum()) for s in batch)


def test_pieces_that_own_a_token_twice_are_refused() -> None:
    whole = make_sequence(0, 0, turns=20)
    pieces = cut_sequence(whole, Cutting(segment_tokens=64, overlap=16))
    check_sequences(pieces, max_context_tokens=64)
    greedy = dataclasses.replace(
        pieces[1], loss_mask=whole.loss_mask[pieces[1].begin :][: len(pieces[1].tokens)]
    )
    with pytest.raises(LearnerError, match="in part"):
        check_sequences([pieces[0], greedy], max_context_tokens=64)


@pytest.mark.slow
@pytest.mark.parametrize(("overlap", "packing", "epochs"), [(0, "padded", 2), (256, "packed", 1)])
def test_trajectories_of_32000_tokens_train(overlap: int, packing: str, epochs: int) -> None:
    trajectories = [
        make_trajectory(
            issue=0, sample=sample, reward=float(sample), num_steps=40, prompt_tokens=500, sampled_tokens=330,
            vocabulary=VOCAB, policy_version=3,
        )
        for sample in range(2)
    ]  # fmt: skip
    batch = [part for trajectory in trajectories for part in sequences(trajectory)]
    assert min(len(s.tokens) for s in batch) > 30_000
    assert sum(len(s.tokens) for s in batch) >= 2 * 32_000
    learner = make_learner(
        make_decoder(max_context_tokens=1024), learning_rate=1e-3, epochs=epochs, segment_tokens=1024,
        segment_overlap=overlap, packing=packing, micro_batch_tokens=2048,
    )  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = learner.update(batch, update=1, policy_version=3)
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    check_covered(result, batch, 1024)
    assert len(result.taken) == 2 * epochs
    assert np.isfinite(result.losses).all()
    assert math.isfinite(result.grad_norm)
    assert result.grad_norm > 0
    # One matrix of 32,000 x 32,000 scores is 4 GB a head; a pass of 2,048 tokens needs some tens of megabytes.
    assert grown_mb < 500


def test_defaults_cut_nothing() -> None:
    batch = make_batch()
    learner = make_learner(old_logprobs="recorded")
    result = learner.update(batch, update=1, policy_version=3)
    assert result.batch_hash == batch_of(batch).hash
    assert [row.begin for row in result.learned] == [0] * len(batch)
