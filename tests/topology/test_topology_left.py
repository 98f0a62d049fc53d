"""What an asynchronous run left under way, read from record and ledger: what waits, what is settled, which groups are open."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotpot.config import StoreSection
from hotpot.experience import ExperienceStore, RunReader
from hotpot.ids import again
from hotpot.rollout import STOPPED, EpisodePlan
from hotpot.testing.records import make_fork, make_leases, make_row, make_trajectory
from hotpot.topology.collecting.groups import CUT
from hotpot.topology.resume.left import Left, read_left
from hotpot.types import ConsumptionRow, DiscardRow, GroupRow, Purpose, Split, Task, Trajectory, UpdateRow

BROKE = "the environment broke"


@pytest.fixture
def store(tmp_path: Path) -> ExperienceStore:
    return ExperienceStore.open(tmp_path / "run", run_id="run", settings=StoreSection(), vocabulary_size=64)


def lease(store: ExperienceStore, issue: int, *samples: int, attempt: int = 0) -> list[Trajectory]:
    made = [make_trajectory(issue=issue, sample=sample, attempt=attempt) for sample in samples]
    store.ledger.reach("issue", issue)
    store.ledger.lease(make_leases(made))
    return made


def fail(store: ExperienceStore, issue: int, *samples: int, attempt: int = 0) -> None:
    for one in lease(store, issue, *samples, attempt=attempt):
        store.ledger.fail(one.row.attempt_id, BROKE)


def drop(store: ExperienceStore, issue: int, *samples: int, attempt: int = 0, reason: str) -> None:
    for one in lease(store, issue, *samples, attempt=attempt):
        store.ledger.drop(one.row.attempt_id, reason)


def keep(store: ExperienceStore, *trajectories: Trajectory) -> None:
    assert len(store.append(trajectories).accepted) == len(trajectories)


def _named(trajectory: Trajectory, name: str) -> Trajectory:
    """Return a trajectory under the id that a refused one is brought back with."""
    own: dict[str, Any] = {"trajectory_id": name, "attempt_id": name}
    steps = tuple(replace(step, **own) for step in trajectory.steps)
    return Trajectory(row=replace(trajectory.row, **own), steps=steps)


def read(store: ExperienceStore, tmp_path: Path) -> Left:
    return read_left(RunReader.open(tmp_path / "run"), store.ledger, leave=False)


def waiting(left: Left) -> list[str]:
    return [one.row.trajectory_id for found in left.past.finished.values() for one in found]


def attempts_to_run(left: Left, issue: int, samples: int) -> list[str]:
    """The attempts that a resume would begin of an issue."""
    task = Task(env="fake", split=Split.TRAIN, content="x")
    plans = [EpisodePlan(task=task, issue=issue, sample=sample) for sample in range(samples)]
    return [f"{p.issue}.{p.sample}.{left.past.next_attempt(p)}" for p in left.past.to_run(plans)]


def test_what_nobody_collected_or_discarded_waits_with_its_forks(
    store: ExperienceStore, tmp_path: Path
) -> None:
    late, first = lease(store, 1, 0, 1)
    used, gone = lease(store, 0, 0, 1)
    fork = make_fork(first, 0)
    keep(store, first, fork)
    keep(store, used, gone)
    keep(store, late)
    held_out = make_trajectory(issue=7, purpose=Purpose.EVALUATION)
    back = [_named(one, again(one.row.attempt_id, 1)) for one in lease(store, 2, 0)]
    store.ledger.lease(make_leases([held_out, *back]))
    keep(store, *back)
    keep(store, held_out)
    store.record_update(make_row(UpdateRow, update=1, collected_trajectories=("0.0.0",)), [], [], [])
    store.discard([make_row(DiscardRow, trajectory_id="0.1.0", reason="stale")])
    left = read(store, tmp_path)
    assert sorted(waiting(left)) == ["1.0.0", "1.1.0", "1.1.0/1"]
    assert {len(one.steps) for found in left.past.finished.values() for one in found} == {1, 2}
    # Of issue 2 only what was brought back finished: its own attempt is under way.
    assert left.issues == (1, 2)
    everything = read_left(RunReader.open(tmp_path / "run"), store.ledger, leave=True)
    assert {one.row.trajectory_id for one in everything.gone} == set(waiting(left))
    assert (everything.issues, everything.until) == ((), 3)
    store.close()


def test_what_an_update_of_an_older_release_used_does_not_wait(
    store: ExperienceStore, tmp_path: Path
) -> None:
    for issue in range(3):
        keep(store, *lease(store, issue, 0))
    use = make_row(ConsumptionRow, trajectory_id="1.0.0", update=1, source="fresh")
    update = make_row(UpdateRow, update=1, num_trajectories=1, learner_settings="")
    store.record_update(update, [make_row(GroupRow, group_id="g0", update=1)], [], [use])
    left = read(store, tmp_path)
    assert (waiting(left), left.issues) == (["2.0.0"], (2,))
    store.close()


def test_groups_that_are_left_are_those_of_which_something_may_come(
    store: ExperienceStore, tmp_path: Path
) -> None:
    keep(store, *lease(store, 0, 0, 1))  # has enough, and waits
    for one in lease(store, 0, 2):
        store.ledger.drop(one.row.attempt_id, CUT)
    keep(store, *lease(store, 1, 0))  # the others were given up
    for one in lease(store, 1, 1, 2):
        store.ledger.drop(one.row.attempt_id, "gave up after 3 tries; the last: it broke")
    keep(store, *lease(store, 2, 0))  # one interrupted, one not begun
    for one in lease(store, 2, 1):
        store.ledger.drop(one.row.attempt_id, STOPPED)
    for one in lease(store, 3, 0):  # interrupted, then given up by the process after
        store.ledger.drop(one.row.attempt_id, STOPPED)
    for one in (*lease(store, 3, 0, attempt=1), *lease(store, 3, 1, 2)):
        store.ledger.drop(one.row.attempt_id, "gave up after 1 tries; the last: it broke")
    for one in lease(store, 4, 0, 1, 2):  # broke, and was to be tried again
        store.ledger.fail(one.row.attempt_id, "it broke")
    keep(store, *lease(store, 5, 0))  # interrupted, but learned from without the rest
    store.record_update(make_row(UpdateRow, update=1, collected_trajectories=("5.0.0",)), [], [], [])
    store.ledger.reach("issue", 6)  # handed out, and nothing begun
    left = read(store, tmp_path)
    assert left.issues == (0, 1, 2, 4, 6)
    assert waiting(left) == ["0.0.0", "0.1.0", "1.0.0", "2.0.0"]
    lost = {one.partition("s")[0] for one in left.past.lost}
    assert len(left.past.lost) == 6, lost
    assert set(left.past.next_attempts.values()) == {1}
    store.close()


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
