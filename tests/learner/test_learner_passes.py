"""Passes: layouts that differ in prefix, packing and company, and give the same loss and gradients."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import VOCAB, batch_of, fork_of, make_batch, make_decoder, make_sequence

from hotpot.errors import LearnerError
from hotpot.experience.sequences.segments import TrainingSequence
from hotpot.learner.batches import families
from hotpot.learner.batches.arrangement import PADDING_MULTIPLE
from hotpot.learner.batches.batches import Batch, deal
from hotpot.learner.batches.families import common_prefix
from hotpot.learner.batches.passes import MicroBatch, cut, lay_out
from hotpot.learner.scores.forward import score

BOTH = pytest.mark.parametrize("packing", ["padded", "packed"])


def rows_of(batch: Batch) -> list:
    return [[member] for member in batch.sequences]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Groups of unequal lengths, some trajectories with forks: prefixes of every length, loss tokens inside them."""
    sequences: list[TrainingSequence] = []
    for issue in range(draw(st.integers(1, 3))):
        for sample in range(draw(st.integers(2, 4))):
            made = make_sequence(
                issue,
                sample,
                reward=float(sample),
                turns=draw(st.integers(1, 6)),
                seed=draw(st.integers(0, 99)),
            )
            forks = [fork_of(made, number) for number in range(draw(st.integers(0, 2)))]
            sequences += [made, *forks]
    return batch_of(sequences)


def outcome(batch: Batch, micros: list[MicroBatch]) -> tuple[np.ndarray, list[torch.Tensor]]:
    """Log-probabilities float64 [N] and the gradients of a weighted sum of them, computed in float64."""
    decoder = make_decoder().double()
    weights = torch.from_numpy(np.random.default_rng(0).normal(size=batch.num_loss_tokens))
    found = np.full(batch.num_loss_tokens, np.nan)
    for micro in micros:
        logprobs = score(decoder, micro, temperature=1.0).logprobs
        found[micro.flat] = logprobs.detach().numpy()
        (logprobs.double() * weights[micro.flat] / batch.num_loss_tokens).sum().backward()
    return found, [parameter.grad for parameter in decoder.parameters()]


def assert_same(one, two) -> None:
    np.testing.assert_allclose(one[0], two[0], rtol=0, atol=1e-6)
    for a, b in zip(one[1], two[1], strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-6)


@given(batch=batches(), max_tokens=st.sampled_from([96, 200, 700, 10_000]))
@settings(max_examples=15, deadline=None)
def test_packed_padded_shared_and_alone_give_the_same_loss_and_gradients(
    batch: Batch, max_tokens: int
) -> None:
    alone = outcome(batch, [lay_out([[member]]) for member in batch.sequences])
    with pytest.MonkeyPatch.context() as patch:
        # Without the costs every family that saves a token is split off: the most sharing there can be.
        patch.setattr(families, "PASS_OVERHEAD_TOKENS", 0)
        patch.setattr(families, "PREFIX_OVERHEAD_TOKENS", 0)
        for packing in ("padded", "packed"):
            assert_same(outcome(batch, cut(batch.sequences, max_tokens=max_tokens, packing=packing)), alone)
    assert_same(outcome(batch, [lay_out([list(batch.sequences)], prefix=0)]), alone)


@given(batch=batches(), seed=st.integers(0, 99), packing=st.sampled_from(["padded", "packed"]))
@settings(max_examples=15, deadline=None)
def test_padding_and_the_other_sequences_of_a_pass_change_nothing(batch: Batch, seed: int, packing) -> None:
    """Whatever stands in padding, and whatever another sequence of the grid says, a sequence's scores stay."""
    rng = np.random.default_rng(seed)
    decoder = make_decoder()
    for micro in cut(batch.sequences, max_tokens=400, packing=packing):
        starts = micro.starts if micro.starts is not None else np.zeros_like(micro.tokens)
        row, column = int(micro.rows[0]), int(micro.columns[0])
        own = np.zeros(micro.tokens.shape, dtype=bool)
        own[row] = (starts[row] == starts[row, column]) & (np.arange(own.shape[1]) <= column)
        poisoned = np.where(own, micro.tokens, rng.integers(0, VOCAB, micro.tokens.shape))
        place = len(micro.prefix_columns)
        with torch.no_grad():
            before = score(decoder, micro, temperature=1.0).logprobs
            after = score(decoder, dataclasses.replace(micro, tokens=poisoned), temperature=1.0).logprobs
        assert torch.allclose(before[place], after[place], rtol=0, atol=1e-6)
        assert torch.allclose(before[:place], after[:place], rtol=0, atol=1e-6)


@BOTH
@pytest.mark.parametrize("max_tokens", [50, 96, 400, 10_000])
def test_passes_predict_each_loss_token_from_the_token_before_it(max_tokens: int, packing) -> None:
    parents = make_batch()
    batch = batch_of([*parents, *(fork_of(parent) for parent in parents)])
    by_start = {m.start: m for m in batch.sequences}
    flat = []
    for micro in cut(batch.sequences, max_tokens=max_tokens, packing=packing):
        assert len(micro.prefix) + micro.tokens.size <= max_tokens
        flat += micro.flat.tolist()
        for place, (target, number) in enumerate(zip(micro.targets, micro.flat, strict=True)):
            member = by_start[max(start for start in by_start if start <= number)]
            position = member.loss_positions[number - member.start]
            assert target == member.sequence.tokens[position]
            late = place - len(micro.prefix_columns)
            if late < 0:
                seen = micro.prefix[: micro.prefix_columns[place] + 1]
            else:
                row, column = micro.rows[late], micro.columns[late]
                start = 0 if micro.starts is None else micro.starts[row, column]
                seen = np.concatenate([micro.prefix, micro.tokens[row, start : column + 1]])
            assert np.array_equal(seen, member.sequence.tokens[:position])
    assert sorted(flat) == list(range(batch.num_loss_tokens))


