import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake.exceptions import CommitFailedError
from maintenance_runs import SETTINGS, add_round, contents, make_run, open_store

from hotpot.errors import RunFolderError, StoreError, UsageError
from hotpot.experience import list_refused, open_run, requeue
from hotpot.experience.lake.lake import Lake
from hotpot.experience.maintenance import compact, delete, read_deletions, vacuum, verify
from hotpot.experience.maintenance.tables import TableFolder
from hotpot.experience.reading.moments import cut_at
from hotpot.ids import task_id
from hotpot.testing.records import ENV_VERSION, make_leases, make_row, make_trajectory
from hotpot.types import VersionRow

# Not in one piece: a manifest holds the changes of a working tree, and with them this file.
SECRET = "-".join(("the", "task", "nobody", "may", "see"))
TOKENS = np.array([61, 7, 61, 7, 61, 7, 61, 7, 13, 13], np.int32)


def secret_trajectory(issue=900):
    """One whose task and tokens are like no other's."""
    content = json.dumps({"note": SECRET})
    one = make_trajectory(issue=issue, num_steps=1)
    step = one.steps[0]
    size = len(TOKENS)
    log_probabilities = np.full(size, -0.25, np.float32)
    shared = {"task_id": task_id("fake", content)}
    changed = replace(
        step, **shared, sampled_tokens=TOKENS, behaviour_logprobs=log_probabilities, model_logprobs=log_probabilities,
        span_stage=(*step.span_stage[:-2], "answer"), span_length=(*step.span_length[:-2], size),
        span_policy_length=(size,),
    )  # fmt: skip
    row = replace(one.row, **shared, task_content=content, num_sampled_tokens=size)
    return replace(one, row=row, steps=(changed,))


def append(store, *trajectories):
    store.ledger.lease(make_leases(trajectories))
    return store.append(trajectories)


def traces(folder):
    """Every file of the run that holds the secret's task or tokens, decoded where it is Parquet."""
    found = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        if path.suffix == ".parquet":
            text = json.dumps(pq.ParquetFile(path).read().to_pylist(), default=str)
        else:
            text = path.read_bytes().decode("latin-1")
        raw = path.read_bytes()
        if SECRET in text or str(TOKENS.tolist()) in text or TOKENS.tobytes() in raw:
            found.append(path.relative_to(folder))
    return found


def keep_evidence(path, trajectories):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"trajectory_id": trajectories, "tokens": [TOKENS.tolist()] * len(trajectories)})
    if "900.0.0" not in trajectories:
        table = table.drop_columns("tokens")
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


@pytest.fixture
def run(tmp_path):
    """A run that holds the secret in older versions too, and a second, refused copy in quarantine."""
    folder = tmp_path / "runs" / "run"
    store = make_run(folder, rounds=3, close=False)
    secret = secret_trajectory()
    assert append(store, secret).accepted == (secret.row.trajectory_id,)
    refused = replace(
        secret_trajectory(901), row=replace(secret_trajectory(901).row, trajectory_id="900.0.0")
    )
    store.ledger.lease(make_leases([secret_trajectory(901)]))
    assert store.append([refused]).quarantined[0][0] == "900.0.0"
    store.flush()
    compact(open_run(folder))
    add_round(store, 3)
    store.close()
    (folder / "cache").mkdir()
    (folder / "cache" / "cold.arrow").write_bytes(SECRET.encode())
    for number, names in enumerate((["900.0.0", "0.0.0"], ["0.0.0"])):
        keep_evidence(folder / "evidence" / "update-000001" / f"step-0-{number}.arrow", names)
    return folder


def remove(folder, trajectory="900.0.0"):
    return delete(open_run(folder), trajectory, reason="asked for by its author", settings=SETTINGS)


def test_nothing_of_it_is_left_but_the_record_that_it_was(run):
    assert len(traces(run)) > 5
    before = contents(open_run(run))
    done = remove(run)
    assert done.deletion.totals() == {"steps": 1, "trajectories": 1, "quarantine": 1}
    assert traces(run) == []
    assert not (run / "cache").exists()
    assert [path.name for path in sorted(run.glob("evidence/*/*"))] == ["step-0-1.arrow"]
    after = contents(open_run(run))
    for name in ("steps", "trajectories", "learned_tokens"):
        assert after[name] == [row for row in before[name] if row["trajectory_id"] != "900.0.0"], name
    assert after["consumptions"] == before["consumptions"]
    assert [row for row in after["attempts"] if row["attempt_id"] == "900.0.0"] != []
    (told,) = read_deletions(open_run(run))
    assert (told.trajectory_id, told.reason) == ("900.0.0", "asked for by its author")
    found = verify(open_run(run), deep=True)
    assert found.good, found.findings
    assert found.counts.deletions == 1
    assert [row["update"] for row in contents(open_run(run).as_of(2))["updates"]] == [1, 2]


def test_a_consumed_one_goes_and_the_run_goes_on(run):
    done = remove(run, "1.2.0")
    assert done.deletion.totals() == {"steps": 3, "trajectories": 1, "learned_tokens": 1}
    with open_store(run, resume=True) as store:
        add_round(store, 50)
    vacuum(open_run(run), retention_hours=0)
    found = verify(open_run(run), deep=True)
    assert found.good, found.findings
    assert (
        open_run(run)
        .sql("SELECT count(*) AS n FROM consumptions WHERE trajectory_id = '1.2.0'")["n"][0]
        .as_py()
        == 1
    )


