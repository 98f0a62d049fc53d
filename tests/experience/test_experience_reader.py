import dataclasses
import json
import subprocess

import numpy as np
import pytest

from hotpot.config import StoreSection
from hotpot.errors import RunFolderError, StoreError, UsageError
from hotpot.experience import COLUMNS, SCHEMAS, ExperienceStore, open_run, read_trajectories, sequences
from hotpot.testing.records import make_group, make_leases, make_row, make_trajectory
from hotpot.types import SCHEMA_VERSION, TABLES, EventRow, Purpose, VersionSpan

BATCHES = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A live run: three batches in the lake, two in the log, one attempt leased, one failed."""
    folder = tmp_path_factory.mktemp("runs") / "it's a run"
    store = ExperienceStore.open(folder, run_id="run", settings=StoreSection(), vocabulary_size=64)
    for issue in range(BATCHES):
        group = make_group(issue=issue, size=3, policy_version=issue)
        store.ledger.lease(make_leases(group))
        store.append(group)
        if issue in (1, 2):
            store.flush()
    store.record([make_row(EventRow, kind="started", detail="{}")])
    store.ledger.lease(make_leases(make_group(issue=9, size=2)))
    store.ledger.fail("9.0.0", "broke")
    yield folder
    store.close()


@pytest.fixture
def reader(folder):
    return open_run(folder)


def test_lake_and_log_are_one_table_in_the_order_recorded(reader):
    ids = reader.table("trajectories", ["trajectory_id"]).column(0).to_pylist()
    assert ids == [f"{issue}.{sample}.0" for issue in range(BATCHES) for sample in range(3)]
    assert reader.sql("SELECT count(*) AS n FROM steps").to_pylist() == [{"n": BATCHES * 6}]


@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_a_view_with_all_its_columns(reader, name):
    table = reader.table(name)
    assert table.schema.equals(SCHEMAS[name], check_metadata=True)
    columns = [column.name for column in COLUMNS[name]]
    assert reader.sql(f"SELECT * FROM {name}").column_names == columns
    # No column's name needs quotes.
    assert reader.sql(f"SELECT {', '.join(columns)} FROM {name}").column_names == columns


def test_only_asked_columns_come(reader):
    table = reader.table("steps", ["reward", "model_logprobs"])
    assert table.column_names == ["reward", "model_logprobs"]
    assert table.schema.field("model_logprobs").metadata[b"unit"] == b"nats"
    with pytest.raises(UsageError, match=r"nonsense.*columns are run_id"):
        reader.table("steps", ["nonsense"])
    with pytest.raises(UsageError, match="tables are steps"):
        reader.table("nonsense")


def test_attempts_show_the_latest_state_once(reader):
    rows = reader.sql("SELECT attempt_id, state FROM attempts").to_pylist()
    states = {row["attempt_id"]: row["state"] for row in rows}
    assert len(states) == len(rows) == BATCHES * 3 + 2
    assert (states["0.0.0"], states["9.0.0"], states["9.1.0"]) == ("finished", "failed", "leased")


def test_parameters(reader):
    query = "SELECT count(*) AS n FROM trajectories WHERE policy_version >= ?"
    assert reader.sql(query, [3]).to_pylist() == [{"n": 6}]
    named = "SELECT count(*) AS n FROM trajectories WHERE policy_version = $version"
    assert reader.sql(named, {"version": 2}).to_pylist() == [{"n": 3}]


def test_tables_are_listed_when_asked(reader):
    names = {row["name"] for row in reader.sql("SHOW TABLES").to_pylist()}
    assert set(TABLES) <= names
    assert reader.sql("DESCRIBE steps").num_rows == len(COLUMNS["steps"])
    assert reader.sql("FROM query_table('tra' || 'jectories')").num_rows == BATCHES * 3


FORBIDDEN = [
    "SELECT * FROM read_text('/etc/passwd')",
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM '/etc/passwd'",
    "SELECT * FROM glob('/*')",
    "COPY (SELECT 1) TO '/tmp/hotpot_reader_test.csv'",
    "COPY steps TO '/tmp/hotpot_reader_test.parquet'",
    "ATTACH '/tmp/hotpot_reader_test.db'",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET lock_configuration = false",
    "PRAGMA threads = 1",
    "CREATE TABLE mine AS SELECT 1",
    "DROP VIEW steps",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '/tmp/hotpot_reader_test.csv'",
    "SELECT 1; SELECT 2",
    "SELECT 1; COPY (SELECT 1) TO '/tmp/hotpot_reader_test.csv'",
    "",
    "-- nothing",
    "SELECT * FROM folder",
]


@pytest.mark.parametrize("query", FORBIDDEN)
def test_sql_reads_the_run_and_nothing_else(reader, query):
    folder = "a variable of the caller"  # noqa: F841 - must not be reachable as a table
    with pytest.raises(UsageError):
        reader.sql(query)


def test_the_lakes_own_files_cannot_be_written(reader, folder):
    (file,) = list((folder / "lake" / "events" / "_run=run").glob("*.parquet")) or [None]
    target = str(file or next((folder / "lake" / "steps" / "_run=run").glob("*.parquet"))).replace("'", "''")
    with pytest.raises(UsageError, match="single SELECT"):
        reader.sql(f"COPY (SELECT count(*) FROM steps) TO '{target}' (FORMAT parquet)")


def test_a_wrong_query_names_what_there_is(reader):
    with pytest.raises(UsageError) as caught:
        reader.sql("SELECT rewrd FROM steps")
    assert "columns of steps: run_id" in str(caught.value)
    assert "tables: steps, trajectories" in str(caught.value)
    with pytest.raises(UsageError, match="tables: "):
        reader.sql("SELECT * FROM step")
    with pytest.raises(UsageError):
        reader.sql("SELEC 1")
    with pytest.raises(UsageError):
        reader.sql("SELECT ?", [])


def test_a_copied_run_reads_the_same_and_reading_writes_nothing(folder, tmp_path):
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(folder), str(copy)], check=True)
    before = {path: path.stat().st_size for path in copy.rglob("*") if "sqlite" not in path.name}
    assert open_run(copy).table("trajectories").equals(open_run(folder).table("trajectories"))
    assert {path: path.stat().st_size for path in copy.rglob("*") if "sqlite" not in path.name} == before
    for path in copy.glob("control.sqlite*"):
        path.unlink()
    assert open_run(copy).sql("SELECT count(*) AS n FROM attempts").to_pylist() == [{"n": BATCHES * 3}]


def test_a_run_of_another_schema_is_refused_with_both_versions(folder, tmp_path):
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(folder), str(copy)], check=True)
    path = copy / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(
        RunFolderError, match=f"version {SCHEMA_VERSION + 1}.* reads {SCHEMA_VERSION}.*release"
    ):
        open_run(copy)


def test_a_damaged_lake_is_told_in_words(folder, tmp_path):
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(folder), str(copy)], check=True)
    for path in (copy / "lake" / "steps" / "_run=run").glob("*.parquet"):
        path.write_bytes(b"")
    with pytest.raises(StoreError, match="can't read the lake"):
        open_run(copy).sql("SELECT * FROM steps")


def test_trajectories_come_back_as_they_went(reader):
    found = read_trajectories(reader)
    assert [t.row.trajectory_id for t in found] == [f"{i}.{s}.0" for i in range(BATCHES) for s in range(3)]
    original = make_group(issue=3, size=3, policy_version=3)
    some = read_trajectories(reader, "group_id = ?", ["g3"])
    assert len(some) == 3
    for before, after in zip(original, some, strict=True):
        for one, two in zip(sequences(before), sequences(after), strict=True):
            assert (one.trajectory_id, one.group_id, one.segment, one.reward) == (
                two.trajectory_id, two.group_id, two.segment, two.reward,
            )  # fmt: skip
            for name in (
                "tokens",
                "loss_mask",
                "behaviour_logprobs",
                "model_logprobs",
                "token_policy_version",
            ):
                first, second = getattr(one, name), getattr(two, name)
                assert first.dtype == second.dtype
                np.testing.assert_array_equal(first, second)
    assert read_trajectories(reader, "reward > 1e9") == []
    with pytest.raises(UsageError):
        read_trajectories(reader, "no_such_column = 1")


def test_sequences_say_what_was_sampled():
    trajectory = make_trajectory(num_steps=4, new_segment_at=2, purpose=Purpose.TRAINING)
    found = sequences(trajectory)
    assert [s.segment for s in found] == [0, 1]
    for sequence, steps in zip(found, (trajectory.steps[:2], trajectory.steps[2:]), strict=True):
        expected = np.concatenate([a for s in steps for a in (s.prompt_tokens, s.sampled_tokens)])
        np.testing.assert_array_equal(sequence.tokens, expected)
        assert sequence.tokens.dtype == np.int32
        np.testing.assert_array_equal(
            sequence.tokens[sequence.loss_mask], np.concatenate([s.sampled_tokens for s in steps])
        )
        np.testing.assert_array_equal(
            sequence.model_logprobs[sequence.loss_mask], np.concatenate([s.model_logprobs for s in steps])
        )
        assert not sequence.behaviour_logprobs[~sequence.loss_mask].any()
        assert set(sequence.token_policy_version[~sequence.loss_mask]) == {-1}
        assert set(sequence.token_policy_version[sequence.loss_mask]) == {1}
        assert sequence.reward == trajectory.row.reward


def test_sequences_keep_versions_that_change_in_flight():
    trajectory = make_trajectory(num_steps=1)
    step = trajectory.steps[0]
    count = len(step.sampled_tokens)
    spans = (VersionSpan(policy_version=1, checksum="a", length=1), VersionSpan(policy_version=2, checksum="b", length=count - 1))  # fmt: skip
    step = dataclasses.replace(
        step,
        span_policy_version=tuple(s.policy_version for s in spans),
        span_policy_length=tuple(s.length for s in spans),
    )
    (sequence,) = sequences(dataclasses.replace(trajectory, steps=(step,)))
    assert sequence.token_policy_version[sequence.loss_mask].tolist() == [1] + [2] * (count - 1)
