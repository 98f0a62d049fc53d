"""Going on with a run: what it was told last, where it goes on from, what it does not do again."""

import json

import pytest

from hotpot.config.load import build_recipe
from hotpot.errors import RecipeError
from hotpot.experience import open_run
from hotpot.topology import train
from hotpot.topology.resume.checkpoints import find_checkpoint, list_checkpoints
from hotpot.topology.resume.history import last_recipe

SCHEDULE = ("learner.final_learning_rate_share=0.5", "topology.updates=3", "evaluation.every_updates=0")


def test_settings_given_to_a_resume_hold_for_the_next(run, recipe) -> None:
    folder = run("topology.updates=1")
    train(recipe("topology.updates=2"), resume=folder)
    told = build_recipe(last_recipe(folder), [], origin="test")
    assert told.topology.updates == 2
    train(told, resume=folder)
    assert json.loads((folder / "summary.json").read_text())["updates"] == 2
    [event] = (
        open_run(folder)
        .sql("select detail from events where kind = 'resumed' order by time_us limit 1")
        .to_pylist()
    )
    assert json.loads(event["detail"])["changed"] == {"topology.updates": [1, 2]}


def test_a_rollback_is_remembered_and_keeps_the_schedule(run, recipe) -> None:
    folder = run(*SCHEDULE)
    assert list_checkpoints(folder) == [0, 1, 2, 3]
    train(recipe(*SCHEDULE, "topology.updates=2"), resume=folder, checkpoint="1")
    rows = (
        open_run(folder)
        .sql('select "update", parent_update, learning_rate from updates order by 1')
        .to_pylist()
    )
    assert [(row["update"], row["parent_update"]) for row in rows] == [(1, 0), (2, 1), (3, 2), (4, 1)]
    assert find_checkpoint(folder)[0] == 4
    # Two updates in all: the second of them is at the end of the schedule, whatever its number.
    assert rows[-1]["learning_rate"] == pytest.approx(0.5 * rows[0]["learning_rate"])


def test_after_belongs_to_the_last_weights_only(run, recipe) -> None:
    folder = run("topology.updates=1")
    before = json.loads((folder / "summary.json").read_text())["holdout"]["after"]
    train(recipe("topology.updates=2"), resume=folder)
    after = json.loads((folder / "summary.json").read_text())["holdout"]["after"]
    assert after["policy_version"] > before["policy_version"]


def test_rollout_only_goes_on_where_it_was(run, recipe) -> None:
    folder = run("debug.mode=rollout_only", "topology.updates=2")
    train(recipe("debug.mode=rollout_only", "topology.updates=3"), resume=folder)
    reader = open_run(folder)
    assert reader.sql("select count(distinct group_id) as n from trajectories")["n"][0].as_py() == 12


def test_a_secret_that_was_not_kept_is_asked_for(run, recipe) -> None:
    folder = run("topology.updates=1", "prompt.system=say what the coin shows. password=hunter2secret")
    kept = last_recipe(folder)
    assert "hunter2secret" not in json.dumps(kept)
    kept["prompt"]["system"] = "[redacted:password]"
    with pytest.raises(RecipeError, match=r"prompt\.system .* give it again"):
        train(build_recipe(kept, [], origin="test"), resume=folder)


def test_store_times_add_up_over_updates(run) -> None:
    folder = run()
    summary = json.loads((folder / "summary.json").read_text())
    recorded = sum(open_run(folder).table("updates", ["store_s"])["store_s"].to_pylist())
    # All but the write of the last update's own row.
    assert 0.6 * summary["seconds"]["store"] < recorded <= summary["seconds"]["store"]
