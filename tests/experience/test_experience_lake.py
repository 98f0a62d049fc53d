"""One lake of several runs on a local folder, lakes of the layout before, and the disk budget."""

import os
import subprocess
import threading
import zipfile
from contextlib import contextmanager
from pathlib import Path

import duckdb
import numpy as np
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from hotpot.config import StoreSection
from hotpot.errors import DiskBudgetError, RunFolderError, StoreError, UsageError
from hotpot.experience import ExperienceStore, open_run, to_table
from hotpot.experience.lake import budget as budget_module
from hotpot.experience.lake import lake as lake_module
from hotpot.experience.lake.lake import Lake
from hotpot.experience.lake.storage import LakeLocation
from hotpot.experience.run_folder import places as places_module
from hotpot.testing.records import make_group, make_leases, make_row
from hotpot.types import ConsumptionRow, EventRow

STORED = Path(__file__).parent.parent / "data" / "lakes" / "v1.zip"


def open_store(folder, **settings):
    return ExperienceStore.open(
        folder,
        run_id=folder.name,
        settings=StoreSection(**settings),
        vocabulary_size=64,
        resume=(folder / "manifest.json").exists(),
    )


def append(store, issue=0, size=4):
    group = make_group(issue=issue, size=size, run_id=store.run_folder.name)
    store.ledger.lease(make_leases(group))
    return store.append(group)


def test_runs_share_a_lake_at_the_same_time_and_each_sees_its_own(tmp_path):
    lake = tmp_path / "lake"
    names = ("a", "b.1", "b")

    def work(name):
        with open_store(tmp_path / "runs" / name, lake=str(lake), archive_every_batches=1) as store:
            for issue in range(6):
                append(store, issue)
                store.flush()

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in names:
        for reader in (open_run(tmp_path / "runs" / name), open_run(f"{lake}#{name}")):
            rows = reader.table("trajectories", ["trajectory_id", "run_id"])
            assert set(rows["run_id"].to_pylist()) == {name}
            assert len(rows) == len(set(rows["trajectory_id"].to_pylist())) == 24
            assert reader.sql("SELECT count(*) n FROM events").to_pylist() == [{"n": 0}]
    assert DeltaTable(str(lake / "trajectories")).metadata().partition_columns == ["_run"]
    with pytest.raises(RunFolderError, match=r"holds 3 runs.*a, b, b\.1"):
        open_run(lake)
    with pytest.raises(RunFolderError, match=r"store\.lake says"):
        open_store(tmp_path / "runs" / "a")


def commit(lake, table, segment, rows):
    return lake.commit(table, segment, rows, np.arange(rows.num_rows))


def test_a_commit_that_lost_to_another_change_is_tried_again_on_the_newer_table(tmp_path, monkeypatch):
    lakes = [Lake(LakeLocation.of(tmp_path / "lake"), writer=name) for name in ("a", "b")]
    rows = to_table("events", [make_row(EventRow)])
    assert commit(lakes[0], "events", 1, rows)
    real, refusals = lake_module.write_deltalake, []

    def write(lake, segment):
        monkeypatch.setattr(lake_module, "write_deltalake", real)
        assert commit(lake, "events", segment, rows)
        monkeypatch.setattr(lake_module, "write_deltalake", lost)

    def lost(*arguments, **keywords):
        if len(refusals) < 3:
            refusals.append(1)
            if len(refusals) == 1:
                write(lakes[1], 1)
            raise CommitFailedError("a concurrent transaction deleted data this operation read")
        return real(*arguments, **keywords)

    monkeypatch.setattr(lake_module, "write_deltalake", lost)
    assert commit(lakes[0], "events", 2, rows)
    monkeypatch.setattr(lake_module, "write_deltalake", real)
    assert not commit(lakes[0], "events", 2, rows)
    refusals.clear()

    def never(*_, **__):
        refusals.append(1)
        raise CommitFailedError("lost again")

    monkeypatch.setattr(lake_module, "write_deltalake", never)
    with pytest.raises(CommitFailedError):
        commit(lakes[0], "events", 3, rows)
    assert len(refusals) == lake_module.COMMIT_TRIES


