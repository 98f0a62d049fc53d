"""From values to advantages and returns: every estimate against a loop that knows nothing of pieces."""

import dataclasses
import random

import numpy as np
import pytest
from learner_cases import make_sequence

from hotpot.experience import Cutting, TrainingSequence, cut_sequence
from hotpot.learner.batches.states import PieceStates, estimate, piece_states


def long_sequence(seed: int = 0, *, truncated: bool = False, rewards: bool = True) -> TrainingSequence:
    """About 150 tokens in runs of sampled ones, with a reward on the last token of every run."""
    whole = make_sequence(seed=seed, turns=20, reward=2.0)
    ends = whole.loss_mask & ~np.append(whole.loss_mask[1:], False)
    earned = np.where(ends, np.random.default_rng(seed).normal(size=len(ends)), 0.0)
    return dataclasses.replace(
        whole,
        truncated=truncated,
        rewards=earned if rewards else None,
        reward=float(earned.sum()) if rewards else 2.0,
    )


def random_values(states: list[PieceStates], seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=state.num_values) for state in states]


def runs_of(mask: np.ndarray) -> list[list[int]]:
    found: list[list[int]] = []
    for place in np.flatnonzero(mask).tolist():
        if found and found[-1][-1] == place - 1:
            found[-1].append(place)
        else:
            found.append([place])
    return found


@pytest.mark.parametrize("level", ["token", "step"])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("rewards", [False, True])
def test_a_whole_trajectory_equals_the_recursion_written_down(level, truncated: bool, rewards: bool) -> None:
    whole, gamma, lam = long_sequence(truncated=truncated, rewards=rewards), 0.97, 0.9
    [state] = states = piece_states([whole], level)
    [values] = random_values(states)
    assert state.num_values == whole.loss_mask.sum() + truncated
    found = estimate(states, [values], discount=gamma, gae_lambda=lam)[state.key]
    value_at = dict(zip(state.places.tolist(), values, strict=False))
    decisions = runs_of(whole.loss_mask)
    if level == "token":
        decisions = [[place] for run in decisions for place in run]
    earned = [whole.rewards[run].sum() if rewards else 0.0 for run in decisions]
    if not rewards:
        earned[-1] = whole.reward
    following, carried, gains, targets = float(values[-1]) if truncated else 0.0, 0.0, {}, {}
    for run, reward in zip(reversed(decisions), reversed(earned), strict=True):
        carried = reward + gamma * following - value_at[run[0]] + gamma * lam * carried
        following = value_at[run[0]]
        gains |= dict.fromkeys(run, carried)
        targets |= dict.fromkeys(run, carried + following)
    assert found.advantages == pytest.approx([gains[place] for place in state.places.tolist()])
    assert found.returns == pytest.approx([targets[place] for place in state.places.tolist()])
    assert found.values.tolist() == values[: len(state.places)].tolist()


@pytest.mark.parametrize("level", ["token", "step"])
@pytest.mark.parametrize("overlap", [0, 24])
def test_pieces_cover_their_context_too_and_meet_at_the_bootstrapped_value(level, overlap: int) -> None:
    whole = long_sequence(truncated=True)
    pieces = cut_sequence(whole, Cutting(segment_tokens=64, overlap=overlap))
    assert len(pieces) > 2
    states = piece_states(random.Random(0).sample(pieces, len(pieces)), level)
    assert [state.final for state in states] == [False] * (len(states) - 1) + [True]
    for state in states:
        inside = slice(state.piece.begin + 1, state.piece.begin + len(state.piece.tokens))
        actions = np.flatnonzero(whole.loss_mask[inside]) + 1
        assert state.places.tolist() == actions.tolist()
    values = random_values(states)
    found = estimate(states, values, discount=1.0, gae_lambda=1.0)
    # Without discount a piece's first return is what its decisions earned, and the value where it was cut.
    number_of = {}
    for state in states:
        for place, decision in zip((state.places + state.piece.begin).tolist(), state.decisions, strict=True):
            number_of[place] = int(decision)
    earned = np.zeros(max(number_of.values()) + 1)
    for place, decision in number_of.items():
        earned[decision] += whole.rewards[place]
    for state, value in zip(states, values, strict=True):
        last = int(state.decisions[-1])
        if last + 1 < len(earned):
            owner, its = next((s, v) for s, v in zip(states, values, strict=True) if last + 1 in s.decisions)
            following = its[int(np.searchsorted(owner.decisions, last + 1))]
        else:
            following = value[-1]
        expected = earned[int(state.decisions[0]) : last + 1].sum() + following
        assert found[state.key].returns[0] == pytest.approx(expected)


def test_segments_are_one_trajectory_and_order_changes_nothing() -> None:
    parts = [
        dataclasses.replace(long_sequence(seed), segment=seed, rewards=None, reward=1.5, truncated=True)
        for seed in (0, 1)
    ]
    other = dataclasses.replace(make_sequence(1, 0, reward=0.5), truncated=False)
    one, two = (piece_states(order, "token") for order in ([*parts, other], [other, *reversed(parts)]))
    assert [state.key for state in one] == [state.key for state in two]
    assert one[1].decisions[0] == one[0].decisions[-1] + 1
    assert [state.final for state in one] == [False, True, False]
    values = random_values(one)
    found = estimate(one, values, discount=1.0, gae_lambda=1.0)
    # The first segment is cut off at the second: only its first value crosses.
    assert found[one[0].key].returns[0] == pytest.approx(values[1][0])
    assert found[one[1].key].returns[0] == pytest.approx(1.5 + values[1][-1])
    assert found[one[2].key].returns.tolist() == pytest.approx([0.5] * int(other.loss_mask.sum()))


def test_a_trajectory_without_sampled_tokens_has_no_estimates() -> None:
    empty = dataclasses.replace(make_sequence(), loss_mask=np.zeros_like(make_sequence().loss_mask))
    [state] = states = piece_states([empty], "step")
    assert len(estimate(states, [np.zeros(0)], discount=1.0, gae_lambda=1.0)[state.key].advantages) == 0


def test_what_stands_under_the_mask_changes_nothing_by_a_bit() -> None:
    whole = long_sequence(truncated=True)
    spoilt = dataclasses.replace(whole, rewards=np.where(whole.loss_mask, whole.rewards, np.nan))
    found = []
    for one in (whole, spoilt):
        states = piece_states(cut_sequence(one, Cutting(segment_tokens=64, overlap=24)), "step")
        estimates = estimate(states, random_values(states), discount=0.9, gae_lambda=0.8)
        found.append(b"".join(e.advantages.tobytes() + e.returns.tobytes() for e in estimates.values()))
    assert found[0] == found[1]
