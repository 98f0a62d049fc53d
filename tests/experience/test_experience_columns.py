"""Whole columns straight from the files are the same rows in the same order as SQL gives."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.config import StoreSection
from hotpot.experience import SCHEMAS, ExperienceStore, RunReader
from hotpot.experience.lake.lake import ROW_COLUMN, SEGMENT_COLUMN
from hotpot.experience.lake.storage import LakeLocation
from hotpot.experience.reading.columns import ColumnReader
from hotpot.testing.records import make_group, make_leases

BY_SQL = "1 = 1"
SCHEMA = pa.schema([SCHEMAS["steps"].field("reward")])


@pytest.fixture
def store(tmp_path: Path) -> ExperienceStore:
    return ExperienceStore.open(
        tmp_path / "run",
        run_id="run",
        settings=StoreSection(archive_every_batches=1, archive_every_s=600.0),
        vocabulary_size=64,
    )


def add_round(store: ExperienceStore, issue: int) -> None:
    group = make_group(issue=issue, size=4, num_steps=3)
    store.ledger.lease(make_leases(group))
    store.append(group)


def assert_equal_to_sql(reader: RunReader, name: str, columns: Sequence[str] | None) -> None:
    ours = reader.table(name, columns)
    assert ours.num_rows > 0
    assert ours.equals(reader.table(name, columns, where=BY_SQL), check_metadata=True)


@pytest.mark.parametrize("columns", [None, ["reward"], ["sampled_tokens", "step", "tool_name"]])
def test_columns_over_lake_compaction_and_log_tail(store: ExperienceStore, columns: list[str] | None) -> None:
    for issue in range(4):
        add_round(store, issue)
        store.flush()
    DeltaTable(str(store.run_folder / "lake" / "steps")).optimize.compact()
    for issue in (4, 5):
        add_round(store, issue)
        store.flush()
    store._archive.close(timeout_s=60.0)
    add_round(store, 6)  # stays in the log
    reader = RunReader.open(store.run_folder)
    assert_equal_to_sql(reader, "steps", columns)
    assert reader.table("steps", ["step"]).num_rows == 7 * 4 * 3
    assert_equal_to_sql(reader.at_once(), "steps", columns)


def test_an_unreadable_file_is_named(store: ExperienceStore) -> None:
    add_round(store, 0)
    store.close()
    (path,) = (store.run_folder / "lake" / "steps").rglob("part-*.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Exception, match="of the lake"):
        RunReader.open(store.run_folder).table("steps", ["reward"])


def assert_twice(paths: list[str], watermark: int, rewards: list[float]) -> None:
    """Read the rewards, then again with what the first time found out."""
    reader = ColumnReader(LakeLocation.of(Path(paths[0]).parent if paths else "."))
    for _ in range(2):
        pieces = reader.read(paths, watermark, SCHEMA)
        assert [value for piece in pieces for value in piece["reward"].to_pylist()] == rewards
    batches = reader.batches(paths, watermark, SCHEMA, 4)
    assert sorted(value for batch in batches for value in batch["reward"].to_pylist()) == rewards


rows = st.tuples(st.integers(1, 6), st.integers(0, 50))


@settings(max_examples=60, deadline=None)
@given(files=st.lists(st.lists(rows, min_size=1, max_size=8), max_size=4), watermark=st.integers(0, 7))
def test_any_layout_of_files_gives_recorded_order_up_to_the_watermark(
    files: list[list[tuple[int, int]]], watermark: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    paths, seen = [], []
    for number, places in enumerate(files):
        path = folder / f"{number}.parquet"
        values = [float(segment * 1000 + row) for segment, row in places]
        seen += [value for value, (segment, _) in zip(values, places, strict=True) if segment <= watermark]
        table = {
            SEGMENT_COLUMN: [segment for segment, _ in places],
            ROW_COLUMN: [row for _, row in places],
            "reward": values,
        }
        pq.write_table(pa.table(table), path, row_group_size=3)
        paths.append(str(path))
    assert_twice(paths, watermark, sorted(seen))


@settings(max_examples=40, deadline=None)
@given(
    order=st.permutations(range(6)),
    overlap=st.booleans(),
    rows=st.integers(1, 200),
)
def test_stretches_in_any_order_in_one_file(
    order: list[int], overlap: bool, rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("files") / "compacted.parquet"
    # Without overlap a stretch is a segment; with it, two stretches share a segment, row by row.
    places = [
        (part // 2, 2 * row + part % 2) if overlap else (part, row) for part in order for row in range(rows)
    ]
    columns = {
        SEGMENT_COLUMN: [segment for segment, _ in places],
        ROW_COLUMN: [row for _, row in places],
        "reward": [segment * 1e6 + row for segment, row in places],
    }
    table = pa.table(columns)
    pq.write_table(table, path)
    assert_twice([str(path)], 10, sorted(table["reward"].to_pylist()))
    assert_twice([str(path)], 1, sorted(value for value in table["reward"].to_pylist() if value < 2e6))
