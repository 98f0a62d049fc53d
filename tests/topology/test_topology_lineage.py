"""A run that was resumed with a changed reward, and back: `hotpot lineage` says when, what and how much."""

import json

import pytest
from typer.testing import CliRunner

from hotpot.cli.main import app
from hotpot.experience import open_run
from hotpot.observability.run_changes import around, run_changes
from hotpot.topology import train


def test_a_reward_changed_by_a_resume_is_found_with_its_jump_and_its_setting(run, recipe) -> None:
    lenient = "env.params.wrong=0.9"
    folder = run("topology.updates=6", "evaluation.every_updates=0")
    train(recipe("topology.updates=12", "evaluation.every_updates=0", lenient), resume=folder)
    reader = open_run(folder)
    found = run_changes(reader)
    (explained,) = found.changes
    change = explained.change
    assert (change.kind, change.update, change.num_trajectories) == ("reward", 7, (96, 96))
    order = (
        "select reward_version as v from steps where purpose = 'training' group by 1 order by min(started_us)"
    )
    before, after = reader.sql(order)["v"].to_pylist()
    assert (change.old, change.new) == (before, after)
    steps = reader.sql(
        "select count(*) as n from steps where purpose = 'training' and reward_version = $1", [before]
    )
    assert change.steps_before == change.num_steps[0] == steps["n"][0].as_py()
    mean = "select avg(reward) as mean from trajectories where purpose = 'training' and reward_version = $1"
    means = [reader.sql(mean, [version])["mean"][0].as_py() for version in (before, after)]
    assert [change.reward.before.mean, change.reward.after.mean] == pytest.approx(means)
    assert change.reward.difference.low > 0
    assert change.approx_kl.before.count == change.approx_kl.after.count == 6
    # Half of the episodes name the coin wrong: the reward jumps by about 0.45 against whatever the trend was.
    assert change.jump.low < 0.45 < change.jump.high
    assert change.score > 2
    assert {str(difference) for difference in explained.differences} == {
        "reward: param wrong: - 0.0 + 0.9",
        "recipe: env.params.wrong: - (nothing) + 0.9",
        "recipe: topology.updates: - 6 + 12",
    }
    assert found.publishes.count == 11

    near = around(reader, 8, radius=2)
    assert [point.update for point in near.curve] == [6, 7, 8, 9, 10]
    assert [point.changes for point in near.curve] == [(), (1,), (), (), ()]
    assert near.changes == found.changes
    assert not around(reader, 2, radius=2).changes

    words = CliRunner().invoke(app, ["lineage", str(folder)]).stdout
    for shown in ("1. reward at update 7", f"{before} -> {after}", "trajectories 96 -> 96", "reward: param wrong", "+ 0.9",
                  "11 policy publishes", "approx_kl"):  # fmt: skip
        assert shown in words
    as_json = json.loads(CliRunner().invoke(app, ["lineage", str(folder), "--json"]).stdout)
    assert as_json["changes"][0]["change"]["jump"]["score"] == change.score
    curve = CliRunner().invoke(app, ["lineage", str(folder), "--around-update", "7", "--window", "1"]).stdout
    assert "reward (rank 1)" in curve
    assert "> 7" in curve
    nowhere = CliRunner().invoke(app, ["lineage", str(folder), "--around-update", "99"])
    assert nowhere.exit_code == 2
