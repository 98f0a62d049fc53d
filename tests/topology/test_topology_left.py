"""What a resume of an asynchronous run goes on with, read from the record and the ledger."""

from dataclasses import replace
from pathlib import Path

import pytest

from hotpot.config import StoreSection
from hotpot.experience import ExperienceStore, RunReader
from hotpot.rollout import STOPPED, EpisodePlan
from hotpot.testing.records import make_leases, make_row, make_trajectory
from hotpot.topology.collecting.groups import CUT
from hotpot.topology.resume.left import Left, read_left
from hotpot.types import Split, Task, Trajectory, UpdateRow

BROKE = "the environment broke"


@pytest.fixture
def store(tmp_path: Path) -> ExperienceStore:
    return ExperienceStore.open(tmp_path / "run", run_id="run", settings=StoreSection(), vocabulary_size=64)


def lease(store: ExperienceStore, issue: int, *samples: int, attempt: int = 0) -> list[Trajectory]:
    made = [make_trajectory(issue=issue, sample=sample, attempt=attempt) for sample in samples]
    store.ledger.lease(make_leases(made))
    store.ledger.reach("issue", issue)
    return made


def fail(store: ExperienceStore, issue: int, *samples: int, attempt: int = 0) -> None:
    for one in lease(store, issue, *samples, attempt=attempt):
        store.ledger.fail(one.row.attempt_id, BROKE)


def drop(store: ExperienceStore, issue: int, *samples: int, attempt: int = 0, reason: str) -> None:
    for one in lease(store, issue, *samples, attempt=attempt):
        store.ledger.drop(one.row.attempt_id, reason)


def attempts_to_run(left: Left, issue: int, samples: int) -> list[str]:
    """The attempts that a resume would begin of an issue."""
    task = Task(env="fake", split=Split.TRAIN, content="x")
    plans = [EpisodePlan(task=task, issue=issue, sample=sample) for sample in range(samples)]
    return [f"{p.issue}.{p.sample}.{left.past.next_attempt(p)}" for p in left.past.to_run(plans)]


def test_a_try_again_that_was_due_when_the_process_died_is_run(
    store: ExperienceStore, tmp_path: Path
) -> None:
    fail(store, 0, 0, 1)  # of all its episodes the first attempt failed, and no second was begun
    store.append(lease(store, 1, 0))
    fail(store, 1, 1)
    fail(store, 1, 1, attempt=1)
    fail(store, 2, 0)  # its second attempt was given up: the last one says
    drop(store, 2, 0, attempt=1, reason=f"gave up after 2 tries; the last: {BROKE}")
    drop(store, 2, 1, reason=CUT)
    fail(store, 3, 0)  # its second attempt was interrupted
    drop(store, 3, 0, attempt=1, reason=STOPPED)
    store.append(lease(store, 3, 1))
    used = lease(store, 4, 0)  # learned from without what was to be tried again
    store.append(used)
    fail(store, 4, 1)
    row = make_row(UpdateRow, update=1, collected_trajectories=tuple(t.row.trajectory_id for t in used))
    store.record_update(replace(row, num_trajectories=1), [], [], [])
    left = read_left(RunReader.open(tmp_path / "run"), store.ledger, leave=False)
    store.close()
    assert left.issues == (0, 1, 3)
    assert {issue: attempts_to_run(left, issue, 2) for issue in left.issues} == {
        0: ["0.0.1", "0.1.1"],
        1: ["1.1.2"],
        3: ["3.0.2"],
    }
    assert set(left.past.finished) == {"1.0", "3.1"}
