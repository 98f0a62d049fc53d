"""Environments that fail again and again: which may be begun, when one is tried again, when the run ends."""

from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.config import SupervisionSection
from hotpot.topology.supervision.breaker import EnvironmentBreaker

SETTINGS = SupervisionSection(breaker_attempts=8, breaker_share=0.5, breaker_rest_s=10.0)


def broken(
    breaker: EnvironmentBreaker, version: str = "env@1", now_s: float = 0.0, reason: str = "crash"
) -> None:
    for attempt in range(5):
        breaker.ended(version, f"{version}-{attempt}", now_s, failed=reason)


def test_it_opens_above_the_share_and_not_at_it() -> None:
    breaker = EnvironmentBreaker(SETTINGS)
    ends = [breaker.ended("env@1", str(i), 0.0, failed="crash" if i % 2 else None) for i in range(100)]
    assert ends == [None] * 100
    assert breaker.leave("env@1", 0.0) == "any"
    opened = breaker.ended("env@1", "x", 1.0, failed="crash") or breaker.ended(
        "env@1", "y", 1.0, failed="hung"
    )
    assert opened is not None
    assert opened[0] == "environment_breaker_opened"
    assert opened[1]["failed"] == 5
    assert opened[1]["attempts"] == 8


def test_it_rests_for_half_the_patience_of_the_watchdog_at_most() -> None:
    breaker = EnvironmentBreaker(SETTINGS.model_copy(update={"stop_after_s": 6.0}))
    broken(breaker)
    assert [breaker.leave("env@1", now_s) for now_s in (2.9, 3.0)] == ["none", "one"]


def test_after_a_rest_one_attempt_decides() -> None:
    breaker = EnvironmentBreaker(SETTINGS)
    broken(breaker)
    assert breaker.leave("env@1", 9.9) == "none"
    assert breaker.leave("env@1", 10.0) == "one"
    breaker.trial("env@1", "trial")
    assert breaker.leave("env@1", 1000.0) == "none"
    # What ends late says nothing.
    assert breaker.ended("env@1", "late", 11.0, failed=None) is None
    assert breaker.state("env@1") == "half_open"
    again = breaker.ended("env@1", "trial", 12.0, failed="hung")
    assert again is not None
    assert again[1]["reasons"] == "5 x crash, 1 x hung"
    assert breaker.leave("env@1", 21.9) == "none"
    assert breaker.leave("env@1", 22.0) == "one"
    breaker.trial("env@1", "second")
    breaker.withdrawn("env@1", "late")
    assert breaker.state("env@1") == "half_open"
    breaker.withdrawn("env@1", "second")
    assert breaker.leave("env@1", 22.0) == "one"
    breaker.trial("env@1", "third")
    assert breaker.ended("env@1", "third", 23.0, failed=None) == (
        "environment_breaker_closed",
        {"env_version": "env@1"},
    )
    assert breaker.leave("env@1", 23.0) == "any"
    assert breaker.reasons("env@1") == "no attempt failed"


def test_the_run_ends_where_none_can_be_begun_and_rest_did_not_help() -> None:
    breaker, mix = EnvironmentBreaker(SETTINGS), ("a@1", "b@1")
    for version in mix:
        broken(breaker, version, reason=f"{version} is down")
    assert breaker.issuable(mix, 5.0) == ()
    assert breaker.verdict(mix) is None
    for version in mix:
        breaker.trial(version, version)
        breaker.ended(version, version, 11.0, failed="still down")
        if version == "a@1":
            assert breaker.verdict(mix) is None
    stop = breaker.verdict(mix)
    assert stop is not None
    assert stop.culprit == "environments"
    assert "a@1: 5 x a@1 is down, 1 x still down" in stop.reason
    assert breaker.verdict((*mix, "c@1")) is None
    assert breaker.verdict(()) is None


_ends = st.lists(st.tuples(st.sampled_from("ab"), st.booleans(), st.floats(0, 20)), max_size=200)


@settings(deadline=None, max_examples=60)
@given(_ends)
def test_versions_do_not_touch_each_other_and_only_a_trial_reopens(
    ends: list[tuple[str, bool, float]],
) -> None:
    both, alone, now_s = EnvironmentBreaker(SETTINGS), EnvironmentBreaker(SETTINGS), 0.0
    for index, (version, failed, pause_s) in enumerate(ends):
        now_s += pause_s
        for breaker in (both, alone) if version == "a" else (both,):
            before = breaker.state(version)
            leave = breaker.leave(version, now_s)
            assert (leave == "any") == (before == "closed")
            if leave == "one":
                breaker.trial(version, str(index))
            breaker.ended(version, str(index), now_s, failed="x" if failed else None)
            after = breaker.state(version)
            if leave == "one":
                assert after == ("open" if failed else "closed")
            elif before == "open":
                assert after == "open"
        assert both.state("a") == alone.state("a")
        assert both.reasons("a") == alone.reasons("a")
