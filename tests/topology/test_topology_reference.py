"""The reference loop shares no code with the learner and gives its losses on the same recorded trajectories."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from hotpot.experience import open_run, read_trajectories, sequences
from hotpot.learner import Member, group_advantages
from hotpot.learner.batches.batches import build_batch, deal
from hotpot.models import load_decoder

EXAMPLE = Path(__file__).parents[2] / "examples" / "reference_loop.py"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference_loop"] = module
    spec.loader.exec_module(module)
    return module


def test_the_reference_loop_is_short_and_imports_only_records_environment_and_decoder() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 300
    imported = {
        line.split()[1] for line in text.splitlines() if line.startswith(("from hotpot", "import hotpot"))
    }
    assert imported <= {"hotpot.envs", "hotpot.ids", "hotpot.models", "hotpot.types"}


@pytest.mark.parametrize("epochs", [1, 2])
def test_same_losses_as_the_learner_on_the_same_trajectories(run, reference: ModuleType, epochs: int) -> None:
    folder = run("topology.updates=1", f"learner.epochs={epochs}", "rollout.tasks_per_batch=8")
    reader = open_run(folder)
    [update] = reader.table("updates").to_pylist()
    assert update["num_groups_kept"] > 1

    trajectories = read_trajectories(reader, "purpose = 'training'")
    rows = [t.row for t in trajectories]
    groups = [int(row.group_id.removeprefix("g")) for row in rows]
    gains = dict(
        zip(
            (row.trajectory_id for row in rows),
            reference.advantages([row.reward for row in rows], groups),
            strict=True,
        )
    )

    # Which trajectories make up which optimiser step is the learner's own draw; everything else is computed anew.
    parts = [part for t in trajectories for part in sequences(t)]
    members = [Member(trajectory_id=r.trajectory_id, group_id=r.group_id, reward=r.reward) for r in rows]
    batch = build_batch(parts, group_advantages(members, "group_mean"))
    assert batch.hash == update["batch_hash"]
    dealt = [
        [member.sequence for member in hand]
        for epoch in range(epochs)
        for hand in deal(batch, minibatches=2, seed=0, update=1, epoch=epoch)
    ]
    samples = [
        [
            reference.Sample(
                s.tokens.tolist(), s.loss_mask.tolist(), s.behaviour_logprobs.tolist(), gains[s.trajectory_id]
            )
            for s in hand
        ]
        for hand in dealt
    ]
    model = load_decoder(folder / "checkpoints" / "update-000000")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.0)
    losses = reference.learn(model, optimizer, samples)
    np.testing.assert_allclose(losses, update["losses"], rtol=0, atol=1e-6)

    learned = {row["trajectory_id"]: row for row in reader.table("learned_tokens").to_pylist()}
    for trajectory_id, row in learned.items():
        expected = np.array(row["loss_mask"]) * gains[trajectory_id]
        np.testing.assert_allclose(row["advantages"], expected, atol=1e-6)
