"""Generalised advantages over pieces, and one estimate out of several windows', against brute force."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.errors import LearnerError
from hotpot.experience import Cutting, TrainingSequence, cut_sequence
from hotpot.learner.estimators.gae import PieceValues, gae
from hotpot.learner.estimators.merging import Merge, WindowEstimates, merge_estimates, own_advantages

METHODS = ("mean", "nearest_centre", "last")


@dataclasses.dataclass
class Case:
    rewards: np.ndarray
    pieces: list[PieceValues]
    gamma: float
    lam: float
    final_value: float

    def advantages(self, **changes) -> list[np.ndarray]:
        c = dataclasses.replace(self, **changes)
        return gae(c.rewards, c.pieces, gamma=c.gamma, lam=c.lam, final_value=c.final_value)


@st.composite
def cases(draw: st.DrawFn, *, overlapping: bool = True) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    pieces, end, begin = [], 0, 0
    for _ in range(draw(st.integers(1, 6))):
        back = draw(st.integers(0, end - begin)) if overlapping else 0
        begin = end - back
        size = back + draw(st.integers(1, 8))
        pieces.append(PieceValues(first=end - back, values=rng.normal(size=size)))
        end += size - back
    unit = st.floats(0, 1)
    return Case(rng.normal(size=end), pieces, draw(unit), draw(unit), draw(st.sampled_from([0.0, 1.7])))


def owner_value(case: Case, number: int) -> float:
    if number == len(case.rewards):
        return case.final_value
    for piece in case.pieces:
        if piece.first <= number < piece.first + len(piece.values):
            return float(piece.values[number - piece.first])
    raise AssertionError(number)


@given(case=cases())
@settings(max_examples=150, deadline=None)
def test_advantages_are_discounted_sums_of_the_piece_s_own_errors(case: Case) -> None:
    for piece, found in zip(case.pieces, case.advantages(), strict=True):
        errors = []
        for offset, value in enumerate(piece.values):
            number = piece.first + offset
            last = offset == len(piece.values) - 1
            following = owner_value(case, number + 1) if last else piece.values[offset + 1]
            errors.append(case.rewards[number] + case.gamma * following - value)
        expected = [
            sum((case.gamma * case.lam) ** (later - now) * errors[later] for later in range(now, len(errors)))
            for now in range(len(errors))
        ]
        np.testing.assert_allclose(found, expected, atol=1e-12)


@given(case=cases(overlapping=False), data=st.data())
@settings(max_examples=150, deadline=None)
def test_nothing_leaks_into_another_piece_but_the_bootstrapped_value(case: Case, data: st.DataObject) -> None:
    chosen = data.draw(st.integers(0, len(case.pieces) - 1))
    piece = case.pieces[chosen]
    rewards = case.rewards.copy()
    rewards[piece.first : piece.stop] += 5.0
    values = piece.values + 3.0
    values[0] = piece.values[0]  # the one value that the piece before it may see
    pieces = [*case.pieces[:chosen], dataclasses.replace(piece, values=values), *case.pieces[chosen + 1 :]]
    before, after = case.advantages(), case.advantages(rewards=rewards, pieces=pieces)
    for number, (one, two) in enumerate(zip(before, after, strict=True)):
        assert np.array_equal(one, two) == (number != chosen)
    # And through that value only the piece right before it moves.
    values = piece.values.copy()
    values[0] += 1.0
    pieces = [*case.pieces[:chosen], dataclasses.replace(piece, values=values), *case.pieces[chosen + 1 :]]
    for number, (one, two) in enumerate(zip(before, case.advantages(pieces=pieces), strict=True)):
        if number not in (chosen - 1, chosen):
            assert np.array_equal(one, two)
        elif number == chosen - 1 and case.gamma > 0:
            assert two[-1] - one[-1] == pytest.approx(case.gamma)


def test_the_end_of_a_trajectory_is_terminal_unless_a_limit_cut_it() -> None:
    piece = [PieceValues(first=0, values=np.array([0.5]))]
    assert gae(np.array([1.0]), piece, gamma=0.9, lam=0.9)[0] == pytest.approx(0.5)
    assert gae(np.array([1.0]), piece, gamma=0.9, lam=0.9, final_value=2.0)[0] == pytest.approx(2.3)


def test_one_piece_without_discount_gives_returns_minus_values() -> None:
    values, rewards = np.array([0.1, -0.2, 0.4]), np.array([0.0, 1.0, 2.0])
    [found] = gae(rewards, [PieceValues(first=0, values=values)], gamma=1.0, lam=1.0)
    np.testing.assert_allclose(found, np.array([3.0, 3.0, 2.0]) - values)


@pytest.mark.parametrize("spans", [[(0, 2)], [(1, 3)], [(0, 1), (2, 2)], []])
def test_a_token_in_no_piece_is_an_error(spans) -> None:
    pieces = [PieceValues(first=first, values=np.zeros(size)) for first, size in spans]
    with pytest.raises(LearnerError, match="action tokens"):
        gae(np.zeros(4), pieces, gamma=1.0, lam=1.0)


def windows_of(rng, *, size: int, width: int, stride: int) -> tuple[np.ndarray, list[WindowEstimates]]:
    places = np.sort(rng.choice(size, size // 2, replace=False))
    windows = []
    for begin in range(0, max(size - width, 0) + stride, stride):
        first, stop = np.searchsorted(places, [begin, min(begin + width, size)])
        values = rng.normal(size=stop - first)
        windows.append(
            WindowEstimates(begin=begin, end=min(begin + width, size), first=int(first), values=values)
        )
    return places.astype(np.int64), windows


@given(seed=st.integers(0, 1000), size=st.integers(2, 60), width=st.integers(1, 30), share=st.floats(0.3, 1))
@settings(max_examples=120, deadline=None)
def test_merging_equals_brute_force(seed: int, size: int, width: int, share: float) -> None:
    places, windows = windows_of(
        np.random.default_rng(seed), size=size, width=width, stride=max(1, int(share * width))
    )
    found = {method: merge_estimates(windows, places, method) for method in METHODS}
    for number, place in enumerate(places):
        holders = [w for w in windows if w.begin <= place < w.end]
        estimates = [w.values[number - w.first] for w in holders]
        centre = min(holders, key=lambda w: (abs(place - (w.begin + w.end - 1) / 2), w.begin))
        assert found["mean"][number] == pytest.approx(np.mean(estimates))
        assert found["last"][number] == estimates[-1]
        assert found["nearest_centre"][number] == centre.values[number - centre.first]


@pytest.mark.parametrize("method", METHODS)
@given(value=st.floats(-1e6, 1e6), overlap=st.integers(0, 32))
@settings(max_examples=30, deadline=None)
def test_equal_estimates_stay_what_they_are_by_the_bit(method: Merge, value: float, overlap: int) -> None:
    mask = np.arange(500) % 5 > 0
    zeros = np.zeros(500, np.float32)
    whole = TrainingSequence(
        trajectory_id="0.0.0", group_id="g0", segment=0, tokens=np.zeros(500, np.int32), loss_mask=mask,
        behaviour_logprobs=zeros, model_logprobs=zeros, token_policy_version=np.zeros(500, np.int32), reward=0.0,
    )  # fmt: skip
    pieces = cut_sequence(whole, Cutting(segment_tokens=64, overlap=overlap))
    merged = own_advantages(pieces, lambda _, places: np.full(len(places), value), method)
    assert [len(m) for m in merged] == [int(p.loss_mask.sum()) for p in pieces]
    assert all((m == value).all() for m in merged)


def test_windows_are_asked_for_the_action_tokens_they_repeat_too() -> None:
    mask = np.ones(200, dtype=bool)
    mask[0] = False
    zeros = np.zeros(200, np.float32)
    whole = TrainingSequence(
        trajectory_id="0.0.0", group_id="g0", segment=0, tokens=np.arange(200, dtype=np.int32), loss_mask=mask,
        behaviour_logprobs=zeros, model_logprobs=zeros, token_policy_version=np.zeros(200, np.int32), reward=0.0,
    )  # fmt: skip
    pieces = cut_sequence(whole, Cutting(segment_tokens=64, overlap=32))
    asked: list[np.ndarray] = []

    def estimate(piece: TrainingSequence, places: np.ndarray) -> np.ndarray:
        asked.append(piece.begin + places)
        return np.full(len(places), float(piece.begin))

    merged = own_advantages(pieces, estimate, "last")
    for piece, places in zip(pieces, asked, strict=True):
        assert places.tolist() == list(range(piece.begin + 1, piece.begin + len(piece.tokens)))
    # The latest window that holds a token is a later one than its owner's, where there is one.
    assert (merged[0] == [p.begin if p.begin <= 63 else 0 for p in pieces if p.begin <= 63][-1]).any()
