"""The builders other packages test with: what they make is valid, and a function of their arguments."""

import dataclasses

import numpy as np
import pytest

from hotpot.experience import Limits, check, to_table
from hotpot.testing.records import make_fork, make_group, make_leases, make_row, make_trajectory
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


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("own", [0, 6])
def test_a_fork_repeats_its_parent_as_given_tokens_and_both_pass_the_gate(step, own):
    parent = make_trajectory(issue=2, num_steps=4, new_segment_at=2, vocabulary=8)
    fork = make_fork(parent, step, number=2, num_steps=2, prompt_tokens=own, vocabulary=8, reward=0.5)
    nested = make_fork(fork, 1, vocabulary=8)
    limits = Limits(run_id="run", vocabulary_size=8)
    assert [check(trajectory, limits) for trajectory in (parent, fork, nested)] == [None] * 3
    assert (fork.row.trajectory_id, fork.row.attempt_id, fork.row.fork_step) == ("2.0.0/2", "2.0.0", step)
    assert (nested.row.trajectory_id, nested.row.parent_trajectory_id) == ("2.0.0/2/1", "2.0.0/2")
    origin, first = parent.steps[step], fork.steps[0]
    before = [s for s in parent.steps[:step] if s.segment == origin.segment]
    shared = np.concatenate(
        [*(t for s in before for t in (s.prompt_tokens, s.sampled_tokens)), origin.prompt_tokens]
    )
    assert len(shared) == origin.context_tokens == first.reused_tokens
    assert np.array_equal(first.prompt_tokens[: len(shared)], shared)
    assert (len(first.prompt_tokens) > len(shared)) == (own > 0)
    assert [lease.attempt_id for lease in make_leases([parent, fork])] == ["2.0.0"]
    root = dataclasses.replace(
        fork, row=dataclasses.replace(fork.row, parent_trajectory_id=None, fork_step=None)
    )
    assert (check(root, limits) is None) == (not before)


@pytest.mark.parametrize("table", TABLES)
def test_a_plain_row_of_every_table(table):
    row = make_row(TABLES[table], run_id="mine")
    assert dataclasses.is_dataclass(row)
    assert row.run_id == "mine"
    with pytest.raises(TypeError, match="nonsense"):
        make_row(TABLES[table], nonsense=1)
