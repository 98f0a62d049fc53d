import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from maintenance_runs import add_round, contents, make_run, open_store

from hotpot.config import StoreSection
from hotpot.errors import RunFolderError, UsageError
from hotpot.experience import ExperienceStore, open_run
from hotpot.experience.maintenance import (
    compact,
    copy_run,
    sizes,
    update_versions,
    vacuum,
    verify,
    write_export,
)
from hotpot.experience.maintenance.vacuum import SAFE_HOURS
from hotpot.types import TABLES

WORKER = Path(__file__).with_name("maintenance_runs.py")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def run(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "runs" / "run"))


def num_files(folder, table):
    return len(open_run(folder).lake.files(table).paths)


def test_compaction_leaves_one_file_a_table_and_the_same_record(run):
    before = contents(open_run(run))
    reader = open_run(run)
    held = reader.at_once()
    reports = {report.table: report for report in compact(reader)}
    assert (reports["steps"].files_before, reports["steps"].files_after) == (6, 1)
    assert reports["segments"].files_after == 1
    assert contents(open_run(run)) == before
    assert contents(held) == before  # a reader that holds the old file list
    assert all(report.files_before == report.files_after == 1 for report in compact(open_run(run)))
    with open_store(run, resume=True) as store:
        add_round(store, 6)
    after = contents(open_run(run))
    assert [row["update"] for row in after["updates"]] == [1, 2, 3, 4, 5, 6, 7]
    assert after["steps"][: len(before["steps"])] == before["steps"]
    assert verify(open_run(run), deep=True).good


@pytest.mark.slow
def test_compaction_beside_a_writer_in_another_process(tmp_path):
    folder = make_run(tmp_path / "runs" / "run", rounds=3)
    first = contents(open_run(folder))
    command = [sys.executable, str(WORKER), str(folder), "12"]
    reader = open_run(folder)
    compactions = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        for line in writer.stdout:
            compactions += sum(report.files_before > 1 for report in compact(reader)) > 0
            seen = reader.sql("SELECT count(*) AS n, count(DISTINCT update) AS d FROM updates").to_pylist()[0]
            assert seen["n"] == seen["d"] > int(line)
    assert writer.returncode == 0
    assert compactions >= 3
    found = verify(open_run(folder), deep=True)
    assert found.good, found.findings
    whole = contents(open_run(folder))
    assert [row["update"] for row in whole["updates"]] == list(range(1, 16))
    assert whole["steps"][: len(first["steps"])] == first["steps"]


@pytest.mark.slow
def test_vacuum_keeps_what_the_last_updates_used(run):
    versions = {
        found.update: found.versions["steps"] for found in update_versions(open_run(run).lake, last=6)
    }
    assert versions == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6}
    compact(open_run(run))
    assert update_versions(open_run(run).lake, last=1)[0].versions["steps"] == 7  # the compacted one, as good
    (run / "lake" / "steps" / "_run=run" / "half.parquet").write_bytes(b"PAR1 half")
    young = vacuum(open_run(run))
    assert [report.files for report in young if report.files] == []
    told = {r.table: r for r in vacuum(open_run(run), retention_hours=0, keep_updates=2, dry_run=True)}
    assert len(told["steps"].files) == 2  # of update 6 alone, and the half one
    assert told["steps"].num_bytes > 0
    assert num_files(run, "steps") == 1
    gone = {r.table: r for r in vacuum(open_run(run), retention_hours=0, keep_updates=2)}
    assert gone["steps"].files == told["steps"].files
    assert gone["steps"].kept_versions == (5, 7)
    old = DeltaTable(str(run / "lake" / "steps"), version=5)
    assert len(old.to_pyarrow_table()) == 5 * 12
    assert not vacuum(open_run(run), retention_hours=0, keep_updates=2, dry_run=True)[0].files
    assert verify(open_run(run), deep=True).good
    assert contents(open_run(run).as_of(2))["updates"][-1]["update"] == 2


def test_a_vacuum_without_retention_needs_the_run_for_itself(run):
    with open_store(run, resume=True):
        with pytest.raises(RunFolderError, match="process"):
            vacuum(open_run(run), retention_hours=0)
        assert len(vacuum(open_run(run), retention_hours=SAFE_HOURS)) > 5


