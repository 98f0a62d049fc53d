"""The synchronous loop as a whole, on an environment that a tiny policy plays."""

import json
from pathlib import Path

import numpy as np
import pytest

from hotpot.errors import RecipeError, RunFolderError
from hotpot.experience import open_run


def test_a_run_leaves_whole_tables_and_a_summary_that_adds_up(run) -> None:
    folder = run()
    reader, summary = open_run(folder), json.loads((folder / "summary.json").read_text())
    updates = reader.sql('select * from updates order by "update"').to_pylist()
    assert [row["update"] for row in updates] == [1, 2, 3]
    assert [row["parent_update"] for row in updates] == [0, 1, 2]
    assert [row["new_policy_version"] for row in updates] == [row["policy_version"] + 1 for row in updates]
    assert sum(row["num_groups_kept"] for row in updates) > 0
    assert all(row["staleness_max"] == 0 for row in updates)
    assert all(row["logprob_difference_max"] < 1e-4 for row in updates)
    assert summary["updates"] == 3
    assert summary["trajectories"] == 48
    assert sum(summary["seconds"].values()) == pytest.approx(summary["seconds_total"])
    evaluations = reader.sql(
        "select label, purpose, num_tasks from evaluations order by evaluation"
    ).to_pylist()
    assert [(e["label"], e["num_tasks"]) for e in evaluations] == [
        ("before", 16), ("before", 16), ("scheduled", 8), ("scheduled", 8), ("after", 16), ("after", 16),
    ]  # fmt: skip
    assert summary["holdout"]["before"]["mean"] is not None
    assert summary["holdout"]["after"]["greedy"]["mean"] is not None
    trace = json.loads((folder / "trace.json").read_text())
    named = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"generate", "environment", "store", "learn", "publish", "evaluate"} <= named


def test_no_version_is_null_and_every_policy_version_is_explained(run) -> None:
    reader = open_run(run())
    five = "env_version, reward_version, prompt_version, policy_version, schema_version"
    found = reader.sql(f"select {five}, count(*) as n from steps group by 1, 2, 3, 4, 5").to_pylist()
    assert found
    assert all(value is not None and value != "" for row in found for value in row.values())
    explained = reader.sql("select version from versions where kind = 'policy'")["version"].to_pylist()
    assert sorted(explained, key=int) == ["1", "2", "3", "4"]
    assert {str(row["policy_version"]) for row in found} == set(explained)
    for kind in ("env", "reward", "prompt", "schema"):
        known = reader.sql("select version from versions where kind = ?", [kind])["version"].to_pylist()
        assert known == [str(found[0][f"{kind}_version"])]


def test_ledger_balances_with_the_lake(run) -> None:
    reader = open_run(run())
    assert reader.sql("select distinct state from attempts")["state"].to_pylist() == ["finished"]
    consumed = set(reader.table("consumptions", ["trajectory_id"])["trajectory_id"].to_pylist())
    learned = set(reader.table("learned_tokens", ["trajectory_id"])["trajectory_id"].to_pylist())
    assert consumed == learned
    holdout = reader.sql("select count(*) as n from trajectories where split = 'holdout' and trajectory_id in "
                         "(select trajectory_id from consumptions)")  # fmt: skip
    assert holdout["n"][0].as_py() == 0


def test_same_seed_same_bits_another_seed_others(run, tmp_path: Path) -> None:
    def fingerprint(run_id: str, *overrides: str) -> tuple[list[str], list[float], list[bytes]]:
        reader = open_run(run(f"run.id={run_id}", *overrides))
        rows = reader.sql('select batch_hash, losses, loss from updates order by "update"').to_pylist()
        losses = [np.asarray(row["losses"]).tobytes() for row in rows]
        return [row["batch_hash"] for row in rows], [row["loss"] for row in rows], losses

    first, second = fingerprint("a"), fingerprint("b")
    assert first == second
    assert fingerprint("c", "run.seed=1")[0] != first[0]


def test_learning_rate_0_changes_no_weight(run) -> None:
    reader = open_run(run("learner.learning_rate=0"))
    sums = reader.sql("select manifest from versions where kind = 'policy'")["manifest"].to_pylist()
    assert len({json.loads(manifest)["checksum"] for manifest in sums}) == 1
    ratios = reader.sql(
        "select ratio_mean, num_loss_tokens from updates where num_loss_tokens > 0"
    ).to_pylist()
    assert ratios
    assert all(row["ratio_mean"] == pytest.approx(1, abs=1e-5) for row in ratios)


def test_publishes_change_the_checksum(run) -> None:
    reader = open_run(run())
    sums = reader.sql("select manifest from versions where kind = 'policy'")["manifest"].to_pylist()
    assert len({json.loads(manifest)["checksum"] for manifest in sums}) == len(sums) == 4


@pytest.mark.parametrize(
    ("overrides", "longest"),
    [
        (["actors.kind=threads", "actors.call_timeout_s=700"], "actors.call_timeout_s = 700.0"),
        (["actors.kind=processes", "actors.start_timeout_s=700"], "actors.start_timeout_s = 700.0"),
        (["engine.kind=vllm", "engine.start_timeout_s=700"], "engine.start_timeout_s = 700.0"),
    ],
)
def test_a_wait_that_outlasts_the_run_is_refused(run, overrides: list[str], longest: str) -> None:
    with pytest.raises(RecipeError, match=f"{longest} is longer than supervision.stop_after_s = 600.0"):
        run("run.deterministic=false", *overrides)


def test_rollout_only_learns_nothing(run) -> None:
    reader = open_run(run("debug.mode=rollout_only"))
    assert reader.table("updates", ["update"]).num_rows == 0
    assert reader.sql("select count(*) as n from trajectories")["n"][0].as_py() == 48


def test_learning_from_a_record_needs_no_inference_and_keeps_lineage(run, tmp_path: Path) -> None:
    source = run("run.id=source", "debug.mode=rollout_only")
    reader = open_run(run("run.id=learned", "debug.mode=learn_from_record", f"debug.source_run={source}"))
    assert reader.sql('select "update" from updates order by 1')["update"].to_pylist() == [1, 2, 3]
    assert reader.sql("select distinct source from consumptions")["source"].to_pylist() == ["cold"]
    ours = reader.sql(
        "select trajectory_id, reward, env_version from trajectories where purpose = 'training' order by 1"
    )
    theirs = open_run(source).sql("select trajectory_id, reward, env_version from trajectories order by 1")
    assert ours.equals(theirs)


def test_an_existing_run_is_not_overwritten(run) -> None:
    run("topology.updates=1")
    with pytest.raises(RunFolderError, match="exists"):
        run("topology.updates=1")


def test_a_context_larger_than_the_model_is_refused_before_anything_is_written(run, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"rollout\.max_context_tokens = 4096"):
        run("rollout.max_context_tokens=4096")
    assert not (tmp_path / "run").exists()