def test_what_is_still_in_the_log_is_deleted_too(run):
    store = open_store(run, resume=True)
    late = secret_trajectory(902)
    append(store, late)
    with pytest.raises(RunFolderError, match="process"):
        remove(run, "902.0.0")
    store._archive.close(timeout_s=10.0)  # killed: nothing is archived, the lock is let go
    store._lock_file.release()
    remove(run, "902.0.0")
    remove(run)
    assert traces(run) == []
    assert verify(open_run(run), deep=True).good


def test_it_is_repeated_and_refused_in_words(run):
    remove(run)
    again = remove(run)
    assert again.removed_files == 0
    assert len(read_deletions(open_run(run))) == 1
    with pytest.raises(UsageError, match="has no trajectory"):
        remove(run, "77.0.0")
    with pytest.raises(UsageError, match="reason"):
        delete(open_run(run), "1.2.0", reason=" ", settings=SETTINGS)


def test_one_after_the_other_goes_and_asking_again_is_no_error(run):
    with open_store(run, resume=True) as store:
        append(store, secret_trajectory(910), secret_trajectory(911))
    for trajectory_id in ("910.0.0", "911.0.0", "900.0.0"):
        remove(run, trajectory_id)
    left = open_run(run).table("steps", ["trajectory_id"])["trajectory_id"].to_pylist()
    assert not {"910.0.0", "911.0.0", "900.0.0"} & set(left)
    assert verify(open_run(run)).good


class Failing:
    """A table handle whose deletions and compactions fail with ``error`` as often as ``times`` says."""

    def __init__(self, handle, error, times):
        self._handle, self._error, self._times = handle, error, times

    def __getattr__(self, name):
        if name in ("delete", "optimize") and self._times:
            self._times.pop()
            raise self._error
        return getattr(self._handle, name)


def fail(monkeypatch, error, times):
    opened, left = Lake.open_table, [None] * times
    monkeypatch.setattr(
        Lake, "open_table", lambda lake, name: (found := opened(lake, name)) and Failing(found, error, left)
    )


def test_a_deletion_stands_another_writers_commit_and_failing_storage_is_an_error_of_ours(run, monkeypatch):
    with monkeypatch.context() as patched:
        fail(patched, OSError("io"), 1)
        with pytest.raises(StoreError, match="io; check the storage"):
            compact(open_run(run))
        fail(patched, CommitFailedError("conflict"), 100)
        with pytest.raises(StoreError, match="conflict"):
            remove(run)
    fail(monkeypatch, CommitFailedError("conflict"), 2)
    remove(run)
    assert traces(run) == []


def test_a_moment_in_a_lake_that_cannot_be_read_is_an_error_of_ours(run):
    for path in (run / "lake" / "segments").rglob("*.parquet"):
        path.write_bytes(b"")
    with pytest.raises(StoreError, match="restore"):
        cut_at(open_run(run).lake, 1, 1)


def test_what_is_rewritten_is_on_the_device_before_what_it_replaces_goes(run, monkeypatch):
    seen = []
    open_run(run).lake.open_table("steps").create_checkpoint()

    def note(owner, name, kind, place):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (seen.append((kind, place(*given))), real(*given))[1])

    note(os, "fsync", "sync", lambda number: str(Path(f"/proc/self/fd/{number}").readlink()))
    note(TableFolder, "replace", "replace", lambda folder, path, _: f"{folder.root}/{path}")
    note(TableFolder, "remove", "remove", lambda folder, path: f"{folder.root}/{path}")
    remove(run)
    replaced = [place for place, (kind, _) in enumerate(seen) if kind == "replace"]
    assert replaced
    for place in replaced:
        assert seen[place + 1][0] == "sync"
        assert seen[place + 1][1].endswith(".draft")
    gone = [at for at, (kind, path) in enumerate(seen) if kind == "remove" and ".checkpoint" in path]
    for place in gone:
        folder = seen[place][1].rpartition("/")[0]
        synced = [path for kind, path in seen[replaced[0] : place] if kind == "sync"]
        assert [path for path in synced if path.startswith(folder) and ".checkpoint." in path]
    assert gone


def test_the_refusals_a_requeued_one_came_back_from_go_with_it(run):
    before = open_run(run).table("quarantine").num_rows
    with open_store(run, resume=True) as store:
        store.record([make_row(VersionRow, kind="env", version="other@1+0")])
        late = secret_trajectory(950)
        assert not append(store, late, late).accepted
        ids = [one.quarantine_id for one in list_refused(open_run(run)) if one.record_id == "950.0.0"]
        requeue(store, ids[:1])  # refused once more
        store.record([make_row(VersionRow, kind="env", version=ENV_VERSION)])
        ((_, name),) = requeue(store, ids[1:]).accepted
    assert name != "950.0.0"
    remove(run)
    assert remove(run, "950.0.0").accepted_as == (name,)
    assert traces(run)
    assert remove(run, name).accepted_as == ()
    assert traces(run) == []
    assert open_run(run).table("quarantine").num_rows == before - 1
    assert remove(run, name).removed_files == 0
    assert verify(open_run(run), deep=True).good
