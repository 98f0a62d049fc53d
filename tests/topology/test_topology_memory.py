"""A run whose learner runs out of memory once: told in its events, proved and resumed to the bit with memory enough."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from redo_cases import prove

from hotpot.experience import RunReader
from hotpot.experience.crashpoints import arm
from hotpot.learner.checkpoint import read_manifest
from hotpot.learner.update.steps import UpdateSteps
from hotpot.topology.resume.checkpoints import checkpoint_folder

pytestmark = pytest.mark.slow

RUN = (
    "topology.updates=4",
    "checkpoint.every_updates=0",
    "evaluation.every_updates=0",
    "evaluation.num_tasks_final=2",
)

FAILING = 4
"""The pass that runs out of memory: each step has one, so it is that of the second update's second step."""


class Broke(BaseException):
    """The process broke off."""


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch):
    """Memory runs out at the pass :data:`FAILING`."""
    true, seen = UpdateSteps._forward, []

    def forward(self, *arguments: Any, **settings: Any):
        seen.append(1)
        if len(seen) == FAILING:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
        return true(self, *arguments, **settings)

    monkeypatch.setattr(UpdateSteps, "_forward", forward)
    return seen


def learned(folder: Path) -> tuple[Any, ...]:
    columns = ["update", "batch_hash", "losses", "grad_norms", "step_hashes", "pass_tokens", "learner_state"]
    rows = RunReader.open(folder).table("updates", columns).to_pylist()
    return rows, read_manifest(checkpoint_folder(folder, len(rows)))["weights_checksum"]


def test_it_is_told_proved_and_resumed(run, scarce, tmp_path, monkeypatch) -> None:
    folder = run(*RUN)
    (event,) = RunReader.open(folder).table("events", where="kind = 'out_of_memory'").to_pylist()
    told = json.loads(event["detail"])
    assert event["update"] == told["update"] == 2
    assert (told["stage"], told["step"], told["tokens_after"]) == ("step", 1, told["tokens_before"] // 2)
    whole = learned(folder)
    assert [row["pass_tokens"] for row in whole[0]] == [told["tokens_before"]] * 2 + [
        told["tokens_after"]
    ] * 2

    folder.rename(tmp_path / "undisturbed")
    scarce.clear()
    with monkeypatch.context() as patch:

        def kill(_pid: int, _signal: int) -> None:
            raise Broke

        patch.setattr(os, "kill", kill)
        arm("update_recorded", 3)
        try:
            with pytest.raises(Broke):
                run(*RUN)
        finally:
            arm("")
    run(*RUN, resume=folder)
    (resumed,) = RunReader.open(folder).table("events", where="kind = 'resumed'").to_pylist()
    assert json.loads(resumed["detail"])["rolled_forward"] == [1, 2, 3]
    assert learned(folder) == whole
    assert len(RunReader.open(folder).table("events", where="kind = 'out_of_memory'")) == 1
    assert prove(folder) == prove(tmp_path / "undisturbed") == 4
