"""The choice: shares, quotas, weights, no order in it, no loop over trajectories."""

import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.config import ReplaySection
from hotpot.experience.replay.keys import id_keys, mixed
from hotpot.experience.replay.sampler import Pool, choose, draw_size, inclusion

SETTINGS = st.builds(
    ReplaySection,
    share=st.just(0.5),
    hot_share=st.floats(0, 1),
    weighting=st.sampled_from(["uniform", "recency", "positive"]),
    half_life_updates=st.floats(0.5, 50),
    positive_weight=st.floats(1, 100),
    importance_exponent=st.floats(0, 1),
)


def make_pool(size: int, seed: int = 0, *, consumed: float = 0.2, envs: int = 3) -> Pool:
    random = np.random.default_rng(seed)
    return Pool(
        keys=id_keys(f"{seed}.{number}.0" for number in range(size)),
        hot=random.random(size) < 0.3,
        consumed=random.random(size) < consumed,
        envs=random.integers(0, envs, size).astype(np.int32),
        ages=random.integers(1, 200, size),
        positive=random.random(size) < 0.4,
    )


def shuffled(pool: Pool, seed: int) -> tuple[Pool, np.ndarray]:
    order = np.random.default_rng(seed).permutation(len(pool.keys))
    return Pool(**{name: getattr(pool, name)[order] for name in Pool.__dataclass_fields__}), order


@settings(max_examples=150, deadline=None)
@given(
    pool=st.builds(make_pool, st.integers(0, 60), st.integers(0, 10**6), consumed=st.floats(0, 1)),
    section=SETTINGS,
    quotas=st.dictionaries(st.integers(0, 3), st.floats(0.05, 1), max_size=3),
    size=st.integers(0, 40),
    update=st.integers(1, 1000),
)
def test_any_draw_keeps_its_promises(pool, section, quotas, size, update):
    choice = choose(pool, section, quotas=quotas, seed=7, update=update, size=size)
    places = choice.places
    assert len(set(places.tolist())) == len(places)
    # As many as there is room for, and no environment over its quota.
    room = {env: min(size, int(np.ceil(quotas.get(env, 1) * size - 1e-9))) for env in range(3)}
    there = Counter(pool.envs.tolist())
    assert len(places) == min(size, sum(min(there[env], room[env]) for env in room))
    drawn = Counter(pool.envs[places].tolist())
    assert all(drawn[env] <= room[env] for env in drawn)
    # Nothing is repeated while something that was not replayed would have fitted.
    if pool.consumed[places].any():
        for place in np.flatnonzero(~pool.consumed):
            assert place in places or drawn[pool.envs[place]] == room[pool.envs[place]]
    # Hot has its share, unless one tier lacks what the other then gives.
    fresh, hot = ~pool.consumed, pool.hot
    wanted = int(np.floor(size * section.hot_share + 0.5))
    if not quotas and (fresh & hot).sum() >= wanted and (fresh & ~hot).sum() >= size - wanted:
        assert hot[places].sum() == wanted
    assert np.isfinite(choice.weights).all()
    assert not len(places) or choice.weights.mean() == pytest.approx(1)
    # The same set in another order is the same draw, in the same order.
    other, order = shuffled(pool, update)
    again = choose(other, section, quotas=quotas, seed=7, update=update, size=size)
    assert order[again.places].tolist() == places.tolist()
    assert again.weights.tolist() == choice.weights.tolist()


def test_seed_and_update_change_the_draw():
    pool = make_pool(500)
    draws = {
        tuple(choose(pool, ReplaySection(), quotas={}, seed=seed, update=update, size=20).places.tolist())
        for seed in range(5)
        for update in range(5)
    }
    assert len(draws) == 25


