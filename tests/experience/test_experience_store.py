import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, DeltaProtocolError, SchemaMismatchError

from hotpot.config import StoreSection
from hotpot.errors import (
    BacklogError,
    CorruptRecordError,
    LedgerError,
    RecipeError,
    RunFolderError,
    StoreError,
)
from hotpot.experience import ExperienceStore, open_run, read_manifest
from hotpot.experience.disk import FolderSync
from hotpot.experience.lake import archive as archive_module
from hotpot.experience.lake import lake as lake_module
from hotpot.experience.lake.archive import Archive, Thresholds
from hotpot.experience.lake.health import ArchiveHealth
from hotpot.experience.lake.storage import LakeLocation
from hotpot.experience.log import wal as wal_module
from hotpot.experience.log.ledger import Ledger
from hotpot.testing.killable import Died, KillableWriter
from hotpot.testing.records import make_group, make_leases, make_row, make_trajectory
from hotpot.timeline import Timeline
from hotpot.types import (
    ConsumptionRow,
    DiscardRow,
    EventRow,
    GroupRow,
    LearnedTokensRow,
    MetricRow,
    QuarantineRow,
    StepRow,
    UpdateRow,
    VersionRow,
)


def open_store(folder, **keywords):
    settings = keywords.pop("settings", {})
    return ExperienceStore.open(
        folder, run_id="run", settings=StoreSection(**settings), vocabulary_size=64, **keywords
    )


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "run"


@pytest.fixture
def store(folder):
    store = open_store(folder)
    yield store
    store.close()


def append(store, trajectories):
    store.ledger.lease(make_leases(trajectories))
    return store.append(trajectories)


def count(folder, table, where="true"):
    return open_run(folder).sql(f"SELECT count(*) AS n FROM {table} WHERE {where}").to_pylist()[0]["n"]


def test_appended_is_seen_at_once_and_at_rest(store, folder):
    group = make_group(size=4, num_steps=3)
    report = append(store, group)
    assert report.accepted == ("0.0.0", "0.1.0", "0.2.0", "0.3.0")
    assert report.quarantined == ()
    assert (count(folder, "trajectories"), count(folder, "steps")) == (4, 12)
    assert store.ledger.counts().finished == 4
    store.close()
    assert (count(folder, "trajectories"), count(folder, "steps")) == (4, 12)
    assert list((folder / "wal").iterdir()) == []
    table = DeltaTable(str(folder / "lake" / "steps"))
    fields = {field["name"]: field for field in json.loads(table.schema().to_json())["fields"]}
    assert fields["prompt_tokens"]["metadata"]["unit"] == "token ids"
    assert all(field["metadata"]["meaning"] for field in fields.values())
    assert table.metadata().configuration["delta.checkpointInterval"] == "10"


def test_refused_records_go_to_quarantine_and_their_attempts_are_dropped(store, folder):
    good, bad = make_trajectory(), make_trajectory(sample=1)
    bad = dataclasses.replace(bad, row=dataclasses.replace(bad.row, num_steps=7, actor_id="actor-0"))
    report = append(store, [good, bad])
    assert report.accepted == ("0.0.0",)
    assert report.quarantined == (("0.1.0", "sums"),)
    (row,) = open_run(folder).table("quarantine").to_pylist()
    assert (row["record_id"], row["reason"], row["producer"]) == ("0.1.0", "sums", "actor-0")
    assert len(json.loads(row["payload"])["steps"]) == 2
    (attempt,) = open_run(folder).sql("SELECT * FROM attempts WHERE attempt_id = '0.1.0'").to_pylist()
    assert (attempt["state"], attempt["reason"]) == ("dropped", "quarantined:sums")
    assert count(folder, "trajectories") == 1


def test_a_record_too_broken_to_name_its_attempt_is_kept_too(store, folder):
    report = store.append([None, dataclasses.replace(make_trajectory(), row=None)])
    assert [reason for _, reason in report.quarantined] == ["wrong_type", "wrong_type"]
    assert count(folder, "quarantine") == 2


def test_only_leased_attempts_are_taken_and_then_nothing_of_the_call_is_kept(store, folder):
    group = make_group(size=2)
    store.ledger.lease(make_leases(group[:1]))
    with pytest.raises(LedgerError, match=r"0\.1\.0.*never leased"):
        store.append(group)
    assert count(folder, "trajectories") == 0
    assert store.ledger.counts().leased == 1
    store.append(group[:1])
    with pytest.raises(LedgerError, match="finished already"):
        store.append(group[:1])
    assert count(folder, "trajectories") == 1


