"""A run that hangs is ended by its watchdog, says where, and is resumed; the record tells of it."""

import json
from pathlib import Path

import pytest
from test_topology_kill import Operator

from hotpot.experience import RunReader
from hotpot.metrics import metric, sql

LIMITS = (
    "supervision.beat_s=1",
    "supervision.dead_after_s=12",
    "supervision.stop_after_s=12",
    "topology.updates=2",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_run_that_hangs_ends_with_the_culprit_and_goes_on_when_it_is_resumed(
    tmp_path: Path, model: Path
) -> None:
    operator = Operator(folder=tmp_path, model=model)
    code, said = operator.start("evaluating:2:hang", *LIMITS)
    assert code == 1, said
    assert "no progress for" in said
    assert "the run waits for store" in said
    code, said = operator.resume("saving:1:hang", *LIMITS)
    assert code == 1, said
    assert "the run waits for checkpoint" in said
    assert "topology_kill_worker.py" in (operator.run / "logs" / "watchdog-stacks.txt").read_text()
    # Ahead of the loop, while what the run went through before is taken up.
    code, said = operator.resume("loaded:2:hang", *LIMITS)
    assert code == 1, said
    assert "the run waits for hotpot.topology.parts.learners.make_learner" in said
    # In a thread that the loop waits for.
    code, said = operator.resume("asking:1:hang", *LIMITS)
    assert code == 1, said
    assert "for hotpot-log_0, which is in hotpot.experience.log.journal.Journal._write" in said
    code, said = operator.resume("never", *LIMITS)
    assert code == 0, said
    reader = RunReader.open(operator.run)
    told = reader.sql("select detail from events where kind = 'watchdog_ended' order by time_us")
    found = [json.loads(detail) for detail in told.column("detail").to_pylist()]
    culprits = [one["culprit"].partition(" ")[0] for one in found]
    assert culprits == ["store", "checkpoint", "hotpot.topology.parts.learners.make_learner"]
    assert reader.sql(sql(metric("system/watchdog_endings"))).column("value").to_pylist() == [3]
    assert not (operator.run / "logs" / "watchdog.json").exists()