@pytest.mark.parametrize("weighting", ["uniform", "recency", "positive"])
@pytest.mark.parametrize("quotas", [{}, {0: 0.3}])
def test_full_importance_weights_bring_back_the_plain_mean(weighting, quotas):
    pool = make_pool(500, seed=3, consumed=0)
    section = ReplaySection(weighting=weighting, half_life_updates=60, importance_exponent=1)
    # A value that hangs on everything the choice hangs on, so that no correction could be missing unnoticed.
    value = 1.0 + 3 * pool.positive + pool.ages / 100 + 2 * pool.hot + pool.envs
    corrected, plain = [], []
    for update in range(800):
        choice = choose(pool, section, quotas=quotas, seed=1, update=update, size=120)
        corrected.append((choice.weights * value[choice.places]).mean())
        plain.append(value[choice.places].mean())
    error = np.std(corrected) / np.sqrt(len(corrected))
    # Weights normalised inside a draw are biased in the order of 1 / size; shares and weighting by far more.
    assert np.mean(corrected) == pytest.approx(value.mean(), abs=4 * error + 0.03 * value.std())
    assert abs(np.mean(plain) - value.mean()) > 0.2 * value.std()


def test_each_is_drawn_as_often_as_its_probability_says():
    pool = make_pool(40, seed=5, consumed=0, envs=1)
    section = ReplaySection(weighting="positive", positive_weight=3, hot_share=0.5)
    counts = np.zeros(40)
    for update in range(2000):
        counts[choose(pool, section, quotas={}, seed=2, update=update, size=10).places] += 1
    for tier in (pool.hot, ~pool.hot):
        expected = inclusion(
            np.where(pool.positive[tier], 3.0, 1.0), pool.envs[tier], 5, np.array([10], np.int64)
        )
        np.testing.assert_allclose(counts[tier] / 2000, expected, atol=0.05)


def test_an_exponent_of_0_corrects_nothing_and_weights_fall_with_the_chance():
    pool = make_pool(200, consumed=0)
    section = ReplaySection(weighting="positive", importance_exponent=0)
    assert set(choose(pool, section, quotas={}, seed=0, update=1, size=30).weights) == {1.0}
    section = ReplaySection(weighting="positive", importance_exponent=0.5, hot_share=0.0)
    choice = choose(pool, section, quotas={}, seed=0, update=1, size=30)
    positive = pool.positive[choice.places]
    ratio = choice.weights[~positive].max() / choice.weights[positive].min()
    assert ratio == pytest.approx(section.positive_weight**0.5)


def test_inclusion_probabilities_fill_size_and_quotas():
    weights = np.array([100.0, 1, 1, 1, 1, 1])
    envs = np.array([0, 0, 0, 1, 1, 1], np.int32)
    chances = inclusion(weights, envs, 4, np.array([2, 4]))
    assert chances.sum() == pytest.approx(4)
    assert chances[0] == 1
    assert chances[:3].sum() <= 2 + 1e-9
    np.testing.assert_allclose(
        inclusion(weights, envs, 4, np.array([1, 4])), [100 / 102, 1 / 102, 1 / 102, 1, 1, 1]
    )


def test_a_draw_takes_no_step_per_trajectory():
    def calls(size: int) -> int:
        pool = make_pool(size)
        section, counted = ReplaySection(weighting="recency", quotas={}), Counter()
        sys.setprofile(lambda _, event, __: counted.update([event]))
        try:
            choose(pool, section, quotas={1: 0.1}, seed=0, update=1, size=64)
        finally:
            sys.setprofile(None)
        return counted.total()

    assert calls(100_000) <= 1.5 * calls(1_000) < 3_000


def test_size_of_a_draw():
    assert [draw_size(share, 128) for share in (0, 0.2, 0.5, 0.75)] == [0, 32, 128, 384]
    assert draw_size(0.5, 0) == 0


def test_keys_are_spread_and_the_same_everywhere():
    keys = id_keys(f"{number}.0.0" for number in range(20_000))
    assert keys[0] == 8117901566582226786
    for salt in (0, 1, 2**63):
        places = mixed(keys, salt) / 2.0**64
        assert np.histogram(places, 20, (0, 1))[0].min() > 850
    first, second = (mixed(keys, salt) / 2.0**64 for salt in (1, 2))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03
