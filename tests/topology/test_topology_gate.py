"""A run whose every producer is held off ends with the reason."""

import pytest

from hotpot.errors import StoreError
from hotpot.experience import RULES, open_run


def test_a_run_ends_where_nothing_passes_the_gate(run, tmp_path, monkeypatch):
    monkeypatch.setitem(RULES, "times", lambda trajectory, limits: "the clock goes backwards")
    with pytest.raises(StoreError) as caught:
        run("gate.breaker_min_records=8")
    words = str(caught.value)
    assert "actor-0" in words
    assert "x times" in words
    assert "the clock goes backwards" in words
    assert "quarantine list" in words
    reader = open_run(tmp_path / "run")
    kinds = [row["kind"] for row in reader.sql("SELECT kind FROM events ORDER BY time_us").to_pylist()]
    assert kinds.count("breaker_opened") == 1
    assert kinds[-1] == "failed"
    reasons = reader.sql("SELECT DISTINCT reason FROM quarantine").to_pylist()
    assert {"reason": "times"} in reasons
    assert reader.table("trajectories").num_rows == 0


def test_some_refusals_do_not_stop_a_run(run, tmp_path, monkeypatch):
    def picky(trajectory, limits):
        return "unlucky" if trajectory.row.attempt_id.endswith(".1.0") else None

    monkeypatch.setitem(RULES, "times", picky)
    run("topology.updates=1", "gate.breaker_min_records=4")
    (row,) = open_run(tmp_path / "run").sql("SELECT count(*) AS n FROM quarantine").to_pylist()
    assert row["n"] > 0
