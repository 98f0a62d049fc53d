"""What waits, read from the record, and which groups were under way."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotpot.config import StoreSection
from hotpot.experience import ExperienceStore, RunReader
from hotpot.ids import again
from hotpot.rollout import STOPPED
from hotpot.testing.records import make_fork, make_leases, make_row, make_trajectory
from hotpot.topology.collecting.groups import CUT
from hotpot.topology.resume.waiting import open_issues, waiting_trajectories
from hotpot.types import ConsumptionRow, DiscardRow, GroupRow, Purpose, Trajectory, UpdateRow


@pytest.fixture
def store(tmp_path: Path) -> ExperienceStore:
    return ExperienceStore.open(tmp_path / "run", run_id="run", settings=StoreSection(), vocabulary_size=64)


def lease(store: ExperienceStore, issue: int, *samples: int, attempt: int = 0) -> list[Trajectory]:
    made = [make_trajectory(issue=issue, sample=sample, attempt=attempt) for sample in samples]
    store.ledger.lease(make_leases(made))
    return made


def keep(store: ExperienceStore, *trajectories: Trajectory) -> None:
    assert len(store.append(trajectories).accepted) == len(trajectories)


def _named(trajectory: Trajectory, name: str) -> Trajectory:
    """Return a trajectory under the id that a refused one is brought back with."""
    own: dict[str, Any] = {"trajectory_id": name, "attempt_id": name}
    steps = tuple(replace(step, **own) for step in trajectory.steps)
    return Trajectory(row=replace(trajectory.row, **own), steps=steps)


def names(reader: RunReader) -> list[str]:
    return [trajectory.row.trajectory_id for trajectory in waiting_trajectories(reader)]


def test_what_nobody_collected_or_discarded_waits_in_order_of_finishing(
    store: ExperienceStore, tmp_path: Path
) -> None:
    late, first = lease(store, 1, 0, 1)
    used, gone = lease(store, 0, 0, 1)
    fork = make_fork(first, 0)
    keep(store, first, fork)
    keep(store, used, gone)
    keep(store, late)
    held_out = make_trajectory(issue=7, purpose=Purpose.EVALUATION)
    back = [_named(one, again(one.row.attempt_id, 1)) for one in lease(store, 5, 0)]
    store.ledger.lease(make_leases([held_out, *back]))
    keep(store, *back)
    keep(store, held_out)
    store.record_update(make_row(UpdateRow, update=1, collected_trajectories=("0.0.0",)), [], [], [])
    store.discard([make_row(DiscardRow, trajectory_id="0.1.0", reason="stale")])
    reader = RunReader.open(tmp_path / "run")
    assert names(reader) == ["1.1.0", "1.1.0/1", "1.0.0"]
    assert [len(t.steps) for t in waiting_trajectories(reader)] == [2, 1, 2]
    store.close()


def test_what_an_update_of_an_older_release_used_does_not_wait(
    store: ExperienceStore, tmp_path: Path
) -> None:
    for issue in range(3):
        keep(store, *lease(store, issue, 0))
    use = make_row(ConsumptionRow, trajectory_id="1.0.0", update=1, source="fresh")
    update = make_row(UpdateRow, update=1, num_trajectories=1, learner_settings="")
    store.record_update(update, [make_row(GroupRow, group_id="g0", update=1)], [], [use])
    assert names(RunReader.open(tmp_path / "run")) == ["2.0.0"]
    store.close()


def test_groups_that_were_under_way_are_those_that_lack_ends(store: ExperienceStore, tmp_path: Path) -> None:
    keep(store, *lease(store, 0, 0, 1))
    for one in lease(store, 0, 2):
        store.ledger.drop(one.row.attempt_id, CUT)
    keep(store, *lease(store, 1, 0))  # complete with one: the others were given up
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
    store.close()
    reader = RunReader.open(tmp_path / "run")
    assert open_issues(reader, wanted=2, issued=3) == [2, 4]
    assert names(reader) == ["0.0.0", "0.1.0", "1.0.0", "2.0.0"]
