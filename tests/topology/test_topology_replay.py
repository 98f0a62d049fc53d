"""Runs that learn again from their own record: what is recorded of it, and that the same draws follow after a restart."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from coin_recipe import SETTINGS

from hotpot.errors import RecipeError
from hotpot.experience import RunReader, open_run
from hotpot.topology import train

REPLAY = ("replay.share=0.5", "replay.hot_share=0.5", "replay.weighting=positive")
WORKER = Path(__file__).with_name("topology_kill_worker.py")


def learned(reader: RunReader) -> list[tuple[Any, ...]]:
    """(update, batch hash, [(trajectory, source, weight) of what it drew]) of every update, in order."""
    hashes = reader.sql('select "update", batch_hash from updates order by 1').to_pylist()
    drawn = reader.sql(
        "select \"update\", trajectory_id, source, weight from consumptions where source <> 'fresh' order by 1, 2"
    ).to_pylist()
    return [
        (
            row["update"],
            row["batch_hash"],
            [(d["trajectory_id"], d["source"], d["weight"]) for d in drawn if d["update"] == row["update"]],
        )
        for row in hashes
    ]


def test_replayed_trajectories_are_on_the_record_and_apart_from_what_was_collected(run) -> None:
    reader = open_run(run(*REPLAY, "topology.updates=4"))
    updates = reader.sql('select * from updates order by "update"').to_pylist()
    assert updates[0]["num_replayed"] == 0
    assert all(row["num_replayed"] > 0 for row in updates[1:])
    drawn = reader.sql(
        'select c."update" as used, c.weight, c.source, l.weight as learned_weight, l.group_id, t.reward, '
        "l.loss_mask, l.advantages, l.policy_version from consumptions c "
        'join learned_tokens l on l."update" = c."update" and l.trajectory_id = c.trajectory_id '
        "join trajectories t on t.trajectory_id = c.trajectory_id where c.source <> 'fresh'"
    ).to_pylist()
    assert {row["source"] for row in drawn} == {"hot", "cold"}
    groups = {row["group_id"]: row for row in reader.table("groups").to_pylist()}
    assert (
        len(groups) == reader.table("groups").num_rows == 4 * 4
    )  # a row where it was collected, none where drawn
    for row in drawn:
        group = groups[row["group_id"]]
        assert row["weight"] == row["learned_weight"]
        assert group["update"] < row["used"]
        assert (group["size"], group["kept"]) == (4, True)
        wanted = (
            row["reward"] - group["reward_mean"]
        )  # of the whole recorded group, not of what was drawn of it
        found = [a for a, mask in zip(row["advantages"], row["loss_mask"], strict=True) if mask]
        assert found == pytest.approx([wanted] * len(found))
    for row in updates:
        of_update = [d for d in drawn if d["used"] == row["update"]]
        assert row["num_replayed"] == len(of_update)
        assert all(d["policy_version"] < row["policy_version"] for d in of_update)
        collected = [g for g in groups.values() if g["update"] == row["update"]]
        assert row["num_groups"] == len(collected) == 4
        assert row["num_groups_kept"] == sum(g["kept"] for g in collected)
        assert row["reward_mean"] == pytest.approx(sum(g["reward_mean"] for g in collected) / 4)
        assert (row["staleness_max"], row["staleness_mean"]) == (0, 0)
        assert row["logprob_difference_max"] < 1e-4


def test_draws_that_fall_short_or_repeat_are_events(run) -> None:
    reader = open_run(run(*REPLAY, "topology.updates=4"))
    events = reader.sql(
        "select kind, detail from events where kind like 'replay%' or kind = 'consumed_again' order by time_us"
    ).to_pylist()
    assert events[0]["kind"] == "replay_empty"
    assert {"consumed_again"} <= {event["kind"] for event in events}
    again = [json.loads(event["detail"])["num"] for event in events if event["kind"] == "consumed_again"]
    uses = reader.sql(
        "select count(*) - count(distinct trajectory_id) as n from consumptions where source <> 'fresh'"
    )["n"][0].as_py()
    # Repeats inside an epoch; the first uses of the next epoch are repeats for the ledger only.
    assert 0 < sum(again) <= uses


def test_only_what_did_better_than_its_group_is_drawn_where_told_so(run) -> None:
    reader = open_run(run(*REPLAY, "replay.only_positive=true", "topology.updates=4"))
    drawn = reader.sql(
        "select t.reward > g.reward_mean as better from consumptions c join trajectories t using (trajectory_id) "
        "join groups g on g.group_id = t.group_id where c.source <> 'fresh'"
    )["better"].to_pylist()
    assert drawn
    assert all(drawn)


def test_a_run_that_goes_on_draws_what_one_that_never_stopped_draws(run, recipe) -> None:
    whole = open_run(run(*REPLAY, "run.id=whole", "topology.updates=5"))
    folder = run(*REPLAY, "run.id=parts", "topology.updates=2")
    train(recipe(*REPLAY, "run.id=parts", "topology.updates=5"), resume=folder)
    assert learned(open_run(folder)) == learned(whole)
    assert any(drawn for _, _, drawn in learned(whole)[2:])


def test_a_run_whose_task_was_switched_learns_again_what_it_learned_of_the_task_before(run, recipe) -> None:
    folder = run("topology.updates=2")
    switched = ("env.params.wrong=-1", "replay.share=0.5", "replay.hot_share=0", "replay.quotas.coin=0.75")
    train(recipe(*switched, "topology.updates=4"), resume=folder)
    reader = open_run(folder)
    drawn = reader.sql(
        'select c."update" as used, c.source, t.reward_version, t.reward from consumptions c '
        "join trajectories t using (trajectory_id) where c.source <> 'fresh'"
    ).to_pylist()
    versions = reader.sql('select reward_version from updates order by "update"')[
        "reward_version"
    ].to_pylist()
    before, now = versions[0], versions[-1]
    assert before != now
    of_first = [row for row in drawn if row["used"] == 3]
    assert {(row["source"], row["reward_version"]) for row in of_first} == {("cold", before)}
    assert len(of_first) == 12  # of 16 wanted: both versions stand under the one quota of the environment
    assert min(row["reward"] for row in of_first) == 0  # as judged then


def test_without_replay_nothing_of_it_is_made(run) -> None:
    folder = run("topology.updates=2")
    assert not (folder / "cache").exists()
    reader = open_run(folder)
    assert set(reader.table("consumptions", ["source", "weight"]).to_pylist()[0].values()) == {"fresh", 1.0}


def test_replay_and_learning_from_a_record_are_not_mixed(recipe, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"replay\.share"):
        recipe(*REPLAY, "debug.mode=learn_from_record", f"debug.source_run={tmp_path}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_after_a_kill_the_same_draws_follow(tmp_path: Path, model: Path) -> None:
    def start(run_id: str, kill: str, *arguments: str) -> int:
        process = subprocess.run(
            [sys.executable, str(WORKER), kill, "train", *arguments], capture_output=True, text=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300,
        )  # fmt: skip
        assert process.returncode in {0, -signal.SIGKILL}, process.stdout + process.stderr
        return process.returncode

    recipe = tmp_path / "coin.toml"
    recipe.write_text("")
    settings = [
        *flat(SETTINGS), *REPLAY, "topology.updates=5", f"model.path={model}", f"run.folder={tmp_path}",
        "store.archive_every_batches=2", "store.archive_every_s=0.05",
    ]  # fmt: skip
    assert start("whole", "never", str(recipe), *settings, "run.id=whole") == 0
    # Just after the evaluation that follows update 2: its checkpoint is there, update 3 has not begun.
    code = start("killed", "evaluated:2:9", str(recipe), *settings, "run.id=killed")
    assert code == -signal.SIGKILL
    assert [number for number, _, _ in learned(open_run(tmp_path / "killed"))] == [1, 2]
    assert start("killed", "never", "--resume", "killed", "--runs", str(tmp_path)) == 0
    assert learned(open_run(tmp_path / "killed")) == learned(open_run(tmp_path / "whole"))


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={json.dumps(value)}"
