"""Group-relative advantages: numbers by hand, groups by id, groups without signal."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotpot.errors import LearnerError
from hotpot.learner.estimators.advantages import Member, group_advantages
from hotpot.learner.order import natural_key


def members(**groups: list[float]) -> list[Member]:
    return [
        Member(trajectory_id=f"{group[1:]}.{index}.0", group_id=group, reward=reward)
        for group, rewards in groups.items()
        for index, reward in enumerate(rewards)
    ]


def test_group_mean_by_hand() -> None:
    result = group_advantages(members(g1=[1.0, 0.0, 0.0, 0.0]), "group_mean")
    assert result.by_trajectory == {"1.0.0": 0.75, "1.1.0": -0.25, "1.2.0": -0.25, "1.3.0": -0.25}
    (group,) = result.groups
    assert (group.size, group.reward_mean, group.kept, group.reason) == (4, 0.25, True, "")
    assert group.reward_std == pytest.approx(math.sqrt(3) / 4)  # population; the sample's would be 0.5


def test_group_normalized_by_hand() -> None:
    result = group_advantages(members(g1=[1.0, 0.0, 0.0, 0.0]), "group_normalized")
    assert result.by_trajectory["1.0.0"] == pytest.approx(math.sqrt(3))
    assert result.by_trajectory["1.1.0"] == pytest.approx(-1 / math.sqrt(3))


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=9))
def test_leave_one_out_by_loops(rewards: list[float]) -> None:
    result = group_advantages(members(g1=rewards, g2=[3.0, 4.0]), "rloo")
    for index, reward in enumerate(rewards):
        others = [other for place, other in enumerate(rewards) if place != index]
        expected = reward - sum(others) / len(others) if "g1" in result.kept else 0.0
        assert result.by_trajectory[f"1.{index}.0"] == pytest.approx(expected, abs=1e-9)


def test_without_a_baseline_groups_of_one_are_kept_and_equal_rewards_are_the_whole_batch_s() -> None:
    result = group_advantages(members(g1=[1.0], g2=[0.0, 0.0]), "reinforce_pp")
    assert result.by_trajectory == {"1.0.0": 1.0, "2.0.0": 0.0, "2.1.0": 0.0}
    assert result.kept == {"g1", "g2"}
    flat = group_advantages(members(g1=[0.1 + 0.2], g2=[0.3, 0.3]), "reinforce_pp")
    assert {group.reason for group in flat.groups} == {"equal_rewards"}
    broken = group_advantages(members(g1=[1.0], g2=[0.0, math.nan]), "reinforce_pp")
    assert [group.reason for group in broken.groups] == ["", "non_finite_reward"]


def test_penalties_are_compared_and_statistics_are_of_the_rewards() -> None:
    result = group_advantages(members(g1=[1.0, 1.0]), "group_mean", penalties={"1.0.0": 0.5})
    assert result.by_trajectory == {"1.0.0": -0.25, "1.1.0": 0.25}
    [group] = result.groups
    assert (group.reward_mean, group.reward_std, group.kept) == (1.0, 0.0, True)


@pytest.mark.parametrize("baseline", ["group_mean", "group_normalized", "rloo", "reinforce_pp"])
def test_groups_are_formed_by_id_whatever_the_order(baseline) -> None:
    everything = members(g1=[1.0, 0.0, 3.0], g2=[10.0, 20.0], g10=[5.0, 5.0, 5.0, 6.0])
    expected = group_advantages(everything, baseline)
    assert [group.group_id for group in expected.groups] == ["g1", "g2", "g10"]
    for seed in range(5):
        shuffled = random.Random(seed).sample(everything, len(everything))
        assert group_advantages(shuffled, baseline) == expected


def test_a_partial_group_does_not_shift_the_next_one() -> None:
    whole = group_advantages(members(g1=[1.0, 0.0, 1.0], g2=[4.0, 8.0, 6.0]), "group_mean")
    partial = group_advantages(members(g1=[1.0, 0.0], g2=[4.0, 8.0, 6.0]), "group_mean")
    for index in range(3):
        assert partial.by_trajectory[f"2.{index}.0"] == whole.by_trajectory[f"2.{index}.0"]


@pytest.mark.parametrize("baseline", ["group_mean", "group_normalized", "rloo"])
@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([0.5, 0.5, 0.5], "equal_rewards"),
        ([0.1 + 0.2, 0.3], "equal_rewards"),
        ([1e6, 1e6 + 0.5], "equal_rewards"),
        ([7.0], "single_member"),
        ([1.0, math.nan], "non_finite_reward"),
        ([1.0, math.inf, 0.0], "non_finite_reward"),
    ],
)
def test_groups_without_signal_are_dropped_with_a_reason(baseline, rewards, reason) -> None:
    result = group_advantages(members(g1=rewards, g2=[0.0, 1.0]), baseline)
    dropped, kept = result.groups
    assert (dropped.kept, dropped.reason) == (False, reason)
    assert kept.kept
    assert result.kept == {"g2"}
    assert all(result.by_trajectory[f"1.{index}.0"] == 0.0 for index in range(len(rewards)))


def test_small_but_real_differences_are_kept() -> None:
    (group,) = group_advantages(members(g1=[0.0, 1e-4]), "group_normalized").groups
    assert group.kept


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=9))
def test_kept_groups_sum_to_zero_and_normalized_ones_have_unit_square(rewards: list[float]) -> None:
    for baseline in ("group_mean", "group_normalized", "rloo"):
        result = group_advantages(members(g1=rewards), baseline)
        values = list(result.by_trajectory.values())
        assert sum(values) == pytest.approx(0.0, abs=1e-6)
        if baseline == "group_normalized" and result.kept:
            assert sum(v * v for v in values) / len(values) == pytest.approx(1.0)


def test_a_trajectory_given_twice_is_refused() -> None:
    twice = members(g1=[1.0, 0.0])
    with pytest.raises(LearnerError, match=r"1\.0\.0"):
        group_advantages([*twice, twice[0]], "group_mean")


@given(st.lists(st.text(alphabet="01239g.v:/", max_size=6), unique=True))
def test_natural_keys_are_distinct(texts: list[str]) -> None:
    assert len({natural_key(text) for text in texts}) == len(texts)


def test_numbers_in_ids_compare_as_numbers() -> None:
    assert sorted(["10.0.0", "9.10.0", "9.2.0"], key=natural_key) == ["9.2.0", "9.10.0", "10.0.0"]
