"""A mix of environments with pools and refill, as a whole run; what it leaves, and that a resume hears the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from coin_recipe import SETTINGS

from hotpot.config import Recipe
from hotpot.config.load import build_recipe
from hotpot.experience import open_run
from hotpot.metrics import metric, sql
from hotpot.topology import runs, train, wiring
from hotpot.topology.parts import ingredients
from hotpot.topology.updates.outcomes import read_outcomes

MIX = [
    {"name": "plain", "kind": "coin", "weight": 2.0},
    {"name": "strict", "kind": "coin", "params": {"question": "which coin", "wrong": -0.5}},
]


def mixed(model: Path, folder: Path, **tasks: Any) -> Recipe:
    settings = {
        **{name: section for name, section in SETTINGS.items() if name != "env"},
        "run": {"deterministic": True, "folder": str(folder), "id": "run"},
        "model": {"path": str(model)},
        "tasks": {"mix": MIX, "num_tasks": 5, "pools": True, **tasks},
        "rollout": {
            **SETTINGS["rollout"],
            "samples_per_task": 3,
            "refill": "until_signal",
            "max_refill_rounds": 2,
        },
        "topology": {"updates": 6},
    }
    return build_recipe(settings, [], origin="test")


def details(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = open_run(folder).sql("select detail from events where kind = ? order by time_us", [kind])
    return [json.loads(text) for text in found["detail"].to_pylist()]


def chosen(folder: Path) -> list[dict[str, Any]]:
    return [task for detail in details(folder, "tasks_chosen") for task in detail["tasks"]]


@pytest.mark.slow
def test_a_mixed_run_with_pools_and_refill_has_every_decision_on_the_record(
    model: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    folder = train(mixed(model, tmp_path))
    reader = open_run(folder)
    trajectories = reader.sql("select * from trajectories where purpose = 'training'").to_pylist()
    (started,) = details(folder, "run_started")
    versions = {one["name"]: (one["env_version"], one["reward_version"]) for one in started["mix"]}
    # Each issue's choice stands on the record, and its trajectories have that task and those versions.
    choices = {choice["issue"]: choice for choice in chosen(folder)}
    assert sorted(choices) == list(range(len(choices)))
    for row in trajectories:
        choice = choices[int(row["group_id"][1:])]
        assert (row["env_version"], row["reward_version"]) == versions[choice["environment"]]
        assert row["task_id"] == choice["task_id"]
    assert {choice["environment"] for choice in choices.values()} == {"plain", "strict"}
    assert {choice["pool"] for choice in choices.values()} > {"unseen", "learnable"}
    assert all(0 < choice["probability"] <= 1 and choice["index"] < 5 for choice in choices.values())
    assert {detail["update"] for detail in details(folder, "tasks_chosen")} == {1, 2, 3, 4, 5, 6}
    # Each refill is on the record, and what it says is what the groups say.
    refills = details(folder, "refill")
    assert [detail["update"] for detail in refills] == [1, 2, 3, 4, 5, 6]
    assert any(len(detail["issued"]) > 1 for detail in refills)
    for detail in refills:
        groups = reader.sql(
            'select kept, reason from groups where "update" = ?', [detail["update"]]
        ).to_pylist()
        assert sum(detail["issued"]) == len(groups)
        assert detail["with_signal"] == sum(group["kept"] for group in groups)
        assert sum(detail["without_signal"].values()) == sum(not group["kept"] for group in groups)
    assert sum(sum(detail["issued"]) for detail in refills) == len(choices)
    # Every environment describes itself, and is evaluated by itself.
    for kind, place in (("env", 0), ("reward", 1)):
        known = set(reader.sql("select version from versions where kind = ?", [kind])["version"].to_pylist())
        assert known == {version[place] for version in versions.values()}
    measured = reader.sql(
        "select label, purpose, env_version, reward_version, num_tasks from evaluations"
    ).to_pylist()
    for label, num_tasks in (("before", 16), ("after", 16)):
        for purpose in ("evaluation", "evaluation_greedy"):
            rows = [row for row in measured if (row["label"], row["purpose"]) == (label, purpose)]
            assert {(row["env_version"], row["reward_version"]) for row in rows} == set(versions.values())
            assert [row["num_tasks"] for row in rows] == [num_tasks] * 2
    by_env = reader.sql(sql(metric("learn/no_signal_share"), by=["env_version"])).to_pylist()
    assert {row["env_version"] for row in by_env} == {env for env, _ in versions.values()}
    summary = json.loads((folder / "summary.json").read_text())
    assert len(summary["holdout"]["after"]["environments"]) == 2
    assert summary["versions"]["env"] == [env for env, _ in versions.values()]


@pytest.mark.slow
def test_a_resumed_run_chooses_as_the_one_that_was_never_interrupted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    whole = train(mixed(model, tmp_path / "whole"))
    recipe = mixed(model, tmp_path / "cut")
    with monkeypatch.context() as patch:
        real = runs.TOPOLOGIES["sync"]

        def cut_short(session) -> None:
            session.recipe = build_recipe(
                {**recipe.model_dump(mode="json"), "topology": {"updates": 3}}, [], origin="test"
            )
            real(session)

        patch.setitem(runs.TOPOLOGIES, "sync", cut_short)
        folder = train(recipe)
    heard: list[Any] = []
    real_read = wiring.read_outcomes
    monkeypatch.setattr(wiring, "read_outcomes", lambda *args: heard.append(real_read(*args)) or heard[-1])
    train(recipe, resume=folder)
    assert len(heard) == 1
    assert heard[0] == read_outcomes(open_run(whole), {1, 2, 3})
    assert chosen(folder) == chosen(whole)
    hashes = [
        open_run(run).sql('select batch_hash, losses from updates order by "update"').to_pylist()
        for run in (whole, folder)
    ]
    assert hashes[0] == hashes[1]


def test_the_environments_of_a_mix_are_told_apart_by_their_versions(model: Path, tmp_path: Path) -> None:
    made = ingredients.read_ingredients(mixed(model, tmp_path))
    plain, strict = made.environments
    assert plain.environment.env_version.version != strict.environment.env_version.version
    assert plain.environment.reward_version.version != strict.environment.reward_version.version
    assert [one.member.name for one in made.environments] == ["plain", "strict"]
