"""The backward recurrence, generalised advantages by token and by model call, and V-trace, against their definitions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.errors import LearnerError
from hotpot.learner.estimators.gae import ActionValues, token_gae, turn_gae
from hotpot.learner.estimators.scan import scan_back
from hotpot.learner.estimators.vtrace import vtrace

UNIT = st.floats(0, 1)


@st.composite
def trajectories(draw: st.DrawFn) -> ActionValues:
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    lengths = np.array(draw(st.lists(st.integers(0, 40), max_size=6)), dtype=np.int64)
    size = int(lengths.sum())
    return ActionValues(
        rewards=rng.normal(size=size),
        values=rng.normal(size=size),
        lengths=lengths,
        final_values=rng.normal(size=len(lengths)) * (rng.random(len(lengths)) < 0.5),
    )


def each(actions: ActionValues) -> list[tuple[slice, float]]:
    ends = np.cumsum(actions.lengths)
    return [
        (slice(int(end - size), int(end)), float(final))
        for end, size, final in zip(ends, actions.lengths, actions.final_values, strict=True)
    ]


@given(seed=st.integers(0, 10_000), size=st.integers(0, 400))
@settings(deadline=None)
def test_the_scan_is_the_loop(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    delta, factor = rng.normal(size=size), rng.uniform(-1, 1, size) * (rng.random(size) < 0.95)
    expected, following = np.zeros(size), 0.0
    for place in reversed(range(size)):
        following = delta[place] + factor[place] * following
        expected[place] = following
    np.testing.assert_allclose(scan_back(delta, factor), expected, rtol=1e-12, atol=1e-12)


@given(actions=trajectories(), gamma=UNIT, lam=UNIT)
@settings(deadline=None)
def test_token_advantages_are_discounted_sums_of_errors(
    actions: ActionValues, gamma: float, lam: float
) -> None:
    found = token_gae(actions, gamma=gamma, lam=lam)
    for at, final in each(actions):
        values, rewards = np.append(actions.values[at], final), actions.rewards[at]
        errors = rewards + gamma * values[1:] - values[:-1]
        for place in range(len(rewards)):
            powers = (gamma * lam) ** np.arange(len(rewards) - place)
            assert found[at][place] == pytest.approx(powers @ errors[place:], abs=1e-9)


@given(actions=trajectories(), gamma=UNIT, lam=UNIT, share=UNIT, seed=st.integers(0, 1000))
@settings(deadline=None)
def test_a_turn_is_one_step(actions: ActionValues, gamma: float, lam: float, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    calls = np.concatenate(
        [np.zeros(0, np.int64), *(np.cumsum(rng.random(size) < share) for size in actions.lengths)]
    ).astype(np.int64)
    found = turn_gae(actions, calls, gamma=gamma, lam=lam)
    for at, final in each(actions):
        numbers = calls[at]
        steps = sorted(set(numbers.tolist()))
        first = [int(np.flatnonzero(numbers == step)[0]) for step in steps]
        values = [*(actions.values[at][place] for place in first), final]
        advantage, expected = 0.0, {}
        for index in reversed(range(len(steps))):
            reward = actions.rewards[at][numbers == steps[index]].sum()
            advantage = reward + gamma * values[index + 1] - values[index] + gamma * lam * advantage
            expected[steps[index]] = advantage
        assert found[at].tolist() == pytest.approx([expected[n] for n in numbers.tolist()], abs=1e-9)


def test_calls_of_one_token_each_are_tokens() -> None:
    actions = ActionValues(
        rewards=np.arange(6.0), values=np.ones(6), lengths=np.array([4, 2]), final_values=np.array([0.0, 2.0])
    )
    calls = np.array([0, 1, 2, 3, 0, 1])
    found = turn_gae(actions, calls, gamma=0.9, lam=0.8)
    np.testing.assert_array_equal(found, token_gae(actions, gamma=0.9, lam=0.8))


@given(actions=trajectories(), gamma=UNIT, lam=UNIT, seed=st.integers(0, 1000), c_bar=st.floats(0.1, 1.5))
@settings(deadline=None, max_examples=40)
def test_vtrace_is_equation_one(
    actions: ActionValues, gamma: float, lam: float, seed: int, c_bar: float
) -> None:
    log_ratio = np.random.default_rng(seed).normal(0, 1, len(actions.rewards))
    rho_bar = 1.5
    found = vtrace(actions, log_ratio, gamma=gamma, lam=lam, rho_bar=rho_bar, c_bar=c_bar)
    for at, final in each(actions):
        ratio = np.exp(log_ratio[at])
        rho, c = np.minimum(rho_bar, ratio), lam * np.minimum(c_bar, ratio)
        values, rewards = np.append(actions.values[at], final), actions.rewards[at]
        delta = rho * (rewards + gamma * values[1:] - values[:-1])
        targets = np.append(np.zeros(len(rewards)), final)
        for s in range(len(rewards)):
            terms = [gamma ** (t - s) * np.prod(c[s:t]) * delta[t] for t in range(s, len(rewards))]
            targets[s] = values[s] + sum(terms)
        advantages = rho * (rewards + gamma * targets[1:] - values[:-1])
        np.testing.assert_allclose(found.targets[at], targets[:-1], atol=1e-9)
        np.testing.assert_allclose(found.advantages[at], advantages, atol=1e-9)


@given(actions=trajectories(), gamma=UNIT, lam=UNIT)
@settings(deadline=None)
def test_on_policy_vtrace_is_gae(actions: ActionValues, gamma: float, lam: float) -> None:
    found = vtrace(actions, np.zeros(len(actions.rewards)), gamma=gamma, lam=lam)
    expected = token_gae(actions, gamma=gamma, lam=lam)
    np.testing.assert_allclose(found.targets - actions.values, expected, atol=1e-9)


def test_a_huge_ratio_does_not_overflow_and_bounds_are_checked() -> None:
    actions = ActionValues(
        rewards=np.ones(2), values=np.zeros(2), lengths=np.array([2]), final_values=np.zeros(1)
    )
    assert vtrace(actions, np.array([2000.0, -2000.0]), gamma=1.0).targets.tolist() == [1.0, 0.0]
    with pytest.raises(LearnerError, match=r"rho_bar = 1\.0 and c_bar = 2\.0"):
        vtrace(actions, np.zeros(2), gamma=1.0, c_bar=2.0)


def test_arrays_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LearnerError, match="3 rewards and 2 values"):
        ActionValues(rewards=np.zeros(3), values=np.zeros(2), lengths=np.array([3]), final_values=np.zeros(1))