def test_packed_rows_leave_padding_only_at_their_ends() -> None:
    batch = batch_of(make_batch(groups=6))
    padded, packed = (cut(batch.sequences, max_tokens=10_000, packing=how) for how in ("padded", "packed"))
    num_rows, num_packed = (sum(len(micro.tokens) for micro in micros) for micros in (padded, packed))
    assert num_packed < num_rows / 4
    for micro in packed:
        assert micro.starts is not None
        for row in micro.starts:
            begins = np.flatnonzero(row == np.arange(len(row)))
            lengths = np.diff([*begins, len(row)])
            first_padding = next((place for place, length in enumerate(lengths) if length == 1), len(lengths))
            assert (lengths[first_padding:] == 1).all()


def test_padding_and_sharing_are_counted() -> None:
    batch = batch_of(make_batch())
    micro = lay_out(rows_of(batch))
    shared = len(micro.prefix)
    real = sum(m.num_inputs - shared for m in batch.sequences)
    assert shared == 6
    assert micro.num_padding == micro.tokens.size - real
    assert micro.num_shared == shared * (len(batch.sequences) - 1)
    assert micro.tokens.shape[1] % PADDING_MULTIPLE == 0


def test_a_shared_prefix_leaves_each_row_a_token_and_may_hold_loss_tokens() -> None:
    twins = [make_sequence(0, 0, reward=0.0), make_sequence(0, 0, reward=1.0)]
    twins[1] = dataclasses.replace(twins[1], trajectory_id="0.1.0")
    batch = batch_of(twins)
    assert common_prefix(batch.sequences) == batch.sequences[0].num_inputs - 1
    assert common_prefix(batch.sequences[:1]) == 0
    micro = lay_out(rows_of(batch))
    assert len(micro.prefix_columns) == batch.num_loss_tokens - 2
    assert_same(outcome(batch, [micro]), outcome(batch, [lay_out([[m]]) for m in batch.sequences]))


@BOTH
def test_forks_compute_what_they_share_once_and_count_it_once(packing) -> None:
    """With the measured costs: here the family is worth passes of its own."""
    parent = make_sequence(0, 0, reward=1.0, system=80, turns=8)
    sequences = [parent, *(fork_of(parent, number, share=0.9) for number in range(3))]
    sequences += [make_sequence(0, sample, reward=0.0, turns=1) for sample in (1, 2)]
    batch = batch_of(sequences)
    family = [m for m in batch.sequences if m.sequence.trajectory_id.startswith("0.0")]
    fork_point = common_prefix(family)
    assert fork_point > 100
    micros = cut(batch.sequences, max_tokens=2048, packing=packing)
    assert sum(micro.num_shared for micro in micros) >= 3 * fork_point
    given = family[1].sequence
    assert not given.loss_mask[:fork_point].any()
    assert batch.num_loss_tokens == sum(int(s.loss_mask.sum()) for s in sequences)
    assert sorted(np.concatenate([m.flat for m in micros])) == list(range(batch.num_loss_tokens))


def test_short_prefixes_are_not_shared() -> None:
    sequences = [make_sequence(0, sample, reward=float(sample), system=2) for sample in range(2)]
    [micro] = cut(batch_of(sequences).sequences, max_tokens=2048)
    assert len(micro.prefix) == 0
    assert micro.num_shared == 0


def test_forks_are_dealt_with_their_family() -> None:
    sequences = make_batch(groups=4)
    parent, lost = sequences[0], sequences[5]
    forks = [fork_of(parent), fork_of(lost, 0), fork_of(lost, 1)]
    nested = dataclasses.replace(forks[0], trajectory_id="0.0.0/f0/f0", parent=forks[0].trajectory_id)
    batch = batch_of([*(s for s in sequences if s is not lost), *forks, nested])
    for seed in range(5):
        hands = deal(batch, minibatches=4, seed=seed, update=1, epoch=0)
        ids = [{m.sequence.trajectory_id for m in hand} for hand in hands]
        assert sum(map(len, ids)) == len(batch.owners)
        for together in ({parent.trajectory_id, forks[0].trajectory_id, nested.trajectory_id},
                         {forks[1].trajectory_id, forks[2].trajectory_id}):  # fmt: skip
            assert any(together <= hand for hand in ids)


def test_a_sequence_beyond_the_budget_is_refused() -> None:
    batch = batch_of(make_batch())
    with pytest.raises(LearnerError, match="micro_batch_tokens"):
        cut(batch.sequences, max_tokens=8)


@BOTH
def test_a_sequence_as_long_as_the_budget_is_a_pass_of_its_own(packing) -> None:
    batch = batch_of(make_batch())
    longest = max(m.num_inputs for m in batch.sequences)
    assert longest % PADDING_MULTIPLE, "rounding up must go beyond the budget"
    passes = cut(batch.sequences, max_tokens=longest, packing=packing)
    assert max(len(micro.prefix) + micro.tokens.shape[1] for micro in passes) == longest
    assert sum(len(micro.flat) for micro in passes) == batch.num_loss_tokens