def test_an_update_is_one_atomic_record(store, folder):
    group = make_group(size=4)
    ids = append(store, group).accepted
    used = [make_row(ConsumptionRow, trajectory_id=i, update=1) for i in ids]
    store.record_update(
        make_row(UpdateRow, update=1, num_trajectories=4),
        [make_row(GroupRow, group_id="g0", update=1)],
        [make_row(LearnedTokensRow, update=1, trajectory_id=i) for i in ids],
        used,
        [make_row(MetricRow, name="memory")],
    )
    for table, rows in (
        ("updates", 1),
        ("groups", 1),
        ("learned_tokens", 4),
        ("consumptions", 4),
        ("metrics", 1),
    ):
        assert count(folder, table) == rows
    with pytest.raises(LedgerError, match="recorded before"):
        store.record_update(make_row(UpdateRow, update=1), [], [], [])
    with pytest.raises(LedgerError, match="once"):
        store.record_update(
            make_row(UpdateRow, update=2), [], [], [dataclasses.replace(row, update=2) for row in used] * 2
        )
    assert count(folder, "updates") == 1


def test_discards_and_what_is_told_of_them_are_one_record(store, folder):
    ids = append(store, make_group(size=3)).accepted
    rows = [make_row(DiscardRow, trajectory_id=i, reason="stale", staleness=4) for i in ids[:2]]
    store.discard(rows, [make_row(EventRow, kind="discarded")])
    store.discard([], [make_row(EventRow, kind="queue")])
    store.discard([])
    assert (count(folder, "discards"), count(folder, "events")) == (2, 2)
    with pytest.raises(LedgerError, match="discarded before"):
        store.discard([make_row(DiscardRow, trajectory_id=i) for i in ids], [make_row(EventRow)])
    with pytest.raises(StoreError, match="record_update only"):
        store.discard([make_row(DiscardRow, trajectory_id=ids[2])], [make_row(ConsumptionRow)])
    assert (count(folder, "discards"), count(folder, "events")) == (2, 2)
    with pytest.raises(LedgerError, match="can't be consumed as fresh"):
        store.record_update(
            make_row(UpdateRow, update=1),
            [],
            [],
            [make_row(ConsumptionRow, trajectory_id=ids[0], update=1, source="fresh")],
        )


@pytest.mark.parametrize("place", ["wal_written", "before_ledger", "after_ledger"])
def test_discards_whose_process_died_are_there_for_both_or_for_neither(tmp_path, place):
    with KillableWriter(tmp_path / "run") as writer:
        writer.ask("open")
        writer.ask("lease", issue=0, size=2)
        (kept, gone), _ = writer.ask("append", issue=0, first=0, count=2)
        writer.ask("arm", place=place)
        with pytest.raises(Died):
            writer.ask("discard", ids=[gone])
    with open_store(tmp_path / "run", resume=True) as store:
        there = count(tmp_path / "run", "discards")
        assert there == 1, "the frame was in the log"
        with pytest.raises(LedgerError, match="discarded before"):
            store.discard([make_row(DiscardRow, trajectory_id=gone)])
        store.discard([make_row(DiscardRow, trajectory_id=kept)])
    assert count(tmp_path / "run", "discards") == 2


def test_record_takes_what_has_no_call_of_its_own(store, folder):
    store.record(
        [make_row(EventRow), make_row(VersionRow), make_row(MetricRow, value=1.5), make_row(QuarantineRow)]
    )
    store.record([])
    for table in ("events", "versions", "metrics", "quarantine"):
        assert count(folder, table) == 1
    for row, words in (
        (make_row(StepRow), "append"),
        (make_row(ConsumptionRow), "record_update"),
        (make_row(DiscardRow), "discard only"),
        (make_row(MetricRow, value="high"), r"metrics\.value"),
        (make_row(MetricRow, run_id="other"), "other"),
        (make_row(MetricRow, schema_version=9), "9"),
        (object(), "not a row"),
    ):
        with pytest.raises(StoreError, match=words):
            store.record([row])


