import pytest

from hotpot.errors import UsageError
from hotpot.metrics import METRICS, quoted
from hotpot.observability.queries import cut, value
from hotpot.testing.records import make_group


def test_cut_and_value(reader_over) -> None:
    made = [t.row for issue in range(3) for t in make_group(issue=issue, size=4, policy_version=issue + 1)]
    reader = reader_over({"trajectories": made})
    assert value(reader, "rollout/reward_mean") == 0.5
    assert cut(reader, "rollout/reward_mean", by=["policy_version"]).to_pylist() == [
        {"policy_version": version, "value": 0.5} for version in (1, 2, 3)
    ]
    assert value(reader, "rollout/reward_mean", where="reward > 0 AND policy_version = 2") == 1.0
    assert {name: value(reader, name) for name in METRICS}["learn/loss"] is None


def test_unknown_metrics_and_cuts_are_refused(reader_over) -> None:
    reader = reader_over({})
    with pytest.raises(UsageError, match="nearest: rollout/reward_mean"):
        value(reader, "reward_meen")
    with pytest.raises(UsageError, match="cannot be cut"):
        cut(reader, "learn/loss", by=["split"])


def test_quoting_keeps_quotes_inside(reader_over) -> None:
    odd = "a'; DROP TABLE steps; --"
    assert reader_over({}).sql(f"SELECT {quoted(odd)} AS x").to_pylist() == [{"x": odd}]
