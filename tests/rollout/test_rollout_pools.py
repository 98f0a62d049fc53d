"""Draws, mix and pools: pure functions and a pure state machine."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.rollout.draws import chance, choose, shuffled
from hotpot.rollout.pools import Pool, Pools, Verdict, verdict_of

WEIGHTS = {Pool.UNSEEN: 1.0, Pool.UNSOLVED: 0.5, Pool.LEARNABLE: 2.0, Pool.SOLVED: 0.25}
heard = st.lists(st.tuples(st.integers(0, 9), st.sampled_from(Verdict)), max_size=60)
chances = st.floats(0, 1, exclude_max=True)


def told(verdicts, *, decay: float = 0.5) -> Pools:
    pools = Pools(range(10), decay=decay)
    for index, verdict in verdicts:
        pools.hear(index, verdict)
    return pools


@given(st.integers(1, 600), st.text(max_size=8))
@settings(max_examples=40, deadline=None)
def test_an_order_has_everything_once(size: int, key: str) -> None:
    assert sorted(shuffled(index, size, key) for index in range(size)) == list(range(size))


def test_orders_differ_by_key() -> None:
    orders = {tuple(shuffled(index, 50, f"{epoch}") for index in range(50)) for epoch in range(20)}
    assert len(orders) == 20
    firsts = Counter(shuffled(0, 4, f"{epoch}") for epoch in range(400))
    assert min(firsts.values()) > 60


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1).filter(any), chances)
@settings(deadline=None)
def test_a_choice_has_weight_and_follows_the_chance(weights: list[float], at: float) -> None:
    index = choose(weights, at)
    assert weights[index] > 0
    assert sum(weights[:index]) <= at * sum(weights) + 1e-9 <= sum(weights[: index + 1]) + 2e-9


def test_nothing_to_choose_is_an_error_and_chances_are_even() -> None:
    with pytest.raises(ValueError, match="all weights are 0"):
        choose([0.0, 0.0], 0.5)
    counts = Counter(int(10 * chance(3, issue, "task")) for issue in range(5000))
    assert min(counts.values()) > 400
    assert chance(3, 1, "task") != chance(3, 1, "environment") != chance(4, 1, "environment")


@given(heard, st.floats(0, 0.99))
@settings(deadline=None)
def test_every_task_stands_in_the_pool_its_evidence_says(verdicts, decay: float) -> None:
    pools = told(verdicts, decay=decay)
    assert sum(pools.sizes.values()) == 10
    for index in range(10):
        own = [verdict for at, verdict in verdicts if at == index]
        weight = {
            kind: sum(decay ** (len(own) - 1 - n) for n, v in enumerate(own) if v is kind) for kind in Verdict
        }
        if not own:
            expected = {Pool.UNSEEN}
        else:
            share = {kind: found / sum(weight.values()) for kind, found in weight.items()}
            near = any(abs(share[kind] - 0.9) < 1e-9 for kind in Verdict)
            expected = {Pool.SOLVED if share[Verdict.SOLVED] >= 0.9 else
                        Pool.UNSOLVED if share[Verdict.FAILED] >= 0.9 else Pool.LEARNABLE}  # fmt: skip
            expected = set(Pool) if near else expected
        assert pools.pool(index) in expected


@given(heard, st.sets(st.integers(0, 9)), chances)
@settings(deadline=None)
def test_a_draw_is_of_its_pool_with_its_probability_and_not_taken(
    verdicts, taken: set[int], at: float
) -> None:
    pools = told(verdicts)
    drawn = pools.draw(WEIGHTS, at, taken)
    assert drawn.pool is pools.pool(drawn.index)
    free = [index for index in range(10) if index not in taken] or list(range(10))
    assert drawn.index in free
    total = sum(WEIGHTS[pools.pool(index)] for index in free)
    assert drawn.probability == pytest.approx(WEIGHTS[drawn.pool] / total)
    assert told(verdicts).draw(WEIGHTS, at, taken) == drawn


@given(heard, st.sets(st.integers(0, 9), max_size=9))
@settings(max_examples=25, deadline=None)
def test_draws_come_as_often_as_they_say(verdicts, taken: set[int]) -> None:
    pools = told(verdicts)
    grid = [pools.draw(WEIGHTS, (n + 0.5) / 4000, taken) for n in range(4000)]
    for index, count in Counter(drawn.index for drawn in grid).items():
        probability = next(drawn.probability for drawn in grid if drawn.index == index)
        assert count / 4000 == pytest.approx(probability, abs=0.001)


def test_where_no_pool_left_has_weight_all_that_is_left_is_drawn() -> None:
    pools = told([(index, Verdict.SOLVED) for index in range(10)])
    drawn = pools.draw({**WEIGHTS, Pool.SOLVED: 0.0}, 0.35, taken={0})
    assert (drawn.pool, drawn.index, drawn.probability) == (Pool.SOLVED, 4, pytest.approx(1 / 9))


def test_old_evidence_decays() -> None:
    pools = told([(0, Verdict.FAILED)] * 5 + [(0, Verdict.SOLVED)])
    assert pools.pool(0) is Pool.LEARNABLE
    for _ in range(3):
        pools.hear(0, Verdict.SOLVED)
    assert pools.pool(0) is Pool.SOLVED


@pytest.mark.parametrize(
    ("num_solved", "size", "signal", "expected"),
    [
        (0, 8, False, Verdict.FAILED),
        (8, 8, False, Verdict.SOLVED),
        (3, 8, True, Verdict.MIXED),
        (3, 8, False, Verdict.MIXED),
        (0, 8, True, Verdict.MIXED),
        (1, 1, False, None),
        (0, 0, False, None),
    ],
)
def test_verdicts(num_solved: int, size: int, signal: bool, expected: Verdict | None) -> None:
    assert verdict_of(num_solved=num_solved, size=size, has_signal=signal) is expected