def test_secrets_do_not_reach_the_log(store, folder):
    key = "sk-abcdefghij0123456789"
    store.record(
        [make_row(EventRow, detail=f'{{"header":"{key}"}}'), make_row(VersionRow, sources=f"key = '{key}'")]
    )
    bad = make_trajectory()
    bad = dataclasses.replace(bad, row=dataclasses.replace(bad.row, task_content=f"tell me {key}"))
    store.ledger.lease(make_leases([bad]))
    report = store.append([bad])
    assert report.redactions == 1
    assert all(key.encode() not in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    store.close()
    assert "[redacted:api_key]" in open_run(folder).table("quarantine", ["payload"]).to_pylist()[0]["payload"]


def test_secrets_do_not_reach_attempts_or_the_manifest(folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hotpot", "--set", "environment.token=ticket-77"])
    settings = {"redact_patterns": (r"ticket-\d+",)}
    group = make_group(size=3)
    with open_store(folder, settings=settings, recipe='{"token":"ticket-77","password":"pw"}') as store:
        store.ledger.lease(make_leases(group))
        store.ledger.fail("0.0.0", "HTTP 401 for ticket-77, password=hunter2")
        store.ledger.drop("0.1.0", "gave up on ticket-77")
        store.append(group[2:])
        assert all(b"ticket-77" not in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    reasons = open_run(folder).table("attempts", ["reason"], where="reason != ''").column(0).to_pylist()
    assert reasons == [
        "HTTP 401 for [redacted:custom], password=[redacted:password]",
        "gave up on [redacted:custom]",
    ]
    assert all(b"ticket-77" not in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    recipe = json.loads(read_manifest(folder).recipe)
    assert recipe == {"token": "[redacted:custom]", "password": "[redacted:password]"}


def test_an_event_stays_json_when_a_secret_is_taken_out(store, folder):
    store.record([make_row(EventRow, detail='{"api_key":"abc","n":1}')])
    (row,) = open_run(folder).table("events").to_pylist()
    assert json.loads(row["detail"]) == {"api_key": "[redacted:password]", "n": 1}


def test_closing_ends_what_is_still_leased(store, folder):
    store.ledger.lease(make_leases(make_group(size=3)))
    store.ledger.fail("0.0.0", "broke")
    states = "SELECT state, reason, count(*) AS n FROM attempts GROUP BY ALL ORDER BY ALL"
    assert open_run(folder).sql(states).to_pylist() == [
        {"state": "failed", "reason": "broke", "n": 1},
        {"state": "leased", "reason": "", "n": 2},
    ]
    store.close()
    store.close()
    assert open_run(folder).sql(states).to_pylist() == [
        {"state": "dropped", "reason": "run_ended", "n": 2},
        {"state": "failed", "reason": "broke", "n": 1},
    ]
    with pytest.raises(StoreError, match="closed"):
        store.record([make_row(EventRow)])


def test_resuming_goes_on_where_the_run_was(folder):
    with open_store(folder, recipe='{"name":"x"}', seed=7) as store:
        append(store, make_group(issue=0))
        store.ledger.advance("issue", 0)
    with open_store(folder, resume=True) as store:
        assert store.ledger.mark("issue") == 0
        append(store, make_group(issue=1))
    assert count(folder, "trajectories") == 16
    assert count(folder, "events", "kind = 'recovered'") == 0
    manifest = read_manifest(folder)
    assert (manifest.run_id, manifest.seed, manifest.recipe) == ("run", 7, '{"name":"x"}')
    assert "pyarrow" in manifest.packages


def test_a_second_writer_is_refused_while_the_first_lives(store, folder):
    with pytest.raises(RunFolderError, match=f"process {os.getpid()}"):
        open_store(folder, resume=True)
    append(store, make_group())
    script = (
        "import sys; from pathlib import Path; from hotpot.config import StoreSection\n"
        "from hotpot.experience import ExperienceStore\nfrom hotpot.errors import RunFolderError\n"
        "try:\n ExperienceStore.open(Path(sys.argv[1]), run_id='run', settings=StoreSection(), vocabulary_size=64, resume=True)\n"
        "except RunFolderError as error:\n sys.exit(str(error))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "one writer" in done.stderr


def test_a_superseded_writer_can_write_no_more(store, folder):
    append(store, make_group(issue=0))
    usurper = Ledger(folder / "control.sqlite", "run")
    with pytest.raises(LedgerError, match="superseded"):
        append(store, make_group(issue=1))
    usurper.close(ended=False)
    with pytest.raises(StoreError):
        store.close()


def test_folders_that_cannot_be_used(tmp_path, folder):
    with pytest.raises(RunFolderError, match="does not exist"):
        open_store(folder, resume=True)
    assert not folder.exists()
    with pytest.raises(RunFolderError, match="does not exist"):
        open_run(folder)
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="file"):
        open_store(tmp_path / "file" / "run")
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="not empty"):
        open_store(other)
    with pytest.raises(RunFolderError, match="no run folder"):
        open_store(other, resume=True)
    with pytest.raises(RunFolderError, match="no run folder"):
        open_run(other)
    open_store(folder).close()
    with pytest.raises(RunFolderError, match="choose another run id"):
        open_store(folder)
    with pytest.raises(RunFolderError, match="belongs to run 'run'"):
        ExperienceStore.open(folder, run_id="else", settings=StoreSection(), vocabulary_size=64, resume=True)
    with pytest.raises(RecipeError):
        open_store(tmp_path / "new", settings={"redact_patterns": ("(",)})
    assert not (tmp_path / "new").exists()


def test_a_folder_without_write_permission(tmp_path, monkeypatch):
    folder = tmp_path / "read_only"
    folder.mkdir()
    folder.chmod(0o555)
    if os.geteuid() == 0:  # root may write anywhere; the question it is asked with is what is replaced
        monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(RunFolderError, match="can't be written"):
        open_store(folder)
    assert list(folder.iterdir()) == []
    folder.chmod(0o755)


def test_a_process_killed_before_its_manifest_leaves_a_usable_folder(folder):
    folder.mkdir(parents=True)
    (folder / "owner.lock").write_text("process 1")
    (folder / "manifest.json.draft").write_text("{")
    open_store(folder).close()


def test_lost_log_segments_are_noticed(folder):
    store = open_store(folder)
    append(store, make_group())
    (segment,) = (folder / "wal").iterdir()
    saved = segment.read_bytes()
    copy = folder.with_name("copy")
    subprocess.run(["cp", "-r", str(folder), str(copy)], check=True)
    store.close()
    lost = copy / "wal" / segment.name
    lost.unlink()
    with pytest.raises(CorruptRecordError, match="neither in"):
        open_store(copy, resume=True)
    lost.write_bytes(saved[:-100])
    with pytest.raises(CorruptRecordError, match="acknowledged"):
        open_store(copy, resume=True)
    lost.write_bytes(saved)
    open_store(copy, resume=True).close()
    assert count(copy, "trajectories") == 8


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "settings",
    [{"archive_every_batches": 2}, {"archive_every_bytes": 1000}, {"archive_every_s": 0.05}],
    ids=["batches", "bytes", "seconds"],
)
def test_the_archive_goes_by_batches_bytes_and_seconds(folder, settings):
    with open_store(folder, settings=settings) as store:
        for issue in range(2):
            append(store, make_group(issue=issue))
        wait_until((folder / "lake" / "segments" / "_delta_log").exists)
        assert count(folder, "trajectories") == 16
    assert count(folder, "trajectories") == 16


def test_acknowledged_by_the_lake(folder):
    with open_store(folder, settings={"acknowledge": "lake"}) as store:
        append(store, make_group())
        with duckdb.connect(":memory:") as raw:
            files = DeltaTable(str(folder / "lake" / "trajectories")).file_uris()
            assert raw.sql(f"SELECT count(*) FROM read_parquet({files})").fetchall() == [(8,)]
        assert not any(path.stat().st_size > 100 for path in (folder / "wal").iterdir())


def test_a_passing_failure_of_the_lake_is_retried(folder, monkeypatch):
    real, failures = lake_module.write_deltalake, []

    def sometimes(*arguments, **keywords):
        if len(failures) < 2:
            failures.append(1)
            raise OSError("storage is tired")
        return real(*arguments, **keywords)

    monkeypatch.setattr(lake_module, "write_deltalake", sometimes)
    with open_store(folder, settings={"archive_every_batches": 1}) as store:
        append(store, make_group())
        wait_until((folder / "lake" / "segments").exists)
    assert len(failures) == 2
    assert count(folder, "trajectories") == 8


def test_a_lasting_failure_of_the_lake_holds_who_appends_is_told_once_and_loses_nothing(folder, monkeypatch):
    monkeypatch.setattr("hotpot.experience.lake.health.FIRST_PAUSE_S", 0.001)
    calls = []

    def never(*_, **__):
        calls.append(1)
        raise OSError("storage is gone")

    monkeypatch.setattr(lake_module, "write_deltalake", never)
    limits = {
        "archive_every_batches": 1,
        "max_backlog": 2,
        "backpressure_s": 0.2,
        "flush_timeout_s": 0.5,
    }
    store = open_store(folder, settings=limits)
    for issue in range(2):
        append(store, make_group(issue=issue))
    group = make_group(issue=2)
    store.ledger.lease(make_leases(group))
    with pytest.raises(BacklogError, match=r"store\.max_backlog allows 2.*storage is gone"):
        store.append(group)
    wait_until(lambda: len(calls) > 4 and store.backlog() == 2)
    status = store.archive_status()
    assert status.tries >= 4
    assert status.failing_s > 0
    assert "storage is gone" in status.reason
    assert count(folder, "trajectories") == 16
    with pytest.raises(StoreError, match="storage is gone"):
        store.close()
    assert count(folder, "events", "kind = 'archive_failing'") == 1
    monkeypatch.undo()
    open_store(folder, resume=True).close()
    assert count(folder, "trajectories") == 16
    assert count(folder, "attempts", "state = 'finished'") == 16
    assert count(folder, "attempts", "reason = 'run_ended'") == 8
    assert count(folder, "events", "kind = 'archive_failing'") == 1


def test_the_lake_heals_by_itself_and_those_who_waited_go_on(folder, monkeypatch):
    monkeypatch.setattr("hotpot.experience.lake.health.FIRST_PAUSE_S", 0.001)
    real, down = lake_module.write_deltalake, threading.Event()
    down.set()

    def sometimes(*arguments, **keywords):
        if down.is_set():
            raise OSError("storage is away")
        return real(*arguments, **keywords)

    monkeypatch.setattr(lake_module, "write_deltalake", sometimes)
    with open_store(folder, settings={"archive_every_batches": 1, "max_backlog": 2}) as store:
        for issue in range(2):
            append(store, make_group(issue=issue))
        timer = threading.Timer(0.3, down.clear)
        timer.start()
        began = time.monotonic()
        assert append(store, make_group(issue=2)).accepted
        assert time.monotonic() - began > 0.1
        timer.join()
    assert not list((folder / "wal").iterdir())
    kinds = open_run(folder).table("events", ["kind"]).column(0).to_pylist()
    assert kinds == ["archive_failing", "archive_healed"]
    assert count(folder, "trajectories") == 24


def test_an_outage_ends_the_run_by_time_not_by_tries(folder, monkeypatch):
    monkeypatch.setattr("hotpot.experience.lake.health.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("hotpot.experience.lake.health.LONGEST_PAUSE_S", 0.004)
    real, calls = lake_module.write_deltalake, []

    def out(*arguments, **keywords):
        calls.append(1)
        if len(calls) <= 30:
            raise OSError("storage is away")
        return real(*arguments, **keywords)

    monkeypatch.setattr(lake_module, "write_deltalake", out)
    with open_store(folder, settings={"archive_every_batches": 1}) as store:
        append(store, make_group(issue=0))
        wait_until(lambda: len(calls) >= 20)
        append(store, make_group(issue=1))
    assert count(folder, "trajectories") == 16


def test_pauses_grow_to_the_longest_and_no_further():
    health = ArchiveHealth()
    pauses = {}
    for tries in range(1, 5001):
        told = health.failed("away", 1, float(tries))
        assert (told is None) == (tries > 1)
        pauses[tries] = health.pause_s
    assert [pauses[tries] for tries in (1, 2, 3, 5, 7, 5000)] == pytest.approx([0.2, 0.4, 0.8, 3.2, 10, 10])
    healed = health.succeeded(0, 5001.0)
    assert dict(healed.detail) == {"reason": "away", "outage_s": 5000.0, "tries": 5000, "log_segments": 0}
    assert health.succeeded(0, 5002.0) is None


def test_a_disk_full_while_sealing_is_gone_over_and_the_run_recovers(folder, monkeypatch):
    """No file for the next log segment, then a kill in the middle of a frame: a torn tail, and nothing lost."""
    monkeypatch.setattr("hotpot.experience.lake.health.FIRST_PAUSE_S", 0.001)
    store = open_store(folder, settings={"archive_every_batches": 1})
    real, calls = os.pwritev, []

    def full(descriptor, pieces, offset):
        if offset == 0:
            calls.append(1)
            raise OSError(28, "No space left on device")
        return real(descriptor, pieces, offset)

    monkeypatch.setattr(wal_module.os, "pwritev", full)
    append(store, make_group(issue=0))
    wait_until(lambda: len(calls) > 3)
    assert append(store, make_group(issue=1)).accepted
    killed = folder.with_name("killed")
    subprocess.run(["cp", "-r", str(folder), str(killed)], check=True)
    monkeypatch.undo()
    # The failed file stays as a release that did not remove it left it.
    wal_module.segment_path(killed / "wal", 2).write_bytes(b"")
    with wal_module.segment_path(killed / "wal", 1).open("ab") as file:
        file.write(b"HPFR torn")
    assert count(killed, "trajectories") == 16
    open_store(killed, resume=True).close()
    store.close()
    for run in (folder, killed):
        assert count(run, "trajectories") == 16
        assert not list((run / "wal").iterdir())


def test_what_was_not_acknowledged_never_gets_into_the_lake(folder, monkeypatch):
    store = open_store(folder)
    append(store, make_group(issue=0))
    group = make_group(issue=1)
    store.ledger.lease(make_leases(group))

    def broken(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(wal_module.os, "fdatasync", broken)
    with pytest.raises(StoreError, match="durable"):
        store.append(group)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="broke earlier"):
        store._journal.seal()
    with pytest.raises(StoreError, match="broke earlier"):
        store.close()
    assert not (folder / "lake" / "trajectories").exists()
    # What is in the log by recovery decides, for log and ledger alike.
    open_store(folder, resume=True).close()
    assert count(folder, "trajectories") == count(folder, "attempts", "state = 'finished'")


def test_the_log_goes_only_after_the_lake_is_on_the_device(folder, monkeypatch):
    synced, deleted = set(), []
    real_sync, real_unlink = os.fsync, Path.unlink

    def noted(descriptor):
        synced.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real_sync(descriptor)

    def unlinked(path, **keywords):
        lake = folder / "lake"
        if path.suffix == ".wal" and path.stat().st_size > 100:
            # The manifest's copy was synced under the name of its draft.
            files = [
                p for p in lake.rglob("*") if not p.name.startswith("_last") and p.parent.name != "_runs"
            ]
            wanted = {str(lake), *map(str, files)}
            deleted.append(wanted - synced)
        real_unlink(path, **keywords)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "unlink", unlinked)
    with open_store(folder) as store:
        for issue in range(12):  # past a checkpoint of the tables
            append(store, make_group(issue=issue, size=2))
            store.flush()
    assert list((folder / "lake" / "steps" / "_delta_log").glob("*.checkpoint.parquet"))
    assert str(folder / "lake" / "steps" / "_delta_log" / "_last_checkpoint") in synced
    assert len(deleted) >= 12
    assert set(map(frozenset, deleted)) == {frozenset()}


def test_a_lake_that_could_not_be_synced_takes_nothing_more_and_the_log_stays(folder, monkeypatch):
    store = open_store(folder)
    append(store, make_group())
    calls = []

    def once(*_):
        calls.append(1)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(FolderSync, "sync", once)
    with pytest.raises(StoreError, match="check the disk"):
        store.flush(timeout_s=20)
    assert len(calls) == 1
    with pytest.raises(StoreError):
        store.close()
    monkeypatch.undo()
    assert count(folder, "trajectories") == 8
    open_store(folder, resume=True).close()
    assert count(folder, "trajectories") == 8
    assert not list((folder / "wal").iterdir())


def test_a_commit_whose_files_a_power_cut_took_is_not_believed(folder):
    store = open_store(folder)
    append(store, make_group())
    copy = folder.with_name("copy")
    subprocess.run(["cp", "-r", str(folder), str(copy)], check=True)
    store.close()
    subprocess.run(["cp", "-r", str(folder / "lake" / "steps"), str(copy / "lake")], check=True)
    (file,) = (copy / "lake" / "steps" / "_run=run").glob("*.parquet")
    file.write_bytes(b"")
    with pytest.raises(StoreError, match="power cut"):
        open_store(copy, resume=True).close()
    assert list((copy / "wal").iterdir())
    (copy / "lake" / "steps" / "_delta_log" / f"{1:020}.json").unlink()
    open_store(copy, resume=True).close()
    assert (count(copy, "trajectories"), count(copy, "steps")) == (8, 16)


@pytest.mark.parametrize("write", ["record", "record_update"])
def test_acknowledged_by_the_lake_holds_for_every_row(folder, write):
    with open_store(folder, settings={"acknowledge": "lake"}) as store:
        if write == "record":
            store.record([make_row(EventRow)])
        else:
            store.record_update(make_row(UpdateRow, update=1), [], [], [])
        table = {"record": "events", "record_update": "updates"}[write]
        assert DeltaTable(str(folder / "lake" / table)).to_pyarrow_table().num_rows == 1


def test_the_trace_shows_gate_log_and_ledger_and_the_archives_work(folder):
    timeline = Timeline(keep_slices=True)
    with open_store(folder, timeline=timeline, settings={"archive_every_batches": 1}) as store:
        timeline.start()
        with timeline.span("store", whole=True):
            append(store, make_group())
            store.record_update(make_row(UpdateRow, update=1), [], [], [])
        store.flush()
        slices, archived = list(timeline.slices), store.archive_slices()
        elapsed = timeline.elapsed_s
    names = [piece.name for piece in slices]
    assert names == ["gate", "ledger", "log", "ledger", "ledger", "gate", "log", "ledger", "store"]
    whole = slices[-1]
    assert all(piece.depth == 1 for piece in slices[:-1])
    assert all(piece.start_s >= whole.start_s for piece in slices)
    assert all(piece.start_s + piece.length_s <= whole.start_s + whole.length_s for piece in slices)
    assert set(timeline.totals()) == {"other", "store"}
    assert {"seal", "read", "commit", "sync", "publish", "archive"} == {piece.name for piece in archived}
    assert all(0 <= piece.start_s <= piece.start_s + piece.length_s <= elapsed for piece in archived)
    with open_store(folder.with_name("plain")) as store:
        append(store, make_group())
        store.flush()
        assert store.archive_slices() == []


def test_an_unforeseen_failure_of_the_archive_is_told_too(folder, monkeypatch):
    def odd(*_, **__):
        raise ZeroDivisionError("nobody thought of this")

    monkeypatch.setattr(lake_module, "write_deltalake", odd)
    store = open_store(folder)
    append(store, make_group())
    with pytest.raises(StoreError, match="nobody thought"):
        store.close()


def test_a_full_disk_keeps_nothing_of_the_call_and_the_next_one_works(store, folder, monkeypatch):
    group = make_group()
    store.ledger.lease(make_leases(group))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hotpot.experience.log.wal.os.pwritev", full)
    with pytest.raises(StoreError, match="No space"):
        store.append(group)
    monkeypatch.undo()
    assert count(folder, "trajectories") == 0
    assert len(store.append(group).accepted) == 8
    assert count(folder, "trajectories") == 8


def test_log_and_ledger_that_disagree_stop_the_store_until_recovered(folder, monkeypatch):
    store = open_store(folder)
    group = make_group()
    store.ledger.lease(make_leases(group))

    def broken(*_, **__):
        raise StoreError("the ledger's disk is gone")

    monkeypatch.setattr(Ledger, "apply", broken)
    with pytest.raises(StoreError, match="disk is gone"):
        store.append(group)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="disagree"):
        store.record([make_row(EventRow)])
    with pytest.raises(StoreError, match="disagree"):
        store.close()
    with open_store(folder, resume=True) as store:
        assert store.ledger.counts().finished == 8
    assert count(folder, "trajectories") == 8


@pytest.fixture
def interruptible():
    """A shell's background job ignores Ctrl-C; here it counts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_never_falls_between_log_and_ledger(folder, interruptible):
    """Ctrl-C while frames are being written, many times: whatever is in the log is on the ledger, and the run goes on."""
    import _thread

    store = open_store(folder)
    append(store, make_group(issue=60, size=2))  # whatever is imported late is imported by now
    interrupted = 0
    for issue in range(60):
        group = make_group(issue=issue, size=2)
        store.ledger.lease(make_leases(group))
        timer = threading.Timer(0.0003 * (issue % 20), _thread.interrupt_main)
        try:
            timer.start()
            store.append(group)
            timer.join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            timer.join()
    assert interrupted > 10
    store.close()
    finished = count(folder, "attempts", "state = 'finished'")
    assert finished == count(folder, "trajectories")
    assert count(folder, "attempts") == 122
    assert count(folder, "attempts", "state = 'dropped'") == 122 - finished


def test_watermark_hides_what_a_dead_writer_left_half_done(folder):
    with open_store(folder) as store:
        append(store, make_group(issue=0))
    # A commit of a segment whose watermark never came, as a kill between two tables leaves it.
    lake = lake_module.Lake(LakeLocation.of(folder / "lake"), writer="run")
    trajectory = make_trajectory(issue=9)
    from hotpot.experience import to_table

    rows = to_table("trajectories", [trajectory.row])
    assert lake.commit("trajectories", lake.watermark() + 1, rows, np.arange(1))
    assert count(folder, "trajectories") == 8
    assert not lake.commit("trajectories", lake.watermark() + 1, rows, np.arange(1))
    assert isinstance(open_run(folder).table("trajectories"), pa.Table)
    assert open_run(folder).table("trajectories").num_rows == 8


def test_a_run_killed_with_nothing_in_its_log_resumes(folder):
    store = open_store(folder)
    copy = folder.with_name("copy")
    subprocess.run(["cp", "-r", str(folder), str(copy)], check=True)
    append(store, make_group())
    store.flush()
    later = folder.with_name("later")
    subprocess.run(["cp", "-r", str(folder), str(later)], check=True)
    store.close()
    for killed, rows in ((copy, 0), (later, 8)):
        with open_store(killed, resume=True) as store:
            append(store, make_group(issue=5))
        assert count(killed, "trajectories") == rows + 8


def test_a_log_segment_already_in_the_lake_is_not_applied_again(folder):
    store = open_store(folder)
    append(store, make_group())
    (segment,) = (folder / "wal").iterdir()
    saved = segment.read_bytes()
    store.close()
    segment.write_bytes(saved)  # as if killed between watermark and deletion
    assert count(folder, "trajectories") == 8
    open_store(folder, resume=True).close()
    assert count(folder, "trajectories") == 8
    assert list((folder / "wal").iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        DeltaError("Schema error: Cannot merge metadata with different values for key meaning"),
        SchemaMismatchError("x"),
        DeltaProtocolError("x"),
    ],
)
def test_a_failure_that_no_waiting_changes_is_told_at_once(folder, monkeypatch, error):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(lake_module, "write_deltalake", refuse)
    store = open_store(folder)
    append(store, make_group())
    with pytest.raises(StoreError, match=re.escape(str(error))):
        store.flush(timeout_s=60)
    with pytest.raises(StoreError):
        store.close()


class NoLake:
    """Stands for a lake in tests of the archive alone."""

    def forget(self):
        pass


def start_archive(monkeypatch, *, seal, archived=lambda: None, archive_segment=lambda *_: None, seconds=1e6):
    """An archive over a lake that takes everything; ``seal(archive, number)`` is called with 1, 2, ..."""
    monkeypatch.setattr("hotpot.experience.lake.health.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(archive_module, "archive_segment", archive_segment)
    archive = Archive(NoLake(), thresholds=Thresholds(batches=10**6, num_bytes=10**12, seconds=seconds))
    numbers, told = itertools.count(1), []
    archive.start(
        seal=lambda: seal(archive, next(numbers)), settle=lambda: None, tell=told.append, archived=archived
    )
    return archive, told


def test_one_failed_seal_does_not_end_sealing_by_age(tmp_path, monkeypatch):
    def seal(archive, number):
        if number == 1:
            raise StoreError("can't create the next log segment") from OSError(28, "No space left on device")
        path = tmp_path / f"{number}"
        path.touch()
        archive.add(path)

    archive, told = start_archive(monkeypatch, seal=seal, seconds=0.05)
    archive.note(10, 1)
    wait_until(lambda: len(told) == 2)
    assert [each.kind for each in told] == ["archive_failing", "archive_healed"]
    assert archive.status().tries == 0
    assert archive.close(timeout_s=20.0)


def test_an_archive_that_meets_what_nobody_foresaw_says_where(tmp_path, monkeypatch):
    def seal(archive, number):
        (tmp_path / f"{number}").touch()
        archive.add(tmp_path / f"{number}")

    def broken(*_arguments):
        raise ZeroDivisionError("a slip")

    archive, _ = start_archive(monkeypatch, seal=seal, archive_segment=broken, seconds=0.05)
    archive.note(10, 1)
    with pytest.raises(StoreError) as found:
        archive.flush(timeout_s=20.0)
    said = str(found.value)
    assert "a slip (ZeroDivisionError in hotpot.experience.lake.archive.Archive._archive (archive.py:" in said
    assert said.endswith("everything acknowledged is in the log: resume the run")
    assert archive.close(timeout_s=20.0)


@pytest.mark.parametrize("step", ["sync_folder", "archived"])
def test_a_failure_after_a_log_segment_went_is_gone_over_and_nothing_is_archived_twice(
    tmp_path, monkeypatch, step
):
    def seal(archive, number):
        (tmp_path / f"{number}").touch()
        archive.add(tmp_path / f"{number}")

    def fails_twice(*_):
        calls.append(1)
        if len(calls) <= 2:
            raise OSError(5, "Input/output error")

    calls, taken = [], []
    monkeypatch.setattr(
        archive_module, "sync_folder", fails_twice if step == "sync_folder" else lambda _: None
    )
    archive, told = start_archive(
        monkeypatch,
        seal=seal,
        archived=fails_twice if step == "archived" else lambda: None,
        archive_segment=lambda _, path, __: taken.append(path.stat() and path.name),
    )
    archive.flush(timeout_s=20.0)
    assert [each.kind for each in told] == ["archive_failing", "archive_healed"]
    assert len(calls) > 2
    assert len(taken) == len(set(taken))
    assert not list(tmp_path.iterdir())
    assert archive.close(timeout_s=20.0)


def test_who_waits_for_the_lake_waits_for_its_own_and_not_for_what_others_append(tmp_path, monkeypatch):
    """While one log segment goes to the lake, another caller has always asked for the next one already."""

    def seal(archive, number):
        (tmp_path / f"{number}").touch()
        archive.add(tmp_path / f"{number}")

    def take(*_):
        others.append(threading.Thread(target=flush_quietly))
        others[-1].start()
        wait_until(lambda: archive._seal_asked > len(others))

    def flush_quietly():
        with contextlib.suppress(StoreError):
            archive.flush(timeout_s=0.2)

    others = []
    archive, _ = start_archive(monkeypatch, seal=seal, archive_segment=take)
    archive.flush(timeout_s=20.0)
    assert archive.close(timeout_s=20.0)
    for thread in others:
        thread.join()
