"""The lake on a real S3 server: shared, read without the run folder, and while the server is dead or hangs."""

import json
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from hotpot.config import StoreSection
from hotpot.errors import RunFolderError, StoreError, UsageError
from hotpot.experience import ExperienceStore, open_run
from hotpot.experience.reading import remote as remote_module
from hotpot.testing.object_server import BUCKET
from hotpot.testing.records import make_group, make_leases

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def place():
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/lake"


def open_store(folder, place, s3, run_id="run", **settings):
    section = StoreSection(lake=place, s3=s3, **settings)
    resume = (folder / "manifest.json").exists()
    return ExperienceStore.open(folder, run_id=run_id, settings=section, vocabulary_size=64, resume=resume)


def append(store, issue, size=4):
    group = make_group(issue=issue, size=size, run_id=store.run_folder.name)
    store.ledger.lease(make_leases(group))
    return store.append(group)


def count(run, table="trajectories"):
    return open_run(run).sql(f"SELECT count(*) AS n FROM {table}").to_pylist()[0]["n"]


class Counted:
    """A file that notes how many bytes were asked of it."""

    def __init__(self, file, read):
        self.file, self.noted = file, read

    def __getattr__(self, name):
        return getattr(self.file, name)

    def read(self, size=-1):
        self.noted.append(size)
        return self.file.read(size)


def append_many(store, issues):
    for issue in issues:
        append(store, issue)


