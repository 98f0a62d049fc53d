"""The builders other packages test with: what they make is valid, and a function of their arguments."""

import dataclasses

import numpy as np
import pytest

from hotpot.experience import Limits, check, to_table
from hotpot.testing.records import make_group, make_leases, make_row, make_trajectory
from hotpot.types import TABLES, Purpose


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("purpose", list(Purpose))
def test_every_trajectory_passes_the_gate(seed, purpose):
    for issue in range(10):
        trajectory = make_trajectory(
            issue=issue, seed=seed, purpose=purpose, num_steps=1 + issue % 5, vocabulary=8,
            new_segment_at=2 if issue % 3 == 2 else None, policy_version=seed, reward=float(issue - 4),
        )  # fmt: skip
        assert check(trajectory, Limits(run_id="run", vocabulary_size=8)) is None


def test_same_arguments_same_trajectory_and_others_differ():
    one, two = make_trajectory(issue=3, sample=1), make_trajectory(issue=3, sample=1)
    assert to_table("steps", one.steps).equals(to_table("steps", two.steps))
    other = make_trajectory(issue=3, sample=2)
    assert not np.array_equal(one.steps[0].prompt_tokens, other.steps[0].prompt_tokens)
    assert make_trajectory(issue=3, seed=1).row.trajectory_id == "3.0.0"


def test_a_group_shares_its_task():
    group = make_group(issue=4, size=3, rewards=(0.0, 0.5))
    assert {t.row.group_id for t in group} == {"g4"}
    assert len({t.row.task_id for t in group}) == 1
    assert [t.row.reward for t in group] == [0.0, 0.5, 0.0]
    assert [lease.attempt_id for lease in make_leases(group)] == ["4.0.0", "4.1.0", "4.2.0"]


@pytest.mark.parametrize("table", TABLES)
def test_a_plain_row_of_every_table(table):
    row = make_row(TABLES[table], run_id="mine")
    assert dataclasses.is_dataclass(row)
    assert row.run_id == "mine"
    with pytest.raises(TypeError, match="nonsense"):
        make_row(TABLES[table], nonsense=1)
