import importlib
import shutil
import sqlite3
from contextlib import closing

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from maintenance_runs import SETTINGS, add_round, make_run, open_store

from hotpot.experience import open_run
from hotpot.experience.maintenance import compact, delete, verify
from hotpot.testing.records import make_group, make_leases, make_row
from hotpot.types import DiscardRow


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A compacted run whose files are large enough to be damaged anywhere, with rows in log and lake."""
    folder = make_run(tmp_path_factory.mktemp("runs") / "run", rounds=4)
    compact(open_run(folder))
    store = open_store(folder, resume=True)
    add_round(store, 4)
    (spare,) = make_group(issue=6, size=1)
    store.ledger.lease(make_leases([spare]))
    store.append([spare])
    store.discard([make_row(DiscardRow, trajectory_id="6.0.0", reason="stale")])
    store.flush()
    add_round(store, 5)
    store._archive.close(timeout_s=10.0)  # as a killed writer leaves it: the last round is in the log
    store._lock_file.release()
    store.ledger.close(ended=False)
    return folder


@pytest.fixture
def run(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "run")


def files(run, table):
    return [
        run / "lake" / table / path.rpartition(f"/{table}/")[2]
        for path in open_run(run).lake.files(table).paths
    ]


def table(run, name):
    return DeltaTable(str(run / "lake" / name))


def gone(run):
    files(run, "trajectories")[0].unlink()


def cut(run):
    path = files(run, "steps")[0]
    path.write_bytes(path.read_bytes()[:-100])


def footer(run):
    path = files(run, "steps")[0]
    data = path.read_bytes()
    path.write_bytes(data[:-40] + b"\xff" * 32 + data[-8:])


def page(run):
    path = files(run, "steps")[0]
    chunk = pq.ParquetFile(path).metadata.row_group(0)
    column = next(
        chunk.column(i)
        for i in range(chunk.num_columns)
        if "sampled_tokens" in chunk.column(i).path_in_schema
    )
    data = bytearray(path.read_bytes())
    begin = column.dictionary_page_offset or column.data_page_offset
    middle = begin + column.total_compressed_size // 2
    data[middle : middle + 40] = bytes(byte ^ 0x5A for byte in data[middle : middle + 40])
    path.write_bytes(data)


def other_rows(run):
    path = files(run, "updates")[0]
    size = path.stat().st_size
    rows = pq.ParquetFile(path).read()
    pq.write_table(rows.slice(1), path)
    path.write_bytes(path.read_bytes() + b"")
    grown = size - path.stat().st_size
    log = sorted((run / "lake" / "updates" / "_delta_log").glob("*.json"))
    for entry in log:
        entry.write_text(entry.read_text().replace(f'"size":{size}', f'"size":{size - grown}'))


def delta_log(run):
    for entry in sorted((run / "lake" / "metrics" / "_delta_log").glob("*.json")):
        entry.write_text("{not json")


def without(name, where):
    return lambda run: table(run, name).delete(where)


def again(name, where):
    """Append rows that are there already."""

    def damage(run):
        rows = pa.table(table(run, name).to_pyarrow_dataset().to_table())
        chosen = duckdb.sql(f"SELECT * FROM rows WHERE {where}").to_arrow_table().cast(rows.schema)
        write_deltalake(table(run, name), chosen, mode="append")

    return damage


def changed(name, column, value, where):
    return lambda run: table(run, name).update(updates={column: value}, predicate=where)


def ledger(statement):
    def damage(run):
        with closing(sqlite3.connect(run / "control.sqlite")) as database:
            database.execute(statement)
            database.commit()

    return damage


def log_byte(run):
    path = next((run / "wal").glob("*.wal"))
    data = bytearray(path.read_bytes())
    data[200] ^= 0xFF
    path.write_bytes(data)


def log_gap(run):
    path = next((run / "wal").glob("*.wal"))
    path.rename(path.with_name(f"{int(path.stem) + 1:08d}.wal"))


DAMAGE = {
    "a file is gone": (gone, "missing_file", False),
    "a file is cut": (cut, "wrong_size", False),
    "a footer is damaged": (footer, "unreadable_file", False),
    "a page is damaged": (page, "unreadable_file prefix_hash step_lengths trajectory_tokens", True),
    "a file has other rows": (other_rows, "wrong_row_count", False),
    "Delta's log is damaged": (delta_log, "table_unreadable", False),
    "a row is missing": (without("metrics", "update = 2"), "segment_rows", False),
    "rows are there twice": (again("metrics", "update = 2"), "row_twice", False),
    "a segment is missing": (without("segments", "segment = 2"), "segment_gap", False),
    "a segment is there twice": (again("segments", "segment = 2"), "segment_twice", False),
    "an attempt ended twice": (again("attempts", "attempt_id = '1.0.0'"), "attempt_ends", False),
    "an attempt has no state": (changed("attempts", "state", "'lost'", "attempt_id = '1.0.0'"), "attempt_state", False),
    "an attempt lost its trajectory": (without("trajectories", "trajectory_id = '1.0.0'"), "finished_attempt", False),
    "a trajectory of a failed attempt": (
        changed("attempts", "state", "'failed'", "attempt_id = '1.0.0'"), "trajectory_attempt", False,
    ),
    "a trajectory twice": (again("trajectories", "trajectory_id = '1.0.0'"), "trajectory_twice", False),
    "a step is missing": (without("steps", "trajectory_id = '1.0.0' AND step = 1"), "incomplete_trajectory", False),
    "steps without a trajectory": (without("trajectories", "trajectory_id = '1.0.0'"), "stray_steps", False),
    "an update twice": (again("updates", "update = 2"), "update_twice", False),
    "an update is missing": (without("updates", "update = 2"), "consumption_update", False),
    "learned without an update": (without("updates", "update = 2"), "learned_update", False),
    "a consumption of nothing": (
        changed("consumptions", "trajectory_id", "'99.0.0'", "trajectory_id = '1.0.0'"), "consumption_trajectory", False,
    ),
    "a consumption twice": (again("consumptions", "trajectory_id = '1.0.0'"), "consumption_twice", False),
    "a consumption is missing": (without("consumptions", "trajectory_id = '1.0.0'"), "update_consumptions", False),
    "learned but not consumed": (without("consumptions", "trajectory_id = '1.0.0'"), "learned_consumption", False),
    "consumed but not learned": (without("learned_tokens", "trajectory_id = '1.0.0'"), "learned_missing", False),
    "a discard of nothing": (
        changed("discards", "trajectory_id", "'99.0.0'", "trajectory_id = '6.0.0'"), "discard_trajectory", False,
    ),
    "a discard twice": (again("discards", "trajectory_id = '6.0.0'"), "discard_twice", False),
    "discarded and collected": (
        changed("updates", "collected_trajectories", "make_array('6.0.0')", "update = 2"), "discard_collected", False,
    ),
    "collected twice": (
        changed("updates", "collected_trajectories", "make_array('1.0.0')", "update < 3"), "collected_twice", False,
    ),
    "the ledger forgot a discard": (ledger("DELETE FROM discards"), "ledger_discard", False),
    "other tokens": (
        changed("steps", "prompt_tokens", "make_array(cast(1 as int))", "trajectory_id = '1.0.0' AND step = 1"),
        "prefix_hash", True,
    ),
    "other lengths": (
        changed("steps", "sampled_tokens", "make_array(cast(1 as int))", "trajectory_id = '1.0.0' AND step = 1"),
        "step_lengths", True,
    ),
    "another number of tokens": (
        changed("trajectories", "num_sampled_tokens", "1", "trajectory_id = '1.0.0'"), "trajectory_tokens", True,
    ),
    "learned lengths": (
        changed("learned_tokens", "loss_mask", "make_array(cast(1 as int))", "trajectory_id = '1.0.0'"),
        "learned_lengths", True,
    ),
    "the ledger says otherwise": (
        ledger("UPDATE attempts SET state = 'failed' WHERE attempt_id = '1.0.0'"), "ledger_attempt", False,
    ),
    "the ledger forgot a consumption": (
        ledger("DELETE FROM consumptions WHERE trajectory_id = '1.0.0'"), "ledger_consumption", False,
    ),
    "the ledger is damaged": (
        lambda run: (run / "control.sqlite").write_bytes(b"no database" * 1000), "ledger_unreadable", False,
    ),
    "the log is damaged": (log_byte, "log_unreadable", False),
    "a log segment is missing": (log_gap, "log_gap", False),
}  # fmt: skip


def test_a_sound_run_has_no_findings(run):
    found = verify(open_run(run), deep=True)
    assert found.good, (found.findings, found.skipped)
    assert (found.counts.half_files, found.counts.log_segments) == (0, 1)
    orphan = files(run, "steps")[0].with_name("part-dead.parquet")
    orphan.write_bytes(b"PAR1" + bytes(100))
    found = verify(open_run(run))
    assert found.good
    assert found.counts.half_files == 1


@pytest.mark.parametrize(
    "name",
    [
        name if place % 7 == 0 else pytest.param(name, marks=pytest.mark.slow)
        for place, name in enumerate(DAMAGE)
    ],
)
def test_damage_is_found(run, name):
    damage, checks, deep = DAMAGE[name]
    damage(run)
    found = verify(open_run(run), deep=deep)
    assert {finding.check for finding in found.findings} & set(checks.split()), (
        found.findings,
        found.skipped,
    )
    assert all(finding.detail for finding in found.findings)


def test_a_deletion_that_was_killed_is_found_and_completed(run, monkeypatch):
    module = importlib.import_module("hotpot.experience.maintenance.delete")
    monkeypatch.setattr(module, "_delete_rows", lambda *_: None)
    delete(open_run(run), "1.0.0", reason="asked for", settings=SETTINGS)
    found = verify(open_run(run))
    assert {"deleted_present", "segment_rows"} <= {finding.check for finding in found.findings}
    monkeypatch.undo()
    delete(open_run(run), "1.0.0", reason="asked for", settings=SETTINGS)
    assert verify(open_run(run), deep=True).good
