"""A run as columns: what is read of the files, what is copied, and that nothing is lost or doubled on the way."""

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import hotpot
from hotpot.config import StoreSection
from hotpot.errors import StoreError, UsageError
from hotpot.experience import SCHEMAS, ExperienceStore, flat, from_table, to_table
from hotpot.experience.lake.lake import Lake
from hotpot.testing.records import make_group, make_leases, make_row, make_trajectory
from hotpot.types import TABLES, ConsumptionRow, LearnedTokensRow, UpdateRow

FILES, ROWS = 6, 4096


def lake_of(folder: Path) -> Lake:
    return hotpot.open_run(folder).lake


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A run whose table ``steps`` lies in a few files of some size: file n has issue n, and rewards of its own."""
    folder = tmp_path_factory.mktemp("runs") / "large"
    with ExperienceStore.open(folder, run_id="run", settings=StoreSection(), vocabulary_size=64):
        pass
    made = [step for n in range(ROWS // 8) for step in make_trajectory(issue=n, num_steps=8).steps]
    steps, random, lake = to_table("steps", made), np.random.default_rng(0), lake_of(folder)
    for number in range(1, FILES + 1):
        for name, values in (("reward", random.normal(size=ROWS)), ("issue", np.full(ROWS, number))):
            place = steps.schema.get_field_index(name)
            steps = steps.set_column(place, steps.schema.field(place), pa.array(values))
        lake.commit("steps", number, steps, np.arange(ROWS))
        lake.publish(number, {"steps": ROWS})
    return folder


@pytest.fixture
def small(tmp_path):
    """A live run: two groups in two files of the lake, one in the log."""
    folder = tmp_path / "run"
    store = ExperienceStore.open(folder, run_id="run", settings=StoreSection(), vocabulary_size=64)
    with store:
        for issue in range(3):
            group = make_group(
                issue=issue, size=4, policy_version=issue, rewards=(0.0, 1.0, float(issue), 1.0)
            )
            store.ledger.lease(make_leases(group))
            store.append(group)
            if issue < 2:
                store.flush()
        yield folder


def files_of(folder: Path, table: str = "steps") -> list[Path]:
    return sorted((folder / "lake" / table).rglob("*.parquet"))


def bytes_read() -> int:
    file = Path("/proc/self/io")
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("rchar")), 0)


def column_bytes(folder: Path, name: str) -> int:
    total = 0
    for path in files_of(folder):
        metadata = pq.read_metadata(path)
        for group in range(metadata.num_row_groups):
            chunks = [metadata.row_group(group).column(at) for at in range(metadata.num_columns)]
            total += sum(
                chunk.total_compressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] == name
            )
    return total


def read_by(act) -> int:
    act()  # learns what stays true of the files
    before = bytes_read()
    act()
    return bytes_read() - before


@pytest.fixture
def counted(tmp_path) -> None:
    """Whether less was read can be told only where the kernel counts at all; some sandboxes' kernels do not."""
    (tmp_path / "some").write_bytes(bytes(4096))
    if not read_by((tmp_path / "some").read_bytes) >= 4096:
        pytest.skip("this kernel does not count the bytes that a process reads (/proc/self/io)")


@pytest.mark.usefixtures("counted")
def test_a_whole_column_reads_the_column_and_nothing_else(large) -> None:
    run = hotpot.open_run(large)
    read = read_by(lambda: run.steps.to_arrow(["reward"]))
    assert read <= 1.2 * column_bytes(large, "reward")
    assert read < 0.2 * sum(path.stat().st_size for path in files_of(large))
    scanned = read_by(lambda: list(run.steps.scan(["reward"], batch_rows=1000)))
    assert scanned <= 1.2 * column_bytes(large, "reward")


@pytest.mark.usefixtures("counted")
def test_a_condition_skips_the_files_that_cannot_meet_it(large) -> None:
    run = hotpot.open_run(large)
    tokens = column_bytes(large, "sampled_tokens")
    for ask in (run.steps.to_arrow, lambda *given, **condition: list(run.steps.scan(*given, **condition))):
        all_of_it, one_file = (
            read_by(functools.partial(ask, ["sampled_tokens"], where=where))
            for where in ("issue >= 0", "issue = 3")
        )
        assert one_file < all_of_it - 0.6 * tokens
        assert all_of_it < sum(path.stat().st_size for path in files_of(large)) / 4
    assert run.steps.to_arrow(["reward"], where="issue = ?", params=[3]).num_rows == ROWS


def test_batches_are_small_and_hold_every_row_once(large) -> None:
    run = hotpot.open_run(large)
    whole = run.steps.to_numpy("reward")
    for where in ("true", "issue > 0"):
        batches = list(run.steps.scan(["reward"], where=where, batch_rows=500))
        assert max(batch.num_rows for batch in batches) <= 500
        values = np.concatenate([batch.column(0).to_numpy() for batch in batches])
        assert np.array_equal(np.sort(values), np.sort(whole))


def test_list_columns_are_views_of_arrows_buffers(large) -> None:
    column = hotpot.open_run(large).steps.column("behaviour_logprobs", where="issue = 2")
    assert (column.values.dtype, column.offsets.dtype, len(column.offsets)) == (
        np.float32,
        np.int32,
        ROWS + 1,
    )
    buffer = np.frombuffer(column.arrow.values.buffers()[1], np.float32)
    assert np.shares_memory(column.values, buffer)
    assert np.shares_memory(column.offsets, np.frombuffer(column.arrow.buffers()[1], np.int32))
    tensor = torch.from_dlpack(column.arrow.values)
    assert tensor.data_ptr() == column.arrow.values.buffers()[1].address
    batch = next(hotpot.open_run(large).steps.scan(["behaviour_logprobs"]))
    piece = flat(batch.column(0))
    assert np.shares_memory(piece.values, np.frombuffer(batch.column(0).values.buffers()[1], np.float32))
    sums = np.add.reduceat(column.values, column.offsets[:-1])
    assert sums == pytest.approx([sum(row.as_py()) for row in column.arrow], rel=1e-4)


