"""Upgrade steps: their forms agree, and every lake that ever landed opens, goes on and reads as what it was."""

import json
import zipfile
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hotpot.experience.reading.reader
from hotpot.config import StoreSection
from hotpot.errors import RunFolderError
from hotpot.experience import SCHEMAS, ExperienceStore, from_table, open_run, read_trajectories, to_table
from hotpot.experience.maintenance import compact, copy_run
from hotpot.experience.maintenance.export import export_manifest
from hotpot.experience.records.upgrades import (
    NEW_COLUMNS,
    OLDEST_VERSION,
    column_sql,
    steps_from,
    upgrade_row,
    upgrade_table,
)
from hotpot.testing.records import make_group, make_leases, make_row
from hotpot.types import (
    SCHEMA_VERSION,
    TABLES,
    ConsumptionRow,
    DiscardRow,
    LearnedTokensRow,
    QuarantineRow,
    UpdateRow,
)

LAKES = sorted((Path(__file__).parents[1] / "data" / "lakes").glob("v*.zip"))
FOLDERS = ("closed", "killed")


def older_rows(table, version):
    """Return rows of a table as Arrow without the columns that came after ``version``."""
    cls = TABLES[table]
    values = [{}, {}]
    if cls is QuarantineRow:
        texts = [
            '{"row": {"schema_version": 1, "x": "é"}, "steps": []}',
            'none, "task": "\\"schema_version\\": 7"',
        ]
        values = [{"payload": text, "time_us": 7, "detail": "a\nb'"} for text in texts]
    data = to_table(table, [make_row(cls, **each) for each in values])
    return data.drop_columns([step.name for step in steps_from(table, version)]).replace_schema_metadata(None)


@pytest.mark.parametrize("version", range(OLDEST_VERSION, SCHEMA_VERSION))
@pytest.mark.parametrize("table", sorted({step.table for step in NEW_COLUMNS}))
def test_the_forms_of_a_step_agree(table, version):
    old = older_rows(table, version)
    in_arrow = upgrade_table(table, old, version)
    assert in_arrow.schema.names == SCHEMAS[table].names
    by_row = [upgrade_row(table, row, version) for row in old.to_pylist()]
    assert by_row == in_arrow.to_pylist()
    names = SCHEMAS[table].names
    with duckdb.connect() as database:
        database.register("empty", SCHEMAS[table].empty_table())
        database.register("old", old)
        kept = ", ".join(column_sql(table, name) for name in names)
        found = database.sql(f"SELECT {kept} FROM (FROM old UNION ALL BY NAME FROM empty)").to_arrow_table()
    assert found.to_pylist() == by_row
    assert [row.schema_version for row in from_table(table, in_arrow)] == [SCHEMA_VERSION] * 2


def test_a_step_adds_only_what_is_missing():
    full = to_table("consumptions", [make_row(ConsumptionRow, weight=0.25)])
    assert upgrade_table("consumptions", full, 1).to_pylist() == full.to_pylist()
    assert upgrade_row("consumptions", {"weight": 0.25}, 1) == {"weight": 0.25}
    assert upgrade_table("consumptions", full, SCHEMA_VERSION) is full


def test_every_column_that_versions_brought_is_one_of_the_schema():
    for step in NEW_COLUMNS:
        assert OLDEST_VERSION < step.version <= SCHEMA_VERSION
        assert step.name in SCHEMAS[step.table].names


@pytest.fixture
def stored(request, tmp_path):
    lake, name = request.param
    with zipfile.ZipFile(lake) as archive:
        archive.extractall(tmp_path)
    expected = json.loads((tmp_path / "expected.json").read_text())[name]
    return tmp_path / name, expected | {"version": int(lake.stem[1:])}


def found_in(folder):
    reader = open_run(folder)
    return {
        "rows": {name: reader.table(name).num_rows for name in TABLES},
        "reward": sum(reader.table("trajectories", ["reward"])["reward"].to_pylist()),
        "tokens": sum(map(sum, reader.table("steps", ["sampled_tokens"])["sampled_tokens"].to_pylist())),
    }