def wait_until(true, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_one_code_for_a_folder_and_for_s3(tmp_path, place, s3):
    local = f"{tmp_path}/lake"
    tables = {}
    for lake, folder in ((local, tmp_path / "one" / "run"), (place, tmp_path / "two" / "run")):
        with open_store(folder, lake, s3) as store:
            append(store, 0)
            store.flush()
            append(store, 1)
            assert count(folder) == 8
        reader = open_run(f"{lake}#run")
        assert reader.run_folder is None
        tables[lake] = [
            reader.table("steps").to_pylist(),
            reader.table("trajectories", where="reward > 0").to_pylist(),
        ]
        assert open_run(lake).table("steps").equals(open_run(folder).table("steps"))
    assert tables[local] == tables[place]
    with pytest.raises(RunFolderError, match=r"holds no run 'other'.*run"):
        open_run(f"{place}#other")


def test_manifest_and_messages_hold_no_credentials(tmp_path, place, s3, monkeypatch):
    folder = tmp_path / "run"
    open_store(folder, place, s3).close()
    text = (folder / "manifest.json").read_text()
    assert place in text
    assert "hotpot-test" not in text
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(UsageError, match="AWS_SECRET_ACCESS_KEY"):
        open_run(folder)


def test_a_query_reads_the_columns_it_names_and_its_files_only(
    tmp_path, place, s3, object_server, monkeypatch
):
    folder = tmp_path / "run"
    with open_store(folder, place, s3) as store:
        append(store, 0)
    # A large file in the place of the real one; every number in it is random, so each column takes its 4 MB.
    files, base = object_server.filesystem, place.removeprefix("s3://")
    name = DeltaTable(f"{place}/trajectories", storage_options=object_server.environment).file_uris()[0]
    path = name.removeprefix("s3://")
    old = pq.read_table(path, filesystem=files)
    rows = 500_000
    rng = np.random.default_rng(0)
    columns = {}
    for field in old.schema:
        if field.name == "_segment":
            columns[field.name] = np.ones(rows, np.int64)
        elif pa.types.is_integer(field.type) or pa.types.is_floating(field.type):
            columns[field.name] = rng.normal(size=rows).astype(np.float64).view(field.type.to_pandas_dtype())
        else:
            columns[field.name] = pa.repeat(old[field.name][0], rows)
    pq.write_table(pa.table(columns), path, filesystem=files, compression="zstd", row_group_size=100_000)
    size = files.get_file_info(path).size
    group = pq.ParquetFile(path, filesystem=files).metadata
    reward = sum(
        group.row_group(i).column(j).total_compressed_size
        for i in range(group.num_row_groups)
        for j in range(group.num_columns)
        if group.row_group(i).column(j).path_in_schema in ("reward", "_segment")
    )
    read = []
    real = remote_module._LakeFiles._open
    monkeypatch.setattr(
        remote_module._LakeFiles, "_open", lambda *given, **named: Counted(real(*given, **named), read)
    )
    reader = open_run(folder)
    assert reader.sql("SELECT count(reward) AS n FROM trajectories").to_pylist() == [{"n": rows}]
    assert reward < sum(read) < 1.2 * reward + 300_000 < size / 3
    with pytest.raises(UsageError, match=r"can't be opened|Permission"):
        reader.sql(f"SELECT * FROM read_text('s3://{base}/_runs/run.json')")
    with pytest.raises(UsageError, match="single SELECT"):
        reader.sql(f"COPY (SELECT 1) TO '{name}'")


def test_two_processes_write_one_lake_at_once_and_neither_waits_or_loses(tmp_path, place, s3):
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[4]); from pathlib import Path\n"
        "from test_experience_lake_s3 import append, open_store\n"
        "folder = Path(sys.argv[1])\n"
        "with open_store(folder, sys.argv[2], json.loads(sys.argv[3]), folder.name) as store:\n"
        "    for issue in range(12):\n        append(store, issue)\n        store.flush()\n"
        "    print(store.archive_status().tries)\n"
    )
    script = [sys.executable, "-c", code]
    arguments = [place, json.dumps(s3), str(Path(__file__).parent)]
    workers = [
        subprocess.Popen([*script, str(tmp_path / name), *arguments], stdout=subprocess.PIPE, text=True)
        for name in ("a", "b")
    ]
    outputs = [worker.communicate(timeout=200)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    for name in ("a", "b"):
        reader = open_run(f"{place}#{name}")
        assert reader.lake.watermark() >= 12
        assert reader.sql(
            "SELECT count(*) n, count(DISTINCT trajectory_id) d, min(run_id) r FROM trajectories"
        ).to_pylist() == [{"n": 48, "d": 48, "r": name}]
        assert count(tmp_path / name, "steps") == reader.table("steps").num_rows
        assert count(tmp_path / name, "events where kind = 'archive_failing'") == 0


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_an_outage_is_ridden_out_and_heals_by_itself(tmp_path, place, s3, object_server, how):
    folder = tmp_path / "run"
    limits = {"archive_every_batches": 1, "max_backlog": 3, "backpressure_s": 0.5}
    with open_store(folder, place, s3, **limits) as store:
        append(store, 0)
        store.flush()
        getattr(object_server, how)()
        try:
            append_many(store, range(1, 4))
            # One batch may be in the hands of the archive already; no more than one besides the three get in.
            with pytest.raises(StoreError, match=r"store\.max_backlog allows 3"):
                append_many(store, range(4, 6))
            wait_until(lambda: store.archive_status().tries >= 2)
            began = time.monotonic()
            with pytest.raises(StoreError, match="did not take the log"):
                store.flush(timeout_s=1.0)
            assert time.monotonic() - began < 5.0
        finally:
            object_server.go_on() if how == "hang" else object_server.start()
        wait_until(lambda: store.backlog() == 0, 120.0)
        store.flush()
        assert store.archive_status().tries == 0
    reader = open_run(f"{place}#run")
    assert (
        reader.table("trajectories").num_rows
        == len(set(reader.table("trajectories")["trajectory_id"].to_pylist()))
        >= 16
    )
    assert not list((folder / "wal").iterdir())
    kinds = reader.table("events", ["kind"]).column(0).to_pylist()
    assert kinds.count("archive_failing") == kinds.count("archive_healed") == 1


def test_closing_against_a_hanging_server_ends_and_the_next_owner_has_everything(
    tmp_path, place, s3, object_server
):
    folder = tmp_path / "run"
    store = open_store(folder, place, s3, flush_timeout_s=1.0)
    append(store, 0)
    object_server.hang()
    try:
        began = time.monotonic()
        with pytest.raises(StoreError, match="everything acknowledged is in the log"):
            store.close()
        assert time.monotonic() - began < 25.0
        began = time.monotonic()
        with pytest.raises(StoreError, match="check the storage"):
            open_store(folder, place, s3)
        assert time.monotonic() - began < 25.0
    finally:
        object_server.go_on()
    open_store(folder, place, s3).close()
    assert count(f"{place}#run") == 4
    assert count(folder, "attempts where state = 'finished'") == 4
