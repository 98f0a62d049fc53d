"""Small runs and model folders on disk, for the tests of the commands; runs are written by the real store."""

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

from typer.testing import Result

from hotpot.config import Recipe, StoreSection
from hotpot.experience import ExperienceStore, Lease
from hotpot.testing.records import make_group, make_row, make_trajectory
from hotpot.types import (
    ConsumptionRow,
    EvaluationRow,
    LearnedTokensRow,
    Purpose,
    Trajectory,
    UpdateRow,
    VersionRow,
)

TOOL = "".join(f"line {number}\n" for number in range(1, 51))


def write_run(folder: Path, run_id: str, *, tool: str = TOOL, learning_rate: float = 1e-4) -> Path:
    """Write a run of two groups, one update and one evaluation."""
    recipe = Recipe().model_copy(
        update={"learner": Recipe().learner.model_copy(update={"learning_rate": learning_rate})}
    )
    made = [t for issue in range(2) for t in make_group(run_id=run_id, issue=issue, size=4)]
    made.append(make_trajectory(run_id=run_id, issue=0, purpose=Purpose.EVALUATION))
    store = ExperienceStore.open(
        folder / run_id,
        run_id=run_id,
        settings=StoreSection(),
        vocabulary_size=64,
        recipe=recipe.model_dump_json(),
    )
    with store:
        store.ledger.lease([lease(t) for t in made])
        assert len(store.append(made).accepted) == len(made)
        used = made[:8]
        store.record_update(
            make_row(
                UpdateRow, run_id=run_id, update=1, policy_version=1, new_policy_version=2, loss=0.5, optimizer_steps=4,
                num_loss_tokens=10, started_us=1_000_000, finished_us=3_000_000,
            ),
            [],
            [make_row(LearnedTokensRow, run_id=run_id, update=1, trajectory_id=t.row.trajectory_id) for t in used],
            [
                make_row(ConsumptionRow, run_id=run_id, update=1, trajectory_id=t.row.trajectory_id, epochs=1, source="fresh")
                for t in used
            ],
            others=[
                evaluation(run_id, 0, "before", 0.25),
                evaluation(run_id, 1, "scheduled", 0.5),
                version(run_id, made[0], tool),
            ],
        )  # fmt: skip
    return folder / run_id


def lease(trajectory: Trajectory) -> Lease:
    row = trajectory.row
    names = [field.name for field in dataclasses.fields(Lease)]
    return Lease(**{name: getattr(row, name) for name in names})


def evaluation(run_id: str, number: int, label: str, success: float) -> EvaluationRow:
    return make_row(
        EvaluationRow, run_id=run_id, evaluation=number, label=label, purpose="evaluation", split="holdout",
        success_rate=success, num_tasks=16,
    )  # fmt: skip


def version(run_id: str, trajectory: Trajectory, tool: str) -> VersionRow:
    manifest = {
        "name": "fake", "declared": "1", "files": {"fake/tools.py": str(hash(tool))}, "params": {}, "runs_on": {},
        "perturbation": "none", "unverifiable": [],
    }  # fmt: skip
    known = "" if tool == TOOL else "-changed"
    return make_row(
        VersionRow, run_id=run_id, kind="env", version=trajectory.row.env_version + known,
        manifest=json.dumps(manifest), sources=json.dumps({"fake/tools.py": tool}),
    )  # fmt: skip


def json_of(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def write_model_folder(folder: Path, *, cut: int = 0) -> Path:
    folder.mkdir()
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {}}
    ).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(24)
    (folder / "model.safetensors").write_bytes(data[: len(data) - cut])
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 2}))
    return folder