CASES = [pytest.param((lake, name), id=f"{lake.stem}-{name}") for lake in LAKES for name in FOLDERS]


def test_there_is_a_lake_of_every_older_version():
    assert {int(lake.stem[1:]) for lake in LAKES} >= set(range(OLDEST_VERSION, SCHEMA_VERSION))


@pytest.mark.parametrize("stored", CASES, indirect=True)
def test_a_stored_lake_is_read_resumed_and_read_again(stored):
    folder, expected = stored
    expected["rows"] = dict.fromkeys(TABLES, 0) | expected["rows"]
    assert found_in(folder) | {"version": expected["version"]} == expected
    assert (expected["rows"]["discards"] > 0) == (expected["version"] >= 6)
    before = {name: open_run(folder).table(name) for name in TABLES}
    for name, table in before.items():
        assert len(from_table(name, table)) == expected["rows"][name]
    ids = before["quarantine"]["quarantine_id"].to_pylist()
    assert len(set(ids)) == len(ids)
    whole = read_trajectories(open_run(folder))
    assert [len(one.steps) for one in whole] == [one.row.num_steps for one in whole]

    added = continue_run(folder)
    after = {name: open_run(folder).table(name) for name in TABLES}
    for name in TABLES:
        # The killed run's open attempts end with its resume, which is an event.
        own = after[name].num_rows - before[name].num_rows
        assert own == added.get(name, 0) + (name == "events" and folder.name == "killed")
        if name not in ("attempts", "events"):
            assert after[name].slice(0, before[name].num_rows).equals(before[name])
    weights = after["consumptions"]["weight"].to_pylist()
    assert weights[-2:] == [0.25] * 2
    if expected["version"] == 1:
        assert set(weights[:-2]) == {1.0}
    collected = after["updates"]["collected_trajectories"].to_pylist()
    assert [bool(one) for one in collected] == [expected["version"] >= 3] * 3 + [True]
    steps = before["steps"].to_pylist()
    changes = {(step["context_change"], step["context_dropped_tokens"]) for step in steps}
    told = {("handover", 0), ("segmented", 9)} if expected["version"] >= 5 else set()
    assert changes == {("none", 0)} | told
    assert {step["num_preemptions"] for step in steps} == ({0, 2} if told else {0})
    assert open_run(folder).manifest.schema_version == SCHEMA_VERSION


@pytest.mark.parametrize("stored", CASES, indirect=True)
def test_a_compaction_changes_nothing_of_an_upgraded_run(stored, tmp_path):
    folder, _ = stored
    continue_run(folder)
    before = {name: open_run(folder).table(name) for name in TABLES}
    compact(open_run(folder))
    for name, table in before.items():
        reader = open_run(folder)
        assert len(reader.lake.files(name).paths) == 1
        assert reader.table(name).equals(table)
        assert pa.Table.from_batches(reader.batches(name), table.schema).num_rows == table.num_rows
        for column in table.column_names:
            assert reader.table(name, [column])[column].equals(table[column])
    copy_run(open_run(folder), tmp_path / "copy")
    for name, table in before.items():
        copied = pq.read_table(tmp_path / "copy" / name)
        assert copied.schema.equals(table.schema)
        assert copied.to_pylist() == table.to_pylist()


@pytest.mark.parametrize("stored", CASES, indirect=True)
def test_an_export_says_what_older_files_lack_and_what_stands_for_it(stored):
    folder, _ = stored
    continue_run(folder)
    reader = open_run(folder)
    exported = export_manifest(reader)
    for name, entry in exported["tables"].items():
        if not entry["files"]:
            continue
        with duckdb.connect() as database:
            database.execute(
                "CREATE VIEW raw AS SELECT * FROM read_parquet($paths, union_by_name = true)".replace(
                    "$paths", repr([file["path"] for file in entry["files"]])
                )
            )
            there = set(database.sql("FROM raw").columns)
            columns = [(column["name"], column["in_older_rows"]) for column in entry["columns"]]
            chosen = ", ".join(
                f"{key if older is None else f'coalesce({key}, {older})' if key in there else older} AS {key}"
                for key, older in columns
            )
            rows = f"FROM raw WHERE {exported['where']} ORDER BY {', '.join(exported['order_by'])}"
            for key in (column["name"] for column in entry["columns"] if not column["nullable"]):
                nulls = f"SELECT count(*) - count({key}) {rows.partition(' ORDER')[0]}"
                assert database.sql(nulls).fetchall() == [(0,)]
            found = database.sql(f"SELECT {chosen} {rows}").to_arrow_table()
        assert found.to_pylist() == reader.table(name).to_pylist()


