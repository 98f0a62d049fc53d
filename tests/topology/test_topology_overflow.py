"""Runs whose contexts get full: what is learned from windows, proved from the record, and passed by the self-test."""

import json
from pathlib import Path

import numpy as np
import pytest
from coin_recipe import SETTINGS, use_coin
from redo_cases import SHAPES, prove

from hotpot.config.load import build_recipe
from hotpot.experience import open_run, read_trajectories, sequences
from hotpot.topology import train, warmstart

pytestmark = pytest.mark.slow

LONG = ("env.params.patience=0.75", "env.params.padding=16", "warmstart.max_context_tokens=800")
SEGMENT = (
    "rollout.context_overflow=segment", "rollout.handover_tokens=12", "rollout.handover_request=note?",
)  # fmt: skip
RUNS = {
    "truncate": ("rollout.context_overflow=truncate", "topology.updates=2"),
    "segment": (*SEGMENT, "topology.updates=2"),
    "critic": (*SHAPES["critic"], *SEGMENT, "topology.updates=2"),
}


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that peeks again and again, at answers that fill its context."""
    folder = tmp_path_factory.mktemp("patient") / "model"
    with pytest.MonkeyPatch.context() as patch:
        use_coin(patch)
        warmstart(build_recipe(SETTINGS, LONG, origin="test"), folder)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_windows_are_learned_from_and_proved(name: str, patient: Path, tmp_path: Path) -> None:
    overrides = [*LONG, *RUNS[name], f"model.path={patient}", f"run.folder={tmp_path}", "run.id=run"]
    folder = train(build_recipe(SETTINGS, [*overrides, "evaluation.num_tasks_final=2"], origin="test"))
    reader = open_run(folder)
    trajectories = {t.row.trajectory_id: t for t in read_trajectories(reader, "purpose = 'training'")}
    rows = reader.table("learned_tokens").to_pylist()
    learned = {row["trajectory_id"] for row in rows}
    changes = [step.context_change for one in learned for step in trajectories[one].steps]
    expected = {"truncated"} if name == "truncate" else {"handover", "segmented", "fallback"}
    assert set(changes) == {"none"} | expected

    # Each window is a sequence of its own, its mask exactly what was sampled in it, notes included.
    whole = {(s.trajectory_id, s.segment): s for one in learned for s in sequences(trajectories[one])}
    assert {(row["trajectory_id"], row["segment"]) for row in rows} == set(whole)
    sampled = dict.fromkeys(learned, 0)
    for row in rows:
        sequence = whole[row["trajectory_id"], row["segment"]]
        assert row["tokens"] == sequence.tokens.tolist()
        assert row["loss_mask"] == sequence.loss_mask.astype(int).tolist()
        sampled[row["trajectory_id"]] += sum(row["loss_mask"])
    assert sampled == {one: trajectories[one].row.num_sampled_tokens for one in learned}
    if name != "critic":
        for one in learned:
            advantages = [
                np.array(row["advantages"])[np.array(row["loss_mask"], bool)]
                for row in rows
                if row["trajectory_id"] == one
            ]
            assert len(set(np.concatenate(advantages).tolist())) == 1

    # The learner saw the very contexts that the sampler had.
    updates = reader.table("updates").to_pylist()
    assert max(update["logprob_difference_max"] for update in updates) < 1e-4
    (event,) = [row for row in reader.table("events").to_pylist() if row["kind"] == "self_test"]
    found = json.loads(event["detail"])
    assert (found["problem"], found["not_compared"]) == ("", "")
    assert prove(folder) == 2