def test_every_table_is_there_over_lake_and_log(small) -> None:
    run = hotpot.open_run(small)
    for name in TABLES:
        assert getattr(run, name).to_arrow().schema.equals(SCHEMAS[name], check_metadata=True)
        rows = sum(batch.num_rows for batch in getattr(run, name).scan(batch_rows=3))
        assert rows == getattr(run, name).to_arrow().num_rows
    ids = [f"{issue}.{sample}.0" for issue in range(3) for sample in range(4)]
    assert run.trajectories.to_numpy("trajectory_id").tolist() == ids
    assert run.trajectories.to_arrow(where="true AND true").equals(run.trajectories.to_arrow())
    assert run.trajectories.to_numpy("reward", where="reward > ?", params=[1]).tolist() == [2.0]
    assert np.isnan(run.trajectories.to_numpy("evaluation")).all()
    assert run.steps.column("sampled_tokens").offsets[-1] == sum(
        len(step.sampled_tokens) for step in from_table("steps", run.table("steps"))
    )
    assert len(run.learned_tokens.column("tokens").values) == 0


def test_order_and_rows_survive_compaction_shuffling_and_an_unfinished_commit(small) -> None:
    expected = hotpot.open_run(small).table("steps")
    small = shutil.copytree(small, small.parent / "copy")
    one = files_of(small)[0]
    table, data = pq.ParquetFile(one).read(), one.read_bytes()
    pq.write_table(table.take(pa.array(np.arange(table.num_rows)[::-1])), one)
    assert hotpot.open_run(small).table("steps").equals(expected)
    one.write_bytes(data)
    lake = lake_of(small)
    lake.commit("steps", lake.watermark() + 5, expected, np.arange(expected.num_rows))
    assert hotpot.open_run(small).table("steps").equals(expected)
    reader = hotpot.open_run(small)
    handle = reader.lake.open_table("steps")
    handle.optimize.compact()
    assert len(hotpot.open_run(small).lake.files("steps").paths) == 1
    assert reader.table("steps").equals(expected)
    assert hotpot.open_run(small).table("steps").equals(expected)
    assert sum(batch.num_rows for batch in reader.steps.scan(["reward"], batch_rows=7)) == expected.num_rows


def test_a_damaged_file_is_named(small) -> None:
    path = files_of(small)[0]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(StoreError, match=path.name):
        hotpot.open_run(small).steps.to_arrow(["reward"])


def test_wrong_names_are_told(small) -> None:
    run = hotpot.open_run(small)
    with pytest.raises(UsageError, match="columns are run_id"):
        next(run.steps.scan(["nonsense"]))
    with pytest.raises(UsageError, match=r"take column\('sampled_tokens'\)"):
        run.steps.to_numpy("sampled_tokens")
    with pytest.raises(UsageError, match="no list of numbers"):
        run.steps.column("span_stage")
    with pytest.raises(UsageError, match="the query failed"):
        next(run.steps.scan(where="nonsense = 1"))
    with pytest.raises(UsageError, match="at least one row"):
        next(run.steps.scan(batch_rows=0))
    with pytest.raises(UsageError, match="by \\['reward'\\]"):
        run.rewards_by("reward")


def test_rewards_by_pairs_of_versions(small) -> None:
    run = hotpot.open_run(small)
    found = run.rewards_by("policy_version", "env_version").to_pylist()
    assert [(row["policy_version"], row["num_trajectories"]) for row in found] == [(0, 4), (1, 4), (2, 4)]
    for row, rewards in zip(found, ([0, 1, 0, 1], [0, 1, 1, 1], [0, 1, 2, 1]), strict=True):
        assert row["reward_mean"] == pytest.approx(np.mean(rewards))
        assert row["reward_variance"] == pytest.approx(np.var(rewards))
    assert run.rewards_by("env_version", where="reward > 0").num_rows == 1


def test_importance_ratios_are_exp_new_minus_old_over_the_loss_tokens(small) -> None:
    folder = small.parent / "other"
    old, new = np.float32([0, -1.0, -2.0, 0]), np.float32([0, -0.5, -2.5, 0])
    with ExperienceStore.open(folder, run_id="run", settings=StoreSection(), vocabulary_size=64) as store:
        made = make_trajectory()
        store.ledger.lease(make_leases([made]))
        store.append([made])
        store.record_update(
            make_row(UpdateRow, update=1),
            [],
            [
                make_row(LearnedTokensRow, update=1, trajectory_id="0.0.0", loss_mask=np.int32([0, 1, 1, 0]), old_logprobs=old, new_logprobs=new)
            ],
            [make_row(ConsumptionRow, update=1, trajectory_id="0.0.0")],
        )  # fmt: skip
        (row,) = hotpot.open_run(folder).importance_ratios().to_pylist()
    ratios = np.exp([0.5, -0.5])
    assert (row["update"], row["num_tokens"]) == (1, 2)
    assert [row["ratio_mean"], row["ratio_min"], row["ratio_max"]] == pytest.approx(
        [ratios.mean(), ratios[1], ratios[0]]
    )
    assert row["effective_share"] == pytest.approx(ratios.sum() ** 2 / (2 * (ratios**2).sum()))


def test_import_hotpot_loads_nothing_heavy() -> None:
    code = "import hotpot, sys; print({'pyarrow', 'duckdb', 'numpy', 'deltalake'} & set(sys.modules), hotpot.open_run.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["set()", "open_run"]
