"""Every update is proved whatever it was learned from: pieces, draws, forks, skipped steps, resumes, a run that goes on."""

import dataclasses
import json
import sys
from typing import Any

import numpy as np
import pytest
import torch
from redo_cases import SHAPES, only_first, prove

from hotpot.config import StoreSection
from hotpot.experience import ExperienceStore, RunReader
from hotpot.experience.maintenance import delete
from hotpot.experience.records.upgrades import steps_from
from hotpot.ids import canonical_json
from hotpot.learner.update.steps import UpdateSteps
from hotpot.testing.records import (
    ENV_VERSION,
    PROMPT_VERSION,
    REWARD_VERSION,
    make_fork,
    make_group,
    make_leases,
    make_row,
)
from hotpot.topology import train
from hotpot.topology.redo import redo
from hotpot.topology.session import Session
from hotpot.types import UpdateRow, VersionRow

pytestmark = pytest.mark.slow

HOLDS = {
    "replay": "select sum(num_replayed) from updates",
    "segments": "select max(begin) from learned_tokens",
    "reference": "select count(reference_checksum) from updates",
    "recomputed": "select count(proximal_policy_version) from updates",
    "threads": "select max(num_threads) - 1 from updates",
}
"""What shows that a run has the shape it is to have: more than 0."""


@pytest.mark.parametrize("shape", SHAPES)
def test_every_update_is_proved(run, shape) -> None:
    folder = run(*SHAPES[shape])
    if shape in HOLDS:
        assert RunReader.open(folder).sql(HOLDS[shape]).column(0)[0].as_py() > 0
    prove(folder)


def test_a_critics_update_is_proved_from_what_schema_version_3_kept(run, monkeypatch) -> None:
    folder = run(*SHAPES["critic"])
    redo_module = sys.modules[redo.__module__]  # the package gives the function the module's name
    original = redo_module.recorded_update

    def older(reader: RunReader, update: int) -> UpdateRow:
        row = original(reader, update)
        assert row.critic_steps > 0
        state = json.loads(row.learner_state)
        assert ("critic_norms" in state) == (update > 1)
        state.pop("critic_norms", None)
        lacking = {step.name: step.older.of({}) for step in steps_from("updates", 3)}
        arrays = {name: np.zeros(0) for name in lacking if isinstance(getattr(row, name), np.ndarray)}
        hashes = row.step_hashes[: len(row.step_hashes) - row.critic_steps]
        return dataclasses.replace(
            row,
            **(lacking | arrays),
            schema_version=3,
            step_hashes=hashes,
            learner_state=canonical_json(state),
        )

    monkeypatch.setattr(redo_module, "recorded_update", older)
    assert prove(folder) == 3


def test_a_run_that_was_resumed_otherwise_is_proved_with_its_side_branch(run, recipe) -> None:
    folder = run("topology.updates=3", "checkpoint.keep=5")
    changed = recipe("topology.updates=4", "learner.learning_rate=1e-3", "learner.minibatches=4")
    train(changed, resume=folder, checkpoint="2")  # update 3 becomes a side branch
    only_first(folder)
    done = {one.update: one for one in redo(folder, "all")}
    assert sorted(done) == [1, 2, 3, 4, 5]
    assert done[4].way.updates == (1, 2, 4)
    assert [one.findings.verdict for one in done.values()] == ["identical"] * 5


def test_skipped_steps_are_skipped_again(run, monkeypatch) -> None:
    original = UpdateSteps._loss_input

    def broken(self: UpdateSteps, *given: Any) -> Any:
        found, minibatch = original(self, *given), given[-1]
        gone = found.advantages * float("nan")
        return dataclasses.replace(found, advantages=gone) if minibatch.index == 1 else found

    monkeypatch.setattr(UpdateSteps, "_loss_input", broken)
    folder = run("topology.updates=2")
    rows = RunReader.open(folder).table("updates", ["skipped_at", "learner_state"]).to_pylist()
    assert [row["skipped_at"] for row in rows] == [[1], [1]]
    assert '"skipped_in_a_row":[["' in rows[1]["learner_state"]
    prove(folder)
    monkeypatch.undo()
    (one,) = redo(folder, "1")
    assert one.findings.verdict == "differs"
    assert "skipped_at" in {figure.name for figure in one.findings.differences}


def test_forks_learned_from_the_record_of_another_run_are_proved(run, recipe, tmp_path) -> None:
    source = tmp_path / "source"
    with ExperienceStore.open(source, run_id="source", settings=StoreSection(), vocabulary_size=64) as store:
        known = {"env": ENV_VERSION, "reward": REWARD_VERSION, "prompt": PROMPT_VERSION, "policy": "1"}
        manifest = '{"checksum": "0"}'
        store.record(
            [
                make_row(VersionRow, run_id="source", kind=kind, version=version, manifest=manifest)
                for kind, version in known.items()
            ]
        )
        for issue in range(4):
            group = make_group(run_id="source", issue=issue, size=4, num_steps=3)
            group.append(make_fork(group[0], 1, reward=0.5))
            store.ledger.lease(make_leases(group))
            assert len(store.append(group).accepted) == 5
    folder = run("debug.mode=learn_from_record", f"debug.source_run={source}", "rollout.tasks_per_batch=2")
    forks = RunReader.open(folder).sql(
        "select count(*) from consumptions join trajectories using (trajectory_id) where parent_trajectory_id is not null"
    )
    assert forks.column(0)[0].as_py() == 4
    assert prove(folder) == 2


def test_a_run_that_goes_on_is_proved_meanwhile(run, monkeypatch) -> None:
    verdicts: list[str] = []
    original = Session.due

    def due(self: Session) -> None:
        original(self)
        threads = torch.get_num_threads()
        verdicts.extend(one.findings.verdict for one in redo(self.folder, str(self.progress.update)))
        assert torch.get_num_threads() == threads

    monkeypatch.setattr(Session, "due", due)
    run("checkpoint.every_updates=0")
    assert verdicts == ["identical"] * 3


def test_what_was_deleted_is_named(run) -> None:
    folder = run("topology.updates=1")
    reader = RunReader.open(folder)
    (names,) = reader.table("updates", ["collected_trajectories"])["collected_trajectories"].to_pylist()
    learned = set(reader.table("learned_tokens", ["trajectory_id"])["trajectory_id"].to_pylist())
    gone = next(name for name in names if name in learned)
    delete(reader, gone, reason="asked for", settings=StoreSection())
    (one,) = redo(folder, "1")
    assert (one.findings.verdict, one.gone) == ("differs", (gone,))
