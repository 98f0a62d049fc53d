"""Refill and outcomes: what the topology decides of an update's groups."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.testing.records import make_trajectory
from hotpot.topology.updates.outcomes import update_outcomes
from hotpot.topology.updates.refill import Refill
from hotpot.types import Trajectory


def group(issue: int, rewards: Sequence[float]) -> list[Trajectory]:
    return [make_trajectory(issue=issue, sample=s, reward=reward) for s, reward in enumerate(rewards)]


KINDS = {"signal": [0.0, 1.0], "equal": [1.0, 1.0 + 1e-9], "single": [1.0], "lost": []}
REASONS = {"equal": "equal_rewards", "single": "single_member", "lost": "no_trajectory"}


@given(st.integers(1, 5), st.integers(0, 3), st.data())
@settings(deadline=None, max_examples=60)
def test_a_refill_runs_exactly_what_is_missing_until_enough_or_out_of_rounds(
    wanted: int, max_rounds: int, data: st.DataObject
) -> None:
    refill, issue, kinds, rounds = Refill(wanted, max_rounds=max_rounds), 0, [], 0
    while missing := refill.missing:
        assert missing == wanted - kinds.count("signal")
        drawn = data.draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=missing, max_size=missing))
        issues = range(issue, issue + missing)
        collected = [t for i, kind in zip(issues, drawn, strict=True) for t in group(i, KINDS[kind])]
        refill.hear([f"g{i}" for i in issues for _ in range(2)], collected[::-1])
        kinds, issue, rounds = kinds + drawn, issue + missing, rounds + 1
    report = refill.report()
    assert rounds <= 1 + max_rounds
    assert report["with_signal"] == kinds.count("signal") <= wanted
    assert report["reached"] == (kinds.count("signal") == wanted) or rounds == 1 + max_rounds
    assert sum(report["issued"]) == len(kinds)
    assert report["without_signal"] == {
        REASONS[kind]: kinds.count(kind) for kind in sorted(REASONS) if kind in kinds
    }


def test_without_rounds_one_is_all() -> None:
    refill = Refill(3, max_rounds=0)
    assert refill.missing == 3
    refill.hear(["g0", "g1", "g2"], [])
    assert refill.missing == 0
    assert not refill.report()["reached"]


def test_no_groups_no_outcomes() -> None:
    assert update_outcomes([], []) == []
