"""Scales: against loops, state in and out, no rounding blown up."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.learner.estimators.advantages import Baseline, Member, group_advantages
from hotpot.learner.estimators.normalization import Moments, Normalization, normalize
from hotpot.learner.update.shaping import RunningScales

WAYS: tuple[Normalization, ...] = ("group", "batch", "running")
BASELINES: tuple[Baseline, ...] = ("group_mean", "group_normalized", "rloo", "reinforce_pp")


def by_loops(values: list[float]) -> list[float]:
    known = [value for value in values if math.isfinite(value)]
    mean = sum(known) / len(known)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in known) / len(known))
    return [(value - mean) / deviation for value in values]


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(3, 40))
@settings(deadline=None)
def test_each_way_against_loops(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    values, groups = rng.normal(3, 5, size), rng.integers(0, 3, size)
    batch, _ = normalize(values, "batch", groups=groups)
    assert batch.tolist() == pytest.approx(by_loops(values.tolist()))
    within, _ = normalize(values, "group", groups=groups)
    for group in set(groups.tolist()):
        inside = values[groups == group].tolist()
        assert within[groups == group].tolist() == pytest.approx(
            by_loops(inside) if len(inside) > 1 else [0.0]
        )


@given(seed=st.integers(0, 2**32 - 1), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6))
@settings(deadline=None)
def test_running_moments_are_those_of_all_values_so_far(seed: int, cuts: list[int]) -> None:
    rng = np.random.default_rng(seed)
    state, seen = Moments(), []
    for size in cuts:
        values = rng.normal(-2, 4, size)
        seen += values.tolist()
        # As if the run had been stopped and taken up again before each batch.
        kept = RunningScales.from_dict(json.loads(json.dumps(RunningScales(reward=state).to_dict())))
        found, state = normalize(values, "running", groups=np.zeros(size, np.int64), state=kept.reward)
        assert state.count == len(seen)
        assert state.mean == pytest.approx(np.mean(seen))
        assert state.deviation == pytest.approx(np.std(seen), abs=1e-12)
        assert (state.lowest, state.highest) == (min(seen), max(seen))
        if len(seen) > 1:
            assert found.tolist() == pytest.approx(by_loops(seen)[-size:])


def test_what_does_not_count_is_scaled_and_leaves_the_state() -> None:
    values = np.array([1.0, 3.0, 100.0])
    found, state = normalize(
        values, "running", groups=np.zeros(3, np.int64), counted=np.array([True, True, False])
    )
    assert state == Moments(count=2, mean=2.0, squares=2.0, lowest=1.0, highest=3.0)
    assert found.tolist() == [-1.0, 1.0, 98.0]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("poison", [math.inf, -math.inf])
def test_what_stands_in_place_of_a_number_changes_no_other_by_a_bit(
    how: Normalization, poison: float
) -> None:
    values, groups = np.random.default_rng(1).normal(size=9), np.arange(9) % 2
    results = []
    for absent in (math.nan, poison):
        values[4] = absent
        found, state = normalize(values, how, groups=groups)
        results.append((np.delete(found, 4).tolist(), state))
    assert not math.isfinite(found[4])
    assert results[0] == results[1]
    kept = [value for place, value in enumerate(values.tolist()) if place != 4 and groups[place] == 1]
    if how == "group":
        assert found[groups == 1].tolist() == pytest.approx(by_loops(kept))


# Degenerate: one value, all equal, equal up to rounding of float32 at any magnitude, nothing finite.
ALMOST_EQUAL = st.builds(
    lambda centre, steps: [float(np.float32(centre)) + step * abs(centre) * 1e-7 for step in steps],
    st.floats(-1e6, 1e6),
    st.lists(st.integers(-4, 4), min_size=1, max_size=12),
)


@given(values=st.one_of(ALMOST_EQUAL, st.lists(st.sampled_from([math.nan, math.inf]), max_size=4)))
@settings(deadline=None)
def test_values_that_differ_by_rounding_have_no_scale(values: list[float]) -> None:
    array = np.array(values, dtype=np.float64)
    for how in WAYS:
        found, _ = normalize(array, how, groups=np.zeros(len(values), np.int64))
        assert not np.nan_to_num(found, posinf=0, neginf=0).any()


@given(values=ALMOST_EQUAL, baseline=st.sampled_from(BASELINES))
@settings(deadline=None)
def test_groups_that_differ_by_rounding_have_no_advantage(values: list[float], baseline: Baseline) -> None:
    members = [
        Member(trajectory_id=f"0.{n}.0", group_id="g0", reward=value) for n, value in enumerate(values)
    ]
    found = group_advantages(members, baseline)
    assert not found.kept
    assert set(found.by_trajectory.values()) == {0.0}


@given(
    values=st.lists(st.one_of(st.floats(-1e6, 1e6), st.floats(-1e-5, 1e-5)), min_size=1, max_size=30),
    how=st.sampled_from(WAYS),
)
@settings(deadline=None)
def test_no_value_is_blown_up(values: list[float], how: Normalization) -> None:
    found, _ = normalize(np.array(values), how, groups=np.arange(len(values)) % 3)
    assert np.abs(found).max() <= math.sqrt(len(values)) + 1e-6


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=9))
@settings(deadline=None)
def test_no_normalised_advantage_is_blown_up(values: list[float]) -> None:
    members = [
        Member(trajectory_id=f"0.{n}.0", group_id="g0", reward=value) for n, value in enumerate(values)
    ]
    found = group_advantages(members, "group_normalized").by_trajectory.values()
    assert max(map(abs, found)) <= math.sqrt(len(values))
