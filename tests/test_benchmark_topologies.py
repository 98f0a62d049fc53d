"""The benchmark of topologies: its arms differ in who waits for whom alone, and its figures are what a run did."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from hotpot.config.load import build_recipe, load_recipe
from hotpot.experience import open_run
from hotpot.topology import runs, warmstart
from hotpot.topology.session import Session

ROOT = Path(__file__).parents[1]
COIN = {
    "env": {"kind": "hotpot.testing.coin:SPEC"},
    "warmstart": {
        "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 2, "steps": 20, "batch_size": 8,
        "max_context_tokens": 128,
    },
    "engine": {"max_concurrency": 8},
    "rollout": {"tasks_per_batch": 2, "samples_per_task": 4, "max_context_tokens": 128, "max_step_tokens": 16},
    "learner": {"minibatches": 1, "advantages": "reinforce_pp"},
    "evaluation": {"num_tasks": 2, "num_tasks_final": 8, "every_updates": 0},
    "topology": {"updates": 5},
    "run": {"self_test": False},
}  # fmt: skip


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    monkeypatch.setattr(runs, "TOPOLOGIES", dict(runs.TOPOLOGIES))
    import topologies_parts.judge
    import topologies_parts.measured
    import topologies_parts.rates
    import topologies_parts.settings

    return topologies_parts


def test_arms_differ_in_who_waits_for_whom_and_in_nothing_else(parts: ModuleType) -> None:
    settings = parts.settings
    made = {
        name: load_recipe(
            ROOT / settings.RECIPE, [*settings.COMMON, *settings.waiting(settings.law(0.014)), *more]
        )
        for name, more in settings.TOPOLOGIES.items()
    }
    kept = {
        name: recipe.model_dump(exclude={"topology": True, "queue": True, "actors": {"over_issue"}})
        for name, recipe in made.items()
    }
    assert kept["async"] == kept["sync"] == kept["batched"]
    assert [recipe.topology.kind for recipe in made.values()] == ["sync", "async", "batched_async"]
    assert {recipe.topology.updates for recipe in made.values()} == {200}
    reference = made["async"]
    assert (reference.actors.groups, reference.actors.environments_per_group) == (16, 32)
    assert (reference.queue.depth, reference.topology.publish_every_updates) == (200, 10)
    assert reference.env.params["latency"] | {"kind": ""} == {
        "kind": "",
        "mean_s": 0.406,
        "sigma": 1.0,
        "longest_s": 4.06,
    }


def test_all_runs_of_a_folder_wait_by_one_law(parts: ModuleType, tmp_path: Path) -> None:
    import topologies

    first = topologies.law_of(tmp_path, {"tokens": 100, "generate_s": 4e-5, "learn_s": 6e-5})
    assert first == parts.settings.law(0.01) == topologies.law_of(tmp_path, {"tokens": 1})
    (tmp_path / "law.json").unlink()
    (tmp_path / "731-sync.json").touch()
    with pytest.raises(SystemExit, match=r"has runs \(731-sync.json\) and no law.json"):
        topologies.law_of(tmp_path, {"tokens": 1})


def test_the_interval_is_that_of_pairs_of_tasks(parts: ModuleType) -> None:
    def run(solved: str) -> object:
        outcomes = {str(task): outcome == "1" for task, outcome in enumerate(solved)}
        return parts.judge.Run(trajectories=1, tokens=1, wall_s=1.0, processor_s=0.5, solved=outcomes)

    mean, low = parts.judge.difference_low([run("1101"), run("0101")], [run("0101"), run("0111")])
    assert mean == 0.0
    assert low == pytest.approx(-1.96 * (2 / 7) ** 0.5 / 8**0.5)
    with pytest.raises(SystemExit, match="different hold-out tasks"):
        parts.judge.difference_low([run("110")], [run("1101")])


def test_the_ideal_is_that_of_cores_which_never_rest(parts: ModuleType) -> None:
    assert parts.judge.ideal_s({"generate_s": 0.002, "learn_s": 0.004}, 2, 500) == pytest.approx(1.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("topologies") / "model"
    warmstart(build_recipe(COIN, [], origin="test"), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_is_measured_is_what_the_record_says(
    parts: ModuleType, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(Session, "record_update", Session.record_update)  # put back afterwards
    measured = parts.measured.Measured()
    measured.install()
    start = [
        f"model.path={model}",
        f"run.folder={tmp_path}",
        "run.id=it",
        f"topology.kind={kind}",
        "run.threads=1",
    ]
    folder = runs.train(build_recipe(COIN, start, origin="test"), console=Console(quiet=True))
    figures = measured.figures()
    rows = (
        open_run(folder)
        .sql("select num_collected_tokens as tokens from updates where update > 1")
        .to_pylist()
    )
    assert (figures["updates"], figures["trajectories"]) == (5, 4 * 8)
    assert figures["tokens"] == sum(row["tokens"] for row in rows)
    assert figures["wall_s"] > 0
    found = parts.judge.read_run(folder, figures)
    assert len(found.solved) == 8
    assert parts.judge.tables(folder)[0].startswith("staleness")


@pytest.mark.slow
def test_what_one_core_does_is_measured_by_the_token(parts: ModuleType, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    runs.TOPOLOGIES = {"sync": lambda session: parts.rates.run_rates(session, out)}
    start = [f"model.path={model}", f"run.folder={tmp_path}", "run.id=it", "run.threads=1"]
    runs.train(build_recipe(COIN, start, origin="test"), console=Console(quiet=True))
    figures = json.loads(out.read_text())
    assert figures["trajectories"] == parts.rates.BATCHES * 8
    assert figures["tokens"] > 1
    assert figures["generate_s"] + figures["learn_s"] > 0
