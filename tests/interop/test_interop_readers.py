"""Other programs, with their real packages, see of a compacted run exactly what Hotpot sees."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from interop_run import COLUMNS, TABLES, Written, in_order

from hotpot.experience import RunReader
from hotpot.experience.maintenance import copy_run

pytestmark = pytest.mark.slow


def assert_same(name: str, found: pa.Table, expected: pa.Table) -> None:
    found = in_order(name, found)
    assert found.num_rows == expected.num_rows
    for column in COLUMNS[name]:
        theirs, ours = found[column].combine_chunks(), expected[column].combine_chunks()
        if pa.types.is_list(ours.type):
            assert pc.list_value_length(theirs).to_pylist() == pc.list_value_length(ours).to_pylist(), column
            left, right = theirs.flatten().to_numpy(False), ours.flatten().to_numpy(False)
            assert left.dtype == right.dtype, f"{column} came back as {left.dtype}"
            assert left.tobytes() == right.tobytes(), f"{column} is not the same in every bit"
        else:
            assert theirs.to_pylist() == ours.to_pylist(), column


def reward_sum(expected: pa.Table) -> float:
    return float(pc.sum(expected["reward"]).as_py())


@pytest.mark.parametrize("name", TABLES)
def test_polars_reads_a_compacted_table_through_its_delta_reader(written: Written, name: str) -> None:
    import polars as pl

    expected = written.expected[name]
    frame = pl.scan_delta(str(written.lake / name)).filter(pl.col("_segment") <= written.watermark)
    total = frame.select(pl.col("reward").sum(), pl.len()).collect()
    assert total.row(0) == (reward_sum(expected), expected.num_rows)
    assert_same(name, frame.select(COLUMNS[name]).collect().to_arrow(), expected)
    eager = pl.read_delta(str(written.lake / name)).filter(pl.col("_segment") <= written.watermark)
    assert eager.height == expected.num_rows


@pytest.mark.parametrize("name", TABLES)
def test_duckdb_reads_a_compacted_table_over_its_exact_files(written: Written, name: str) -> None:
    expected = written.expected[name]
    source = duckdb.read_parquet(written.files(name)).filter(written.manifest["where"])
    assert source.aggregate("sum(reward), count(*)").fetchall() == [(reward_sum(expected), expected.num_rows)]
    assert_same(name, source.select(*COLUMNS[name]).to_arrow_table(), expected)


@pytest.mark.filterwarnings("ignore:The inplace keyword in DataFrame")  # Dask's own use of pandas
@pytest.mark.parametrize("name", TABLES)
def test_dask_reads_a_compacted_table_over_its_exact_files(written: Written, name: str) -> None:
    import dask.dataframe as dd

    expected = written.expected[name]
    frame = dd.read_parquet(written.files(name), dtype_backend="pyarrow")
    frame = frame[frame["_segment"] <= written.watermark]
    assert (frame["reward"].sum().compute(), len(frame)) == (reward_sum(expected), expected.num_rows)
    found = pa.Table.from_pandas(frame[COLUMNS[name]].compute(), preserve_index=False)
    assert_same(name, found, expected)


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    folder = tmp_path_factory.mktemp("spark")
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.local.dir": str(folder),
    }
    builder = SparkSession.builder.master("local[1]").appName("interop")
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    yield session
    session.stop()


@pytest.mark.parametrize("name", TABLES)
def test_spark_reads_a_compacted_table_over_its_exact_files(written: Written, name: str, spark: Any) -> None:
    from pyspark.sql import functions

    expected = written.expected[name]
    frame = spark.read.parquet(*written.files(name))
    frame = frame.where(written.manifest["where"])
    total = frame.agg(functions.sum("reward"), functions.count("*")).first()
    assert tuple(total) == (reward_sum(expected), expected.num_rows)
    assert_same(name, frame.select(*COLUMNS[name]).toArrow(), expected)


def test_a_copy_needs_nothing_but_a_glob(written: Written, tmp_path: Path) -> None:
    copy_run(RunReader.open(written.folder), tmp_path / "copy")
    for name, expected in written.expected.items():
        found = duckdb.read_parquet(str(tmp_path / "copy" / name / "*.parquet")).to_arrow_table()
        assert_same(name, found, expected)


def test_a_raw_glob_after_a_compaction_counts_rows_twice(written: Written) -> None:
    raw = duckdb.read_parquet(str(written.lake / "steps" / "**" / "*.parquet"))
    ((seen,),) = raw.filter(written.manifest["where"]).aggregate("count(*)").fetchall()
    exact = written.expected["steps"].num_rows
    assert exact < seen <= 2 * exact


def test_without_the_watermark_a_half_finished_segment_shows(written: Written) -> None:
    rows = duckdb.read_parquet(written.files("steps")).aggregate("count(*)").fetchall()
    assert rows == [(written.expected["steps"].num_rows + 2,)]