def continue_run(folder):
    """Resume a run, append a group, learn it, and let the lake take it; return the rows added by table."""
    with ExperienceStore.open(
        folder, run_id="run", settings=StoreSection(), vocabulary_size=64, resume=True
    ) as store:
        *group, spare = make_group(issue=100, size=3)
        store.ledger.lease(make_leases([*group, spare]))
        assert len(store.append([*group, spare]).accepted) == 3
        store.discard([make_row(DiscardRow, trajectory_id=spare.row.trajectory_id, reason="stale")])
        update = store.ledger.mark("update") + 1
        store.ledger.advance("update", update)
        store.record_update(
            make_row(UpdateRow, update=update, num_replayed=3, collected_trajectories=("a", "b")),
            [],
            [make_row(LearnedTokensRow, update=update, begin=4, weight=0.25)],
            [
                make_row(
                    ConsumptionRow,
                    trajectory_id=t.row.trajectory_id,
                    update=update,
                    source="hot",
                    weight=0.25,
                )
                for t in group
            ],
        )
    steps = sum(len(t.steps) for t in (*group, spare))
    return {
        "steps": steps,
        "trajectories": 3,
        "attempts": 3,
        "discards": 1,
        "updates": 1,
        "learned_tokens": 1,
        "consumptions": 2,
    }


def test_a_newer_run_is_refused_in_words(tmp_path):
    with ExperienceStore.open(tmp_path / "run", run_id="run", settings=StoreSection(), vocabulary_size=64):
        pass
    path = tmp_path / "run" / "manifest.json"
    newer = json.loads(path.read_text()) | {"schema_version": SCHEMA_VERSION + 1}
    path.write_text(json.dumps(newer))
    with pytest.raises(RunFolderError, match=f"version {SCHEMA_VERSION + 1}.*release that wrote it"):
        open_run(tmp_path / "run")
    with pytest.raises(RunFolderError, match="release that wrote it"):
        ExperienceStore.open(
            tmp_path / "run", run_id="run", settings=StoreSection(), vocabulary_size=64, resume=True
        )
    assert json.loads(path.read_text()) == newer


def test_push_down_is_kept_over_files_of_both_versions(tmp_path, monkeypatch):
    with zipfile.ZipFile(LAKES[0]) as archive:
        archive.extractall(tmp_path)
    continue_run(tmp_path / "closed")
    plans = []
    prepare = hotpot.experience.reading.reader._prepare

    def spy(database, *arguments, **keywords):
        prepare(database, *arguments, **keywords)
        (plan,) = database.sql("EXPLAIN SELECT sum(weight) FROM consumptions WHERE update >= 3").fetchall()
        plans.append(plan[1])

    monkeypatch.setattr(hotpot.experience.reading.reader, "_prepare", spy)
    open_run(tmp_path / "closed").sql("SELECT 1 FROM consumptions")
    assert "Filters: update >= 3" in plans[0], plans[0]
    assert "trajectory_id" not in plans[0], plans[0]


def test_a_run_of_both_versions_reads_the_same_once_compacted(tmp_path):
    with zipfile.ZipFile(LAKES[0]) as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / "closed"
    continue_run(folder)
    before = {name: open_run(folder).table(name) for name in TABLES}
    assert compact(open_run(folder))
    for name, table in before.items():
        assert open_run(folder).table(name).equals(table), name
    batches = open_run(folder).batches("consumptions", ["weight"])
    assert sorted(weight for batch in batches for weight in batch.column(0).to_pylist()) == sorted(
        before["consumptions"]["weight"].to_pylist()
    )
