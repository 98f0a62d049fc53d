"""The breaker against a plain model, over any sequence of decisions and outcomes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.experience.gate.breaker import Breaker, BreakerPolicy

POLICY = BreakerPolicy(window=10, min_records=4, share=0.5, probe_every=3, probes_to_close=2)


def opened():
    breaker = Breaker(POLICY)
    assert breaker.observe("a", 0, 4) == "opened"
    return breaker


def test_it_opens_above_the_share_of_enough_records_only():
    breaker = Breaker(POLICY)
    assert [breaker.observe("a", 0, 1) for _ in range(3)] == [None] * 3
    assert breaker.decide("a")
    assert breaker.observe("a", 3, 0) is None  # 3 of 6: not above a half
    assert breaker.observe("a", 0, 1) == "opened"
    assert (breaker.state("a"), breaker.open_producers()) == ("open", ("a",))


def test_old_records_fall_out_of_the_window():
    breaker = Breaker(POLICY)
    breaker.observe("a", 10, 0)
    assert [breaker.observe("a", 0, 1) for _ in range(6)] == [None] * 5 + ["opened"]


def test_while_open_a_trickle_is_tested_and_enough_good_ones_close_it():
    breaker = opened()
    assert [breaker.decide("a") for _ in range(6)] == [False, False, True, False, False, True]
    assert breaker.state("a") == "half_open"
    assert breaker.observe("a", 1, 0) is None
    assert breaker.observe("a", 0, 1) is None
    assert breaker.state("a") == "open"
    assert breaker.observe("a", 1, 0) is None
    assert breaker.observe("a", 1, 0) == "closed"
    assert breaker.decide("a")
    assert [breaker.observe("a", 0, 1) for _ in range(4)] == [None] * 3 + ["opened"]  # it begins anew


def test_producers_do_not_touch_each_other():
    breaker = opened()
    assert breaker.decide("b")
    assert breaker.observe("b", 1, 0) is None
    assert (breaker.producers(), breaker.open_producers()) == (("a", "b"), ("a",))
    assert breaker.state("never heard of") == "closed"
    assert len(breaker.producers()) == 2


def test_a_share_of_one_never_opens():
    breaker = Breaker(BreakerPolicy(window=8, min_records=1, share=1.0, probe_every=1, probes_to_close=1))
    assert breaker.observe("a", 0, 1000) is None


ACTIONS = st.one_of(st.just("decide"), st.tuples(st.integers(0, 6), st.integers(0, 6)))


@settings(max_examples=500)
@given(
    st.lists(ACTIONS, max_size=60),
    st.builds(
        BreakerPolicy,
        window=st.integers(1, 12),
        min_records=st.integers(1, 12),
        share=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
        probe_every=st.integers(1, 4),
        probes_to_close=st.integers(1, 4),
    ),
)
def test_it_does_what_the_model_does(actions, policy):
    breaker, recent, is_open, asked, streak = Breaker(policy), [], False, 0, 0
    changes = []
    for action in actions:
        if action == "decide":
            asked += is_open
            assert breaker.decide("a") == (not is_open or asked % policy.probe_every == 0)
            continue
        accepted, refused = action
        change = breaker.observe("a", accepted, refused)
        if not is_open:
            recent = (recent + [0] * accepted + [1] * refused)[-policy.window :]
            expected = len(recent) >= policy.min_records and sum(recent) > policy.share * len(recent)
            assert change == ("opened" if expected else None)
            if expected:
                is_open, asked, streak = True, 0, 0
        else:
            streak = 0 if refused else streak + accepted
            assert change == ("closed" if not refused and streak >= policy.probes_to_close else None)
            if change:
                is_open, recent = False, []
        changes += [change] if change else []
        assert (breaker.state("a") == "closed") == (not is_open)
        assert breaker.open_producers() == (("a",) if is_open else ())
    assert changes == [["opened", "closed"][place % 2] for place in range(len(changes))]


@pytest.mark.parametrize("seed", range(3))
def test_equal_sequences_give_equal_decisions(seed):
    def run():
        breaker = Breaker(POLICY)
        found = []
        for number in range(200):
            if breaker.decide("a"):
                good = (number * 7 + seed) % 5 == 0 or number > 100
                found.append(breaker.observe("a", int(good), int(not good)))
            else:
                found.append("held")
        return found

    assert run() == run()
    assert {"opened", "closed", "held"} <= set(run())
