import dataclasses
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import batch_of, make_batch, make_decoder

from hotpot.config.sections import LearnerSection
from hotpot.learner import Learner
from hotpot.learner.batches import passes
from hotpot.learner.faults.culprits import MAX_SEARCHED, Suspects, TokenValues, blame, find
from hotpot.learner.faults.findings import MAX_SEQUENCES, MAX_TOKENS, Finding
from hotpot.learner.faults.norm_watch import MIN_NORMS, WINDOW, NormWatch
from hotpot.learner.update import steps
from hotpot.models import checksum


def make_learner(decoder=None, **settings) -> Learner:
    section = LearnerSection(**{"learning_rate": 1e-3, "minibatches": 1, **settings})
    return Learner(decoder or make_decoder(), section, total_updates=10, seed=0, temperature=1.0)


def only_finding(result) -> Finding:
    (found,) = [step.finding for step in result.steps if step.finding is not None]
    return found


def spoil_logits(monkeypatch: pytest.MonkeyPatch, trajectory: str, place: int) -> None:
    """Let the model give NaN for the ``place``-th loss token of one trajectory, wherever it stands in a pass."""
    (member,) = [m for m in batch_of(make_batch()).sequences if m.sequence.trajectory_id == trajectory]
    real = steps.score

    def score(decoder, micro, **keywords):
        scores = real(decoder, micro, **keywords)
        bad = torch.from_numpy(micro.flat == member.start + place)
        return dataclasses.replace(scores, logprobs=scores.logprobs.masked_fill(bad, math.nan))

    monkeypatch.setattr(steps, "score", score)