@pytest.mark.parametrize("how", ["compact", "delete"])
def test_appending_goes_on_while_others_rewrite_the_table(tmp_path, how):
    lake = Lake(LakeLocation.of(tmp_path / "lake"), writer="run")
    other = Lake(LakeLocation.of(tmp_path / "lake"), writer="run")
    for segment in range(1, 25):
        rows = to_table("events", [make_row(EventRow, update=segment)] * 3)
        assert commit(lake, "events", segment, rows)
        assert lake.publish(segment, {"events": 3})
        if segment % 6 == 0:
            table = other.open_table("events")
            if how == "compact":
                table.optimize.compact()
            else:
                table.delete(f'"update" = {segment - 1}')
    paths = list(lake.files("events").paths)
    (found,) = duckdb.sql(f"SELECT count(*), count(DISTINCT _segment) FROM read_parquet({paths})").fetchall()
    assert found == ((72, 24) if how == "compact" else (60, 20))
    assert lake.watermark() == other.watermark() == 24


@pytest.mark.slow
def test_two_writers_and_a_compaction_at_the_same_time_lose_and_repeat_nothing(tmp_path):
    location, stop, compactions, failures = LakeLocation.of(tmp_path / "lake"), threading.Event(), [], []

    def write(name):
        lake = Lake(location, writer=name)
        for segment in range(1, 21):
            assert commit(
                lake, "events", segment, to_table("events", [make_row(EventRow, update=segment)] * 2)
            )
            assert lake.publish(segment, {"events": 2})

    def compact():
        lake = Lake(location, writer="a")
        while not stop.is_set():
            for name in ("events", "segments"):
                table = lake.open_table(name)
                if table is not None:
                    compactions.append(table.optimize.compact()["numFilesRemoved"])

    def watched(work, *arguments):
        try:
            work(*arguments)
        except BaseException as error:
            failures.append(error)
            raise

    writers = [threading.Thread(target=watched, args=(write, name)) for name in ("a", "b")]
    compaction = threading.Thread(target=watched, args=(compact,))
    for thread in (*writers, compaction):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    compaction.join()
    assert failures == []
    assert sum(compactions) > 0
    for name in ("a", "b"):
        lake = Lake(location, writer=name)
        paths = list(lake.files("events").paths)
        query = f'SELECT count(*), count(DISTINCT (_segment, _row)), min("update" = _segment) FROM read_parquet({paths})'
        assert duckdb.sql(query).fetchall() == [(40, 40, True)]
        assert lake.watermark() == 20


def test_a_lake_of_the_layout_before_is_read_and_written_in_its_own_layout(tmp_path):
    with zipfile.ZipFile(STORED) as stored:
        stored.extractall(tmp_path)
    (folder,) = tmp_path.rglob("closed")
    lake = Lake(LakeLocation.of(folder / "lake"), writer="run")
    mark = lake.watermark()
    assert mark >= 2
    before = lake.open_table("consumptions").count()
    row = make_row(ConsumptionRow, weight=0.25)
    assert not commit(lake, "consumptions", 1, to_table("consumptions", [row]))
    assert commit(lake, "consumptions", mark + 1, to_table("consumptions", [row]))
    assert lake.publish(mark + 1, {"consumptions": 1})
    assert lake.watermark() == mark + 1
    table = lake.open_table("consumptions")
    assert table.metadata().partition_columns == []
    files = lake.files("consumptions").paths
    assert all(Path(path).is_file() for path in files)
    weights = duckdb.sql(f"SELECT weight FROM read_parquet({list(files)}, union_by_name = true)").fetchall()
    assert sorted(weights, key=str) == sorted([(None,)] * before + [(0.25,)], key=str)


