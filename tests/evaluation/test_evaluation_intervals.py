import math
from itertools import pairwise
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotpot.evaluation import independent_difference, paired_difference, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # Newcombe 1998 (Statistics in Medicine 17, 857-872), table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_against_published_values(successes: int, trials: int, low: float, high: float) -> None:
    interval = wilson(successes, trials)
    assert interval.estimate == successes / trials
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


@given(st.integers(1, 2000), st.data())
def test_wilson_ends_solve_the_score_equation(trials: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, trials))
    interval = wilson(successes, trials)
    assert 0 <= interval.low <= interval.estimate <= interval.high <= 1
    for end in (interval.low, interval.high):
        if 0 < end < 1:
            z = (interval.estimate - end) / math.sqrt(end * (1 - end) / trials)
            assert abs(z) == pytest.approx(1.959964, abs=1e-4)
    mirrored = wilson(trials - successes, trials)
    assert mirrored.low == pytest.approx(1 - interval.high)


def test_wilson_covers_about_as_often_as_it_says() -> None:
    trials, share = 128, 0.9
    intervals = [wilson(k, trials) for k in range(trials + 1)]
    covered = sum(
        comb(trials, k) * share**k * (1 - share) ** (trials - k)
        for k, interval in enumerate(intervals)
        if interval.low <= share <= interval.high
    )
    assert 0.92 < covered < 0.98


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (-1, 5), (6, 5)])
def test_what_is_no_share_is_refused(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="no share"):
        wilson(successes, trials)


def test_confidence_widens_the_interval() -> None:
    widths = [wilson(5, 20, confidence=c).high - wilson(5, 20, confidence=c).low for c in (0.5, 0.9, 0.99)]
    assert all(a < b for a, b in pairwise(widths))
    with pytest.raises(ValueError, match="confidence"):
        wilson(5, 20, confidence=95.0)


def test_independent_difference_against_published_values() -> None:
    # Newcombe 1998 (Statistics in Medicine 17, 873-890), table II, method 10: 56/70 - 48/80 and 9/10 - 3/10.
    for first, second, low, high in [
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
    ]:
        interval = independent_difference(first, second)
        assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


def make_pairs(both: int, won: int, lost: int, neither: int) -> tuple[dict[str, bool], dict[str, bool]]:
    cells = (
        [(True, True)] * both + [(False, True)] * won + [(True, False)] * lost + [(False, False)] * neither
    )
    return {f"t{i}": b for i, (b, _) in enumerate(cells)}, {f"t{i}": a for i, (_, a) in enumerate(cells)}


def test_paired_difference_by_hand() -> None:
    interval = paired_difference(*make_pairs(10, 30, 4, 20))
    centre = (30.5 - 4.5) / 66
    half = 1.959964 * math.sqrt(30.5 + 4.5 - (30.5 - 4.5) ** 2 / 66) / 66
    assert interval.estimate == pytest.approx(26 / 64)
    assert interval.low == pytest.approx(centre - half, abs=1e-6)
    assert interval.high == pytest.approx(centre + half, abs=1e-6)


def test_paired_difference_covers_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(1000):
        won, lost, both, neither = random.multinomial(60, [0.3, 0.1, 0.3, 0.3])
        interval = paired_difference(*make_pairs(both, won, lost, neither))
        covered += interval.low <= 0.2 <= interval.high
    assert 925 <= covered <= 980


def test_paired_difference_matches_tasks_by_id() -> None:
    before, after = make_pairs(3, 5, 1, 2)
    shuffled = dict(reversed(after.items()))
    assert paired_difference(before, shuffled) == paired_difference(before, after)
    assert paired_difference({**before, "only": True}, {**after, "other": False}) == paired_difference(
        before, after
    )
    with pytest.raises(ValueError, match="no task is in both"):
        paired_difference({"a": True}, {"b": True})
