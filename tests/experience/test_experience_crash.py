import os
import random
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pytest
from deltalake import DeltaTable

from hotpot.config import StoreSection
from hotpot.experience import ExperienceStore, open_run
from hotpot.types import TABLES

WORKER = Path(__file__).with_name("experience_crash_worker.py")


def work(folder, *, rounds, crash_at="", kill_after_lines=None, pause_s=0.0):
    """Run the worker until it ends or is killed; return its acknowledgements as a list of words per line."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOTPOT_CRASH_AT": crash_at}
    process = subprocess.Popen(
        [sys.executable, str(WORKER), str(folder), str(rounds)], stdout=subprocess.PIPE, text=True, env=environment
    )  # fmt: skip
    lines = []
    for line in process.stdout:
        lines.append(line.split())
        if kill_after_lines is not None and len(lines) >= kill_after_lines:
            time.sleep(pause_s)
            process.kill()
            break
    rest, _ = process.communicate(timeout=120)
    lines += [line.split() for line in rest.splitlines(keepends=True) if line.endswith("\n")]
    return lines, process.returncode


def check_run(folder, acknowledged, *, at_rest):
    """Assert everything the run promised, through the reader and, at rest, through the raw Delta tables."""
    kept = {trajectory_id for line in acknowledged if line[0] == "kept" for trajectory_id in line[1:]}
    learned = {int(line[1]) for line in acknowledged if line[0] == "learned"}
    reader = open_run(folder)
    check_records(lambda query: reader.sql(query).to_pylist(), kept, learned, at_rest=at_rest)
    if at_rest:
        with duckdb.connect(":memory:") as raw:
            for name in TABLES:
                if (folder / "lake" / name).exists():
                    files = DeltaTable(str(folder / "lake" / name)).file_uris()
                    raw.execute(f"CREATE VIEW {name} AS FROM read_parquet({files})")
            check_records(
                lambda query: raw.sql(query).to_arrow_table().to_pylist(), kept, learned, at_rest=True
            )
        assert not list((folder / "wal").iterdir())


def check_records(ask, kept, learned, *, at_rest):
    ids = [row["i"] for row in ask("SELECT trajectory_id AS i FROM trajectories")]
    assert len(ids) == len(set(ids))
    assert kept <= set(ids)
    halves = ask(
        "SELECT t.trajectory_id FROM trajectories t LEFT JOIN steps s USING (trajectory_id) "
        "GROUP BY t.trajectory_id, t.num_steps HAVING count(s.step) != t.num_steps OR count(DISTINCT s.step) != t.num_steps"
    )
    assert halves == []
    assert ask(
        "SELECT count(*) n FROM steps WHERE trajectory_id NOT IN (SELECT trajectory_id FROM trajectories)"
    ) == [{"n": 0}]
    attempts = ask("SELECT attempt_id AS i, state AS s, reason AS r FROM attempts")
    states = {row["i"]: row["s"] for row in attempts}
    assert len(states) == len(attempts)
    assert {i for i, state in states.items() if state == "finished"} == set(ids)
    if at_rest:
        assert set(states.values()) <= {"finished", "failed", "dropped"}
    updates = {row["u"]: row["n"] for row in ask('SELECT "update" AS u, num_trajectories AS n FROM updates')}
    assert learned <= set(updates)
    used = ask(
        'SELECT "update" AS u, count(*) AS n, count(DISTINCT trajectory_id) AS d FROM consumptions GROUP BY 1'
    )
    assert {row["u"]: row["n"] for row in used} == updates
    assert all(row["n"] == row["d"] for row in used)
    assert ask('SELECT count(*) n, count(DISTINCT "update") d FROM metrics') == [
        {"n": len(updates), "d": len(updates)}
    ]


def balanced(folder):
    store = ExperienceStore.open(
        folder, run_id="run", settings=StoreSection(), vocabulary_size=64, resume=True
    )
    counts = store.ledger.counts()
    store.close()
    attempts = open_run(folder).sql("SELECT state, count(*) n FROM attempts GROUP BY 1").to_pylist()
    by_state = {row["state"]: row["n"] for row in attempts}
    assert counts.leased == 0
    for state in ("finished", "failed", "dropped"):
        assert by_state.get(state, 0) == getattr(counts, state)


def survive(folder, **kill):
    acknowledged, code = work(folder, rounds=200, **kill)
    assert code == -9
    check_run(folder, acknowledged, at_rest=False)
    again, code = work(folder, rounds=2, crash_at="before_ledger:4")
    acknowledged += again
    assert code == -9
    check_run(folder, acknowledged, at_rest=False)
    last, code = work(folder, rounds=1)
    acknowledged += last
    assert code == 0
    check_run(folder, acknowledged, at_rest=True)
    balanced(folder)
    return acknowledged


FAST = ["wal_written:5", "before_ledger:4", "lake_after_trajectories:2"]
SLOW = [
    "wal_written:3",
    "before_ledger:7",
    "after_ledger:6",
    "lake_before_steps:2",
    "lake_after_steps:2",
    "lake_after_trajectories:1",
    "lake_after_attempts:3",
    "lake_before_segments:1",
    "before_watermark:2",
    "after_watermark:2",
]


@pytest.mark.parametrize("place", FAST)
def test_killed_once_and_taken_over(tmp_path, place):
    folder = tmp_path / "run"
    acknowledged, code = work(folder, rounds=200, crash_at=place)
    assert code == -9
    assert any(line[0] == "kept" for line in acknowledged)
    check_run(folder, acknowledged, at_rest=False)
    balanced(folder)
    check_run(folder, acknowledged, at_rest=True)
    (event,) = open_run(folder).table("events").to_pylist()
    assert event["kind"] == "recovered"


@pytest.mark.slow
@pytest.mark.parametrize("place", SLOW)
def test_killed_at_another_named_place(tmp_path, place):
    survive(tmp_path / "run", crash_at=place)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_killed_at_a_random_moment(tmp_path, seed):
    chance = random.Random(seed)
    survive(tmp_path / "run", kill_after_lines=chance.randrange(2, 40), pause_s=chance.random() * 0.02)


@pytest.mark.slow
def test_killed_while_recovering(tmp_path):
    folder = tmp_path / "run"
    acknowledged, _ = work(folder, rounds=200, crash_at="before_ledger:9")
    for _ in range(2):
        again, code = work(folder, rounds=5, crash_at="recovered_log")
        acknowledged += again
        assert code == -9
        check_run(folder, acknowledged, at_rest=False)
    last, code = work(folder, rounds=1)
    assert code == 0
    check_run(folder, acknowledged + last, at_rest=True)
    balanced(folder)


@pytest.mark.slow
def test_readers_beside_a_busy_writer_never_see_a_half_or_a_double(tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, str(WORKER), str(folder), "60"], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout.readline().startswith("open")
    reader = open_run(folder)
    seen = 0
    while process.poll() is None:
        (row,) = reader.sql(
            "SELECT count(*) n, count(DISTINCT trajectory_id) d, "
            "(SELECT count(*) FROM steps) s, (SELECT count(*) FROM attempts WHERE state = 'finished') f, "
            "(SELECT count(*) FROM attempts) a, (SELECT count(DISTINCT attempt_id) FROM attempts) b FROM trajectories"
        ).to_pylist()
        assert row["n"] == row["d"] == row["f"]
        assert row["s"] == 3 * row["n"]
        assert row["a"] == row["b"]
        assert row["n"] >= seen
        seen = row["n"]
    process.communicate()
    assert process.returncode == 0
    assert reader.sql("SELECT count(*) n FROM trajectories").to_pylist() == [{"n": 240}]