def test_a_place_is_a_folder_or_a_bucket(tmp_path, monkeypatch):
    assert LakeLocation.of(tmp_path / "lake/").uri == f"{tmp_path}/lake"
    assert LakeLocation.of("s3://bucket/a/b/").uri == "s3://bucket/a/b"
    for wrong in ("gs://bucket", "s3://", "s3:///prefix"):
        with pytest.raises(UsageError):
            LakeLocation.of(wrong)
    for endpoint, words in (
        ("http://127.0.0.1:1", "allow_http"),
        ("https://joe:hunter2@host", "no user or password"),
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(UsageError, match=words) as caught:
            LakeLocation.of("s3://bucket/a")
        assert "hunter2" not in str(caught.value)
    with pytest.raises(UsageError, match=r"no user or password.*bucket/a") as caught:
        LakeLocation.of("s3://joe:hunter2@bucket/a")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(UsageError, match="can't name a partition"):
        Lake(LakeLocation.of(tmp_path), writer="../other")


@pytest.mark.parametrize("lake", [None, "lake"])
def test_the_run_stops_in_order_before_it_takes_more_than_its_bytes(tmp_path, lake):
    folder = tmp_path / "run"
    place = None if lake is None else str(tmp_path / lake)
    limits = {"lake": place, "max_bytes": 400_000, "archive_every_batches": 2}
    store, kept = open_store(folder, **limits), 0
    issue, stopped = 0, None
    while stopped is None and issue < 200:
        try:
            kept += len(append(store, issue).accepted)
            if issue % 2:
                store.flush()  # what waits in the log takes several times the bytes: how much does would be chance
        except DiskBudgetError as error:
            stopped = str(error)
        issue += 1
    assert "store.max_bytes allows 0.4 MiB" in stopped
    assert "hotpot lake" in stopped
    store.close()
    assert 40 < kept < 800
    assert open_run(folder).table("trajectories").num_rows == kept
    data = (path for path in tmp_path.rglob("*.parquet") if path.parent.name.startswith("_run="))
    taken = sum(path.stat().st_size for path in data)
    assert 100_000 < taken < 400_000
    with open_store(folder, **{**limits, "max_bytes": 800_000}) as store:
        assert append(store, 500).accepted


def test_the_run_stops_in_order_before_the_disk_is_full(tmp_path, monkeypatch):
    folder, free = tmp_path / "run", [300 * 2**20]
    monkeypatch.setattr(budget_module, "_free_bytes", lambda _: free[0])
    store = open_store(folder)
    append(store, 0)
    free[0] = 256 * 2**20
    with pytest.raises(DiskBudgetError, match=r"256\.0 MiB free.*store\.min_free_bytes"):
        append(store, 1)
    store.close()
    assert open_run(folder).table("trajectories").num_rows == 4
    states = open_run(folder).sql("SELECT state, count(*) n FROM attempts GROUP BY 1 ORDER BY 1").to_pylist()
    assert states == [{"state": "dropped", "n": 4}, {"state": "finished", "n": 4}]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MB, mounted for the test; a function that mounts it anew with other options."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(options):
        return subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], check=False, capture_output=True
        )

    if mount("size=1m").returncode:
        pytest.skip("mounting a small disk is not allowed here")
    yield disk, lambda options: mount(f"remount,{options}").check_returncode()
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("how", ["full", "read_only"])
def test_a_lake_whose_disk_takes_nothing_is_ridden_out_and_heals(tmp_path, small_disk, how, monkeypatch):
    monkeypatch.setattr("hotpot.experience.lake.health.FIRST_PAUSE_S", 0.01)
    disk, remount = small_disk
    ballast = disk / "ballast"
    with open_store(
        tmp_path / "run", lake=str(disk / "lake"), archive_every_batches=1, min_free_bytes=0
    ) as store:
        append(store, 0)
        store.flush()
        if how == "full":
            with pytest.raises(OSError, match="No space"):
                ballast.write_bytes(bytes(2**20))
        else:
            remount("ro")
        for issue in range(1, 5):
            append(store, issue)
        with pytest.raises(StoreError, match=r"No space|os error 28|Read-only|os error 30"):
            store.flush(timeout_s=1.0)
        assert store.archive_status().tries > 1
        reader = open_run(tmp_path / "run")
        assert reader.table("trajectories").num_rows == 20
        remount("size=64m" if how == "full" else "rw")
    assert not list((tmp_path / "run" / "wal").iterdir())
    assert reader.table("trajectories").num_rows == 20
    assert sorted(reader.table("events", ["kind"]).column(0).to_pylist()) == [
        "archive_failing",
        "archive_healed",
    ]


