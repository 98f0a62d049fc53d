"""An exception that no code expects, in the midst of an acknowledgement: nothing is acknowledged on top of it."""

from pathlib import Path

import pytest

from hotpot.config import StoreSection
from hotpot.errors import StoreError
from hotpot.experience import ExperienceStore, open_run
from hotpot.testing.faults import Fault, FaultPlan, InjectedCrash, Kind, injected
from hotpot.testing.records import make_group, make_leases


def opened(folder: Path, *, resume: bool = False) -> ExperienceStore:
    return ExperienceStore.open(
        folder, run_id="run", settings=StoreSection(), vocabulary_size=64, resume=resume
    )


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("log_write", "half-written"),
        ("wal_written", "half-written"),
        ("log_sync", "half-written"),
        ("before_ledger", "disagree"),
        ("after_ledger", "disagree"),
    ],
)
def test_nothing_is_appended_behind_what_broke_unforeseen(tmp_path: Path, place: str, told: str) -> None:
    folder, groups = tmp_path / "run", [make_group(issue=issue) for issue in range(3)]
    store = opened(folder)
    for group in groups:
        store.ledger.lease(make_leases(group))
    assert len(store.append(groups[0]).accepted) == 8
    plan = FaultPlan(faults=(Fault(kind=Kind.CRASH, place=place),), log=tmp_path / "bites")
    with injected(plan), pytest.raises(InjectedCrash):
        store.append(groups[1])
    with pytest.raises(StoreError, match=told):
        store.append(groups[2])
    with pytest.raises(StoreError, match=told):
        store.close()

    with opened(folder, resume=True) as store:
        finished, leased = store.ledger.counts().finished, store.ledger.counts().leased
        assert leased == 0
    # The frame that broke is there whole or not at all; its attempts say the same.
    assert finished in (8, 16)
    reader = open_run(folder)
    assert reader.table("trajectories").num_rows == finished
    states = reader.sql("SELECT count(*) AS n FROM attempts WHERE state = 'finished'").to_pylist()
    assert states[0]["n"] == finished


def test_a_write_that_the_disk_refused_is_cut_off_and_the_log_goes_on(tmp_path: Path) -> None:
    folder, groups = tmp_path / "run", [make_group(issue=issue) for issue in range(2)]
    plan = FaultPlan(faults=(Fault(kind=Kind.FAIL, place="wal_written"),), log=tmp_path / "bites")
    with opened(folder) as store:
        store.ledger.lease(make_leases(groups[0]))
        store.ledger.lease(make_leases(groups[1]))
        with injected(plan), pytest.raises(StoreError, match="can't append to log segment"):
            store.append(groups[0])
        assert len(store.append(groups[1]).accepted) == 8
        assert len(store.append(groups[0]).accepted) == 8
    assert open_run(folder).table("trajectories").num_rows == 16
