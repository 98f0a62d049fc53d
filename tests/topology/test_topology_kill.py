"""A run that is killed, stopped and resumed as an operator would: nothing acknowledged is lost, doubled or renumbered."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from coin_recipe import SETTINGS

from hotpot.experience import RunReader, open_run
from hotpot.models import checksum, load_decoder

WORKER = Path(__file__).with_name("topology_kill_worker.py")
UPDATES = 5
FIVE = ("env_version", "reward_version", "prompt_version", "policy_version", "schema_version")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@dataclass
class Operator:
    """Starts and resumes one run through the command line, and notes what it acknowledged."""

    folder: Path
    model: Path
    kept: list[str] = field(default_factory=list)
    learned: list[int] = field(default_factory=list)
    worker: Path = WORKER

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def start(self, kill: str = "never", *more: str, until: "Stop | None" = None) -> tuple[int, str]:
        recipe = self.folder / "coin.toml"
        recipe.write_text("")
        overrides = [
            *flat(SETTINGS), f"topology.updates={UPDATES}", f"model.path={self.model}", f"run.folder={self.folder}",
            "run.id=run", "engine.max_concurrency=6", "checkpoint.every_updates=2", "checkpoint.keep=1",
            "store.archive_every_batches=2", "store.archive_every_s=0.05", *more,
        ]  # fmt: skip
        return self._go([kill, "train", str(recipe), *overrides], until)

    def resume(self, kill: str = "never", *overrides: str, until: "Stop | None" = None) -> tuple[int, str]:
        return self._go([kill, "train", "--resume", "run", "--runs", str(self.folder), *overrides], until)

    def _go(self, arguments: list[str], until: "Stop | None") -> tuple[int, str]:
        process = subprocess.Popen(
            [sys.executable, str(self.worker), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        guard = threading.Timer(180, process.kill)
        guard.start()
        lines = []
        with process:
            for count, line in enumerate(process.stdout or ()):
                lines.append(line)
                if until is not None and count == until.lines:
                    time.sleep(until.pause_s)
                    process.send_signal(until.signal)
        guard.cancel()
        code = process.returncode
        for line in lines:
            if line.endswith("\n"):  # a torn line was not read by anybody
                word, *rest = line.split() or [""]
                self.kept += rest if word == "kept" else []
                self.learned += map(int, rest) if word == "learned" else []
        return code, "".join(lines)


@dataclass(frozen=True)
class Stop:
    """A signal some time after the process has printed so many lines."""

    lines: int
    signal: int = signal.SIGKILL
    pause_s: float = 0.0


@pytest.fixture
def operator(tmp_path: Path, model: Path) -> Operator:
    return Operator(folder=tmp_path, model=model)


# ---- what must hold ----


def check(operator: Operator, *, closed: bool) -> None:
    """Assert everything the run has promised so far; ``closed``: it was left in order."""
    reader = open_run(operator.run)
    check_trajectories(reader, operator.kept, closed=closed)
    check_updates(reader, operator.learned)
    check_policy_versions(reader)
    if closed:
        assert not list((operator.run / "wal").iterdir())
        assert not list(operator.run.glob("checkpoints/*.partial"))


def check_trajectories(reader: RunReader, kept: list[str], *, closed: bool) -> None:
    ids = column(reader, "select trajectory_id from trajectories")
    assert len(ids) == len(set(ids))
    assert len(kept) == len(set(kept))
    assert set(kept) <= set(ids)
    assert (
        column(
            reader,
            "select t.trajectory_id from trajectories t left join steps s using (trajectory_id) "
            "group by t.trajectory_id, t.num_steps "
            "having count(s.step) <> t.num_steps or count(distinct s.step) <> t.num_steps",
        )
        == []
    )
    nulls = " or ".join(f"{version} is null" for version in FIVE)
    assert column(reader, f"select trajectory_id from steps where {nulls}") == []
    attempts = reader.sql("select attempt_id, state, reason, closed_us from attempts").to_pylist()
    assert len({row["attempt_id"] for row in attempts}) == len(attempts)
    assert {row["attempt_id"] for row in attempts if row["state"] == "finished"} == set(ids)
    if closed:
        assert {row["state"] for row in attempts} <= {"finished", "failed", "dropped"}
        assert all(row["closed_us"] is not None for row in attempts)
        assert all(bool(row["reason"]) == (row["state"] != "finished") for row in attempts)


def check_updates(reader: RunReader, learned: list[int]) -> None:
    updates = reader.sql('select * from updates order by "update"').to_pylist()
    numbers = [row["update"] for row in updates]
    assert len(numbers) == len(set(numbers))
    assert set(learned) <= set(numbers)
    assert all(
        row["parent_update"] in {0, *numbers} and row["parent_update"] < row["update"] for row in updates
    )
    used = reader.sql('select "update", trajectory_id from consumptions').to_pylist()
    trained = reader.sql(
        'select "update", trajectory_id, list_sum(loss_mask)::BIGINT as tokens from learned_tokens'
    ).to_pylist()
    assert sorted((row["update"], row["trajectory_id"]) for row in used) == sorted(
        (row["update"], row["trajectory_id"]) for row in trained
    )
    for row in updates:
        of_update = [found for found in trained if found["update"] == row["update"]]
        assert (
            len({found["trajectory_id"] for found in of_update}) == len(of_update) == row["num_trajectories"]
        )
        assert sum(found["tokens"] for found in of_update) == row["num_loss_tokens"]
    # Weights are what counts: a resume serves the same ones under a new version.
    strangers = column(
        reader,
        "with weights as (select version::BIGINT as version, manifest->>'$.checksum' as checksum from versions "
        "where kind = 'policy') "
        'select c.trajectory_id from consumptions c join updates u on u."update" = c."update" '
        "left join trajectories t on t.trajectory_id = c.trajectory_id "
        "left join weights sampled on sampled.version = t.policy_version "
        "left join weights learned on learned.version = u.policy_version "
        "where sampled.checksum is null or sampled.checksum is distinct from learned.checksum "
        "or t.purpose <> 'training'",
    )
    assert strangers == []


def check_policy_versions(reader: RunReader) -> None:
    versions = reader.sql(
        "select version, manifest from versions where kind = 'policy' order by first_seen_us"
    )
    numbers = [int(version) for version in versions["version"].to_pylist()]
    assert numbers == sorted(set(numbers))
    sums = {
        number: json.loads(manifest)["checksum"]
        for number, manifest in zip(numbers, versions["manifest"].to_pylist(), strict=True)
    }
    served = reader.sql("select distinct policy_version, policy_checksum from steps").to_pylist()
    # A version that sampled before the frame that explains it was written belongs to a process that was killed there.
    assert len({row["policy_version"] for row in served}) == len(served)
    for row in served:
        assert sums.get(row["policy_version"], row["policy_checksum"]) == row["policy_checksum"]
    by_owner = reader.sql(
        "select min(policy_version) as low, max(policy_version) as high from steps join attempts using (attempt_id) "
        "group by owner::INT order by owner::INT"
    ).to_pylist()
    assert all(after["low"] > before["high"] for before, after in pairwise(by_owner))
    made = column(reader, "select new_policy_version from updates")
    assert len(made) == len(set(made))
    assert set(made) <= set(numbers)


def check_finished(operator: Operator, updates: int = UPDATES) -> None:
    """Assert that the run says it is whole, and that its last checkpoint is the policy it says it ended with."""
    check(operator, closed=True)
    reader, summary = open_run(operator.run), json.loads((operator.run / "summary.json").read_text())
    assert (summary["status"], summary["updates"]) == ("finished", updates)
    parents = {
        row["update"]: row["parent_update"]
        for row in reader.sql('select "update", parent_update from updates').to_pylist()
    }
    chain = [point["update"] for point in summary["curve"]]
    assert len(chain) == updates
    assert [parents[number] for number in chain] == [0, *chain[:-1]]
    assert summary["holdout"]["before"]["mean"] is not None
    assert summary["holdout"]["after"]["greedy"]["mean"] is not None
    counted = reader.sql("select count(*) n from trajectories where purpose = 'training'")["n"][0].as_py()
    assert summary["trajectories"] == counted
    assert sum(summary["seconds"].values()) == pytest.approx(summary["seconds_total"])
    (last,) = reader.sql(f'select new_policy_version from updates where "update" = {chain[-1]}').to_pylist()
    (manifest,) = column(
        reader,
        f"select manifest from versions where kind = 'policy' and version = '{last['new_policy_version']}'",
    )
    decoder = load_decoder(operator.run / "checkpoints" / f"update-{chain[-1]:06d}")
    assert checksum(decoder.state_dict()) == json.loads(manifest)["checksum"]


def column(reader: RunReader, query: str) -> list[Any]:
    return reader.sql(query).column(0).to_pylist()


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={json.dumps(value)}"


# ---- SIGKILL ----


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("evaluating:2", "collecting:3"),
        ("learned:2", "published:2"),
        ("recording:3", "logged:1"),
        ("saving:3", "pruned:1"),
        ("recorded:5", "evaluated:1"),
        ("opened:1", "evaluated:4"),
    ],
)
def test_killed_twice_at_named_places(operator: Operator, first: str, second: str) -> None:
    code, text = operator.start(f"{first}:9")
    assert code == -signal.SIGKILL, text
    check(operator, closed=False)
    code, text = operator.resume(f"{second}:9")
    if code != -signal.SIGKILL:  # the first kill left nothing of that kind to do
        assert code == 0, text
    check(operator, closed=code == 0)
    code, text = operator.resume()
    assert code == 0, text
    check_finished(operator)


@pytest.mark.parametrize("seed", range(3))
def test_killed_twice_at_random_moments(operator: Operator, seed: int) -> None:
    chance = random.Random(seed)
    code, text = operator.start(until=Stop(chance.randrange(2, 40), pause_s=chance.random() * 0.1))
    assert code == -signal.SIGKILL, text
    check(operator, closed=False)
    code, _ = operator.resume(until=Stop(chance.randrange(1, 15), pause_s=chance.random() * 0.1))
    check(operator, closed=code == 0)
    code, text = operator.resume()
    assert code == 0, text
    check_finished(operator)


def test_killed_before_anything_was_saved(operator: Operator) -> None:
    code, text = operator.start("saving:1:9")
    assert code == -signal.SIGKILL, text
    assert not list(operator.run.glob("checkpoints/update-000000"))
    code, text = operator.resume()
    assert code == 0, text
    check_finished(operator)


# ---- SIGINT and SIGTERM ----


@pytest.mark.parametrize(
    ("number", "place", "updates"),
    [
        (signal.SIGINT, "collecting:1", 0),
        (signal.SIGINT, "issued:2", 1),
        (signal.SIGTERM, "evaluating:1", 0),
        (signal.SIGINT, "learned:2", 2),
        (signal.SIGTERM, "opened:1", 0),
    ],
)
def test_a_signal_ends_cleanly_and_the_run_can_go_on(
    operator: Operator, number: int, place: str, updates: int
) -> None:
    code, text = operator.start(f"{place}:{int(number)}")
    assert code == 130, text
    assert f"stopped by signal {int(number)}; everything finished so far is stored" in text
    assert "Traceback" not in text
    check(operator, closed=True)
    summary = json.loads((operator.run / "summary.json").read_text())
    assert (summary["status"], summary["updates"]) == ("stopped", updates)
    assert (operator.run / "trace.json").is_file()
    assert (operator.run / f"checkpoints/update-{updates:06d}/learner.json").is_file()
    attempts = open_run(operator.run).sql("select state, reason from attempts").to_pylist()
    # There may be none: the episodes of one wave may all end in the same engine step.
    assert {row["reason"] for row in attempts if row["state"] == "dropped"} <= {"the collection was stopped"}
    if place != "learned:2":
        assert len(attempts) % 16 != 0, "the collection was not cut short"
    code, text = operator.resume()
    assert code == 0, text
    check_finished(operator)


def test_a_finished_run_is_extended_and_says_what_was_changed(operator: Operator) -> None:
    code, text = operator.start()
    assert code == 0, text
    check_finished(operator)
    code, text = operator.resume("never", "learner.learning_rate=0.001", f"topology.updates={UPDATES + 1}")
    assert code == 0, text
    check_finished(operator, UPDATES + 1)
    (detail,) = column(open_run(operator.run), "select detail from events where kind = 'resumed'")
    assert json.loads(detail)["changed"] == {
        "learner.learning_rate": [0.003, 0.001],
        "topology.updates": [UPDATES, UPDATES + 1],
    }