def event(kind):
    return make_row(EventRow, run_id="run", kind=kind)


def kinds(folder):
    return open_run(folder).table("events", ["kind"]).column(0).to_pylist()


def test_an_id_names_one_run_in_a_lake(tmp_path, monkeypatch):
    lake, first, other = str(tmp_path / "lake"), tmp_path / "a" / "run", tmp_path / "b" / "run"
    living = open_store(first, lake=lake)
    living.record([event("first")])
    for _ in range(2):  # refused, it leaves no folder that looks like a run's
        with pytest.raises(RunFolderError, match=r"holds another run 'run'.*choose another run id"):
            open_store(other, lake=lake)
    # At the same moment: both have looked, and found the id free.
    monkeypatch.setattr("hotpot.experience.store.check_unclaimed", lambda *_: None)
    real, seen = places_module._claim, [None]
    monkeypatch.setattr(places_module, "_claim", lambda *_: seen.pop() if seen else real(*_))
    with pytest.raises(RunFolderError, match="holds another run 'run'"):
        open_store(other, lake=lake)
    monkeypatch.undo()
    with pytest.raises(RunFolderError, match="holds another run 'run'"):
        open_store(other, lake=lake)
    living.close()
    with open_store(first, lake=lake) as resumed:
        resumed.record([event("resumed")])
    assert kinds(first) == ["first", "resumed"]
    # A lake whose copies of manifests are gone still knows whose segments it holds.
    (tmp_path / "lake" / "_runs" / "run.json").unlink()
    with pytest.raises(RunFolderError, match="holds another run 'run'"):
        open_store(tmp_path / "c" / "run", lake=lake)
    open_store(first, lake=lake).close()
    assert [path.name for path in (tmp_path / "lake" / "_runs").iterdir()] == ["run.json"]


ODD = ["a]b", "[", "a|b", "a^b", "a\\b", "a%20b", "%c3%bc", "a\nb"]
PLAIN = ["a b", "ü", "100%", "%zz", "x#y", "q*z", "p?t", "{a}", "a:b", "<x>", '"', "~"]


@pytest.mark.parametrize("name", ODD)
def test_a_path_that_delta_misreads_is_refused_before_anything_is_made(tmp_path, name):
    folder, fine = tmp_path / name / "run", tmp_path / "fine" / "run"
    with pytest.raises(UsageError, match=r"can't lie at .*store\.lake"):
        open_store(folder)
    with pytest.raises(UsageError, match="can't lie at"):
        open_store(fine, lake=str(tmp_path / name))
    with pytest.raises(UsageError, match="can't lie at"):
        LakeLocation.of(f"s3://bucket/{name}")
    assert not list(tmp_path.iterdir())
    # The run folder itself may be called so.
    with open_store(folder, lake=str(tmp_path / "lake")) as store:
        store.record([event("kept")])
    assert kinds(folder) == ["kept"]


@pytest.mark.parametrize("name", PLAIN)
def test_any_other_path_works(tmp_path, name):
    with open_store(tmp_path / name / "run") as store:
        store.record([event("kept")])
    assert kinds(tmp_path / name / "run") == ["kept"]


def test_a_new_run_without_credentials_leaves_nothing(tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.*set them"):
            open_store(tmp_path / "run", lake="s3://bucket/lake")
    assert not list(tmp_path.iterdir())


def test_what_changes_while_the_folders_are_looked_at_is_not_forgotten(tmp_path, monkeypatch):
    names = ("a", "gone", "z")
    for name in names:
        (tmp_path / name).write_bytes(bytes(100))
    most = budget_module.FOOTERS + 250
    budget = budget_module.DiskBudget(tmp_path, None, partition=None, max_bytes=most, min_free_bytes=0)
    real = os.scandir

    @contextmanager
    def meanwhile(folder):
        with real(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        (tmp_path / "gone").unlink()
        budget.appended(40)
        yield entries

    monkeypatch.setattr(budget_module.os, "scandir", meanwhile)
    budget.measure()
    budget.check(10)
    with pytest.raises(DiskBudgetError):
        budget.check(11)
