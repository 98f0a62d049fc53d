"""Jumps in curves: intervals that cover, and a planted change that is found among changes that did nothing."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.observability.jumps import (
    as_normal,
    difference,
    jump,
    mean_interval,
    student,
    threshold,
    window,
    window_width,
)


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423), (1000, 1.9623)]
)
def test_students_quantile_as_in_the_tables(degrees, quantile) -> None:
    assert student(degrees) == pytest.approx(quantile, rel=0.02)
    assert as_normal(student(degrees), degrees) == pytest.approx(1.95996, rel=1e-4)


def test_welch_by_hand() -> None:
    # Means 2 and 5, variances 1 and 4, three and four observations.
    before, after = [1.0, 2.0, 3.0], [3.0, 4.0, 6.0, 7.0]
    found = difference(before, after)
    assert found.mean == 3.0
    one, two = 1 / 3, np.var(after, ddof=1) / 4
    degrees = (one + two) ** 2 / (one**2 / 2 + two**2 / 3)
    assert found.high - found.mean == pytest.approx(student(degrees) * math.sqrt(one + two))
    assert difference([], [1.0]) is None
    assert difference([1.0], [2.0, 3.0]).low is None
    assert mean_interval([]) is None
    assert mean_interval([2.0, 2.0]).low == 2.0


def test_intervals_cover_what_they_say() -> None:
    random = np.random.default_rng(1)
    hits = sum(
        found.low <= 1.0 <= found.high
        for _ in range(1000)
        for found in [difference(random.normal(0, 1, 8), random.normal(1, 2, 12))]
    )
    assert 930 <= hits <= 972


@given(place=st.integers(1, 500), behind=st.integers(0, 500), width=st.integers(1, 200))
def test_a_window_lies_around_its_place_as_far_before_as_behind(place, behind, width) -> None:
    count = place + behind
    begin, end = window(place, count, width)
    assert 0 <= begin < place <= end <= count
    assert place - begin <= width
    assert end - place <= width
    if min(place, behind) >= 24:
        assert place - begin == end - place


def test_a_steady_rise_has_no_jump_and_a_step_on_it_has_its_size() -> None:
    random = np.random.default_rng(0)
    rise = np.linspace(0, 1, 80)
    new = np.arange(80) >= 40
    scores = [jump(rise + random.normal(0, 0.2, 80), new).score for _ in range(200)]
    assert np.mean(np.array(scores) > 1.96) == pytest.approx(0.05, abs=0.04)
    found = jump(rise - 0.5 * new + random.normal(0, 0.01, 80), new)
    assert found.low <= -0.5 <= found.high
    assert found.score > 10
    assert abs(found.effect) == pytest.approx(50, rel=0.5)


def test_two_changes_at_one_place_cannot_be_told_apart_and_near_ones_are_not_charged_with_each_other() -> (
    None
):
    random = np.random.default_rng(0)
    new = np.arange(60) >= 30
    values = random.normal(0, 0.1, 60) + (np.arange(60) >= 38)
    assert jump(values, new, [30]) is None
    assert jump(values, new).score > jump(values, new, [38]).score
    assert jump(values, new, [38]).score < 3
    assert jump(np.zeros(5), np.arange(5) >= 3) is None
    still = jump(np.zeros(40), np.arange(40) >= 20)
    assert (still.size, still.score) == (0.0, 0.0)


def test_of_many_jumps_of_noise_the_largest_passes_the_threshold_once_in_twenty_runs() -> None:
    random = np.random.default_rng(2)
    passed = 0
    for _ in range(300):
        values = random.normal(0, 1, 200)
        places = range(20, 180, 8)
        scores = [jump(values[p - 20 : p + 20], np.arange(40) >= 20).score for p in places]
        passed += max(scores) > threshold(len(scores))
    assert passed / 300 <= 0.08


@settings(deadline=None)
@given(num_groups=st.integers(0, 100_000))
def test_width_is_a_quarter_within_limits(num_groups) -> None:
    assert 24 <= window_width(num_groups) <= 64