def test_nan_in_the_logits_of_one_token_names_that_token(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = make_batch()
    sequence = next(s for s in sequences if s.trajectory_id == "1.2.0")
    spoil_logits(monkeypatch, "1.2.0", 3)
    learner = make_learner()
    before = checksum(learner.weights())
    result = learner.update(sequences, update=1, policy_version=3)
    found = only_finding(result)
    assert (found.reason, found.skipped, found.trajectories) == ("non_finite_loss", True, ("1.2.0",))
    (token,) = found.tokens
    position = int(np.flatnonzero(sequence.loss_mask)[3])
    assert (token.trajectory_id, token.segment, token.position) == ("1.2.0", 0, position)
    assert token.token == sequence.tokens[position]
    assert (token.term, token.cause) == ("policy", "new_logprob")
    assert math.isnan(token.new_logprob)
    assert math.isnan(token.loss)
    assert token.old_logprob == sequence.behaviour_logprobs[position]
    assert checksum(learner.weights()) == before
    (kept,) = found.sequences
    assert kept.tokens.tolist() == sequence.tokens.tolist()
    assert np.flatnonzero(~np.isfinite(kept.new_logprobs)).tolist() == [position]
    assert np.array_equal(kept.loss_mask.astype(bool), sequence.loss_mask)
    assert np.allclose(kept.old_logprobs[sequence.loss_mask], sequence.behaviour_logprobs[sequence.loss_mask])
    assert set(kept.advantages[sequence.loss_mask]) == {-0.5}


def poison_gradient(monkeypatch: pytest.MonkeyPatch, *trajectories: str, by: float = math.inf) -> None:
    """Multiply the gradient (never the loss) that flows back through the tokens of ``trajectories``."""
    bad = {
        flat
        for m in batch_of(make_batch()).sequences
        if m.sequence.trajectory_id in trajectories
        for flat in range(m.start, m.stop)
    }
    real = steps.score

    def score(decoder, micro, **keywords):
        scores = real(decoder, micro, **keywords)
        if scores.logprobs.requires_grad:
            factor = torch.tensor([by if flat in bad else 1.0 for flat in micro.flat.tolist()])
            scores.logprobs.register_hook(lambda gradient: gradient * factor)
        return scores

    monkeypatch.setattr(steps, "score", score)


@pytest.mark.parametrize("micro_batch_tokens", [96, 4096])
def test_an_infinite_gradient_names_the_trajectories_it_came_by(
    monkeypatch: pytest.MonkeyPatch, micro_batch_tokens: int
) -> None:
    monkeypatch.setattr(passes, "PASS_TOKENS", micro_batch_tokens)
    poison_gradient(monkeypatch, "0.1.0", "2.3.0")
    learner = make_learner(micro_batch_tokens=micro_batch_tokens)
    before = checksum(learner.weights())
    found = only_finding(learner.update(make_batch(), update=1, policy_version=3))
    assert (found.reason, found.skipped) == ("non_finite_gradient", True)
    assert set(found.trajectories) == {"0.1.0", "2.3.0"}
    assert not np.isfinite(found.norms).any()
    assert found.passes
    assert (found.tokens, found.num_tokens) == ((), 0)
    assert {kept.trajectory_id for kept in found.sequences} == {"0.1.0", "2.3.0"}
    assert checksum(learner.weights()) == before
    assert all(p.grad is None for p in learner.decoder.parameters())


@pytest.mark.parametrize("skip", [False, True])
def test_an_exploding_norm_is_recorded_and_skipped_where_asked(
    monkeypatch: pytest.MonkeyPatch, skip: bool
) -> None:
    calm, wild = (make_learner(skip_exploding=skip) for _ in range(2))
    for learner in (calm, wild):
        for update in range(1, MIN_NORMS + 1):
            assert not [
                s for s in learner.update(make_batch(), update=update, policy_version=3).steps if s.finding
            ]
    norms = wild.update(make_batch(), update=90, policy_version=3).grad_norms
    calm.update(make_batch(), update=90, policy_version=3)
    poison_gradient(monkeypatch, "1.1.0", by=1e4)
    before = checksum(wild.weights())
    result = wild.update(make_batch(), update=91, policy_version=3)
    found = only_finding(result)
    assert (found.reason, found.skipped) == ("exploding_gradient", skip)
    assert found.trajectories == ("1.1.0",)
    assert found.grad_norm == pytest.approx(found.norms[0], rel=1e-2)
    assert found.grad_norm > 10 * found.median_norm
    assert found.median_norm == pytest.approx(float(norms[0]), rel=0.5)
    assert result.skipped_steps == int(skip)
    assert (checksum(wild.weights()) == before) is skip


def test_finding_out_changes_nothing_of_a_step_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for ratio in (0.0, 1.5):
        learner = make_learner(max_grad_norm_ratio=ratio)
        learner._watch.recall([1e-6] * MIN_NORMS)
        result = learner.update(make_batch(), update=1, policy_version=3)
        assert bool([s for s in result.steps if s.finding]) is (ratio > 0)
        weights.append(checksum(learner.weights()))
    assert weights[0] == weights[1]


def suspects_of(norms: dict[str, float], passes: int) -> tuple[Suspects, TokenValues]:
    batch = batch_of(make_batch())
    members = batch.sequences
    size = math.ceil(len(members) / passes)

    def norm_of(part) -> float:
        return math.hypot(*(norms[m.sequence.trajectory_id] for m in part))

    suspects = Suspects(
        members=members,
        passes=[members[at : at + size] for at in range(0, len(members), size)],
        norm_of=norm_of,
    )
    zeros = np.zeros(batch.num_loss_tokens)
    return suspects, TokenValues(old=zeros, new=zeros, advantages=zeros, losses=zeros, reference=None)


@given(st.sets(st.integers(0, 11), min_size=1), st.integers(1, 12))
@settings(deadline=None)
def test_the_search_finds_exactly_the_guilty(guilty: set[int], passes: int) -> None:
    names = [m.sequence.trajectory_id for m in batch_of(make_batch()).sequences]
    norms = {name: math.nan if at in guilty else 0.1 for at, name in enumerate(names)}
    suspects, values = suspects_of(norms, passes)
    found = find(suspects, values, [], math.nan, watch=NormWatch(10), skip_exploding=False)
    assert set(found.trajectories) == {names[at] for at in guilty}
    assert {name for number in found.passes for name in
            (m.sequence.trajectory_id for m in suspects.passes[number])} >= set(found.trajectories)  # fmt: skip


def test_where_nobody_is_guilty_alone_all_are_named_the_largest_first() -> None:
    names = [m.sequence.trajectory_id for m in batch_of(make_batch()).sequences]
    suspects, values = suspects_of({name: float(at) for at, name in enumerate(names)}, passes=3)
    found = find(suspects, values, [], math.inf, watch=NormWatch(10), skip_exploding=False)
    assert found.passes == ()
    assert found.trajectories == tuple(reversed(names))


def test_the_search_is_bounded() -> None:
    members = batch_of(make_batch(groups=20, samples=8)).sequences
    asked: list[int] = []
    suspects = Suspects(
        members=members,
        passes=[members[at : at + 16] for at in range(0, len(members), 16)],
        norm_of=lambda part: asked.append(len(part)) or math.nan,
    )
    zeros = np.zeros(members[-1].stop)
    values = TokenValues(old=zeros, new=zeros, advantages=zeros, losses=zeros, reference=None)
    found = find(suspects, values, [], math.nan, watch=NormWatch(10), skip_exploding=False)
    assert len(asked) == 10 + MAX_SEARCHED
    assert len(found.trajectories) == MAX_SEARCHED
    assert len(found.passes) == 10


def test_what_is_named_and_kept_is_bounded() -> None:
    batch = batch_of(make_batch(groups=8, samples=8))
    broken = list(range(batch.num_loss_tokens))
    bad = np.full(batch.num_loss_tokens, math.nan)
    values = TokenValues(old=bad, new=bad, advantages=bad, losses=bad, reference=None)
    suspects = Suspects(members=batch.sequences, passes=[batch.sequences], norm_of=lambda _: math.nan)
    found = find(suspects, values, broken, math.nan, watch=NormWatch(10), skip_exploding=False)
    assert len(found.tokens) == MAX_TOKENS
    assert len(found.sequences) == MAX_SEQUENCES
    assert found.num_tokens == batch.num_loss_tokens
    assert len(found.trajectories) == 64


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((math.nan, -1.0, 1.0, None), ("policy", "new_logprob")),
        ((-1.0, -math.inf, 1.0, None), ("policy", "old_logprob")),
        ((-1.0, -1.0, math.inf, None), ("policy", "advantage")),
        ((0.0, -1000.0, 1.0, None), ("policy", "overflow")),
        ((-1.0, -1.0, 1.0, math.nan), ("kl", "reference_logprob")),
        ((-1000.0, -1000.0, 1.0, 0.0), ("kl", "overflow")),
        ((-1.0, -1.0, 1.0, -1.0), ("other", "overflow")),
    ],
)
def test_blame(values: tuple[float, float, float, float | None], expected: tuple[str, str]) -> None:
    assert blame(*values) == expected


@given(st.lists(st.floats(1e-3, 1e3), max_size=2 * WINDOW), st.floats(1.1, 20.0))
@settings(deadline=None)
def test_the_watch_is_the_median_of_the_last_norms(norms: list[float], ratio: float) -> None:
    watch, recalled = NormWatch(ratio), NormWatch(ratio)
    for norm in norms:
        watch.observe(norm)
    recalled.recall(norms)
    if len(norms) < MIN_NORMS:
        assert math.isnan(watch.median)
        assert not watch.exploding(1e30)
        return
    median = statistics.median(norms[-WINDOW:])
    assert watch.median == recalled.median == median
    assert watch.exploding(ratio * median * 1.001)
    assert not watch.exploding(ratio * median * 0.999)
    assert not NormWatch(0).exploding(1e30)