@pytest.mark.slow
def test_a_run_as_of_an_update_whatever_became_of_its_files(tmp_path):
    folder = tmp_path / "runs" / "run"
    store = make_run(folder, rounds=0, close=False)
    expected = {}
    for issue in range(7):  # three in the lake with two a log segment, the last in the log
        update = add_round(store, issue)
        expected[update] = contents(open_run(folder))
        if issue % 2:
            store.flush()
    for update, record in expected.items():
        assert contents(open_run(folder).as_of(update)) == record
    store.close()
    compact(open_run(folder))
    vacuum(open_run(folder), retention_hours=0, keep_updates=0)
    for update, record in expected.items():
        past = open_run(folder).as_of(update)
        assert contents(past) == record
        assert past.sql("SELECT max(update) AS last FROM consumptions").to_pylist() == [{"last": update}]
    with pytest.raises(UsageError, match="no update 8"):
        open_run(folder).as_of(8)


def test_the_exported_manifest_is_enough_to_read_a_compacted_table(run):
    reader = open_run(run)
    compact(reader, tables=["steps"])
    glob = sum(
        pq.read_metadata(path).num_rows for path in (run / "lake" / "steps").rglob("_run=run/*.parquet")
    )
    assert glob == 2 * 72  # the trap
    told = json.loads(write_export(reader).read_text())
    steps = told["tables"]["steps"]
    assert [file["num_rows"] for file in steps["files"]] == [72]
    assert told["where"] == f"_segment <= {told['watermark']}"
    assert {c["name"]: c["unit"] for c in steps["columns"]}["prompt_tokens"] == "token ids"
    table = (
        pq.ParquetFile(steps["files"][0]["path"])
        .read()
        .sort_by([(one, "ascending") for one in told["order_by"]])
    )
    assert table["trajectory_id"].to_pylist() == reader.table("steps")["trajectory_id"].to_pylist()
    assert (run / "lake" / steps["files"][0]["relative_path"]).stat().st_size == steps["files"][0][
        "size_bytes"
    ]


def test_a_copy_is_plain_parquet_with_the_logs_tail(tmp_path):
    folder = tmp_path / "runs" / "run"
    store = make_run(folder, rounds=5, flush_every=2, close=False)
    copied = {one.table: one for one in copy_run(open_run(folder), tmp_path / "copy")}
    for name in TABLES:
        there = pq.read_table(sorted((tmp_path / "copy" / name).glob("*.parquet")))
        assert there.to_pylist() == open_run(folder).table(name).to_pylist(), name
        assert copied[name].num_rows == there.num_rows
    assert (
        pq.read_schema(tmp_path / "copy" / "steps" / "part-00000.parquet").field("reward").metadata[b"unit"]
        == b"reward"
    )
    with pytest.raises(UsageError, match="exists"):
        copy_run(open_run(folder), tmp_path / "copy")
    store.close()


def test_sizes_name_every_column_and_the_bytes_nobody_needs(run):
    compact(open_run(run), tables=["steps"])
    tables = {table.table: table for table in sizes(open_run(run)).tables}
    steps = tables["steps"]
    assert (steps.num_files, steps.num_rows, steps.unused_files) == (1, 72, 6)
    columns = {column.column: column for column in steps.columns}
    tokens = open_run(run).sql("SELECT sum(len(sampled_tokens)) AS n FROM steps").to_pylist()[0]["n"]
    assert columns["sampled_tokens"].num_values == tokens
    assert sum(column.compressed_bytes for column in steps.columns) < steps.num_bytes
    assert abs(sum(column.share for column in steps.columns) - 1) < 1e-9
    assert tables["trajectories"].delta_log_files >= 6


def test_a_vacuum_without_retention_spares_a_run_that_has_only_just_begun_in_the_same_lake(tmp_path):
    def opened(name):
        shared = StoreSection(lake=str(tmp_path / "lake"))
        folder = tmp_path / "runs" / name
        return ExperienceStore.open(folder, run_id=name, settings=shared, vocabulary_size=64)

    opened("old").close()
    with opened("new"), pytest.raises(UsageError, match="shared by 2 runs"):
        vacuum(open_run(tmp_path / "runs" / "old"), retention_hours=0)
