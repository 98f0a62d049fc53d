"""A run that learns from pieces: what the record says of them."""

import numpy as np
import pytest

from hotpot.experience import open_run, read_trajectories, sequences

pytestmark = pytest.mark.slow


def test_a_run_learns_every_action_token_once_from_pieces(run) -> None:
    folder = run(
        "topology.updates=1", "learner.segment_tokens=64", "learner.segment_overlap=8",
        "learner.old_logprobs=recomputed", "learner.packing=packed",
        "rollout.max_steps=6", f"prompt.system={'say what the coin shows. ' * 5}",
    )  # fmt: skip
    reader = open_run(folder)
    whole = {
        (s.trajectory_id, s.segment): s
        for trajectory in read_trajectories(reader, "purpose = 'training'")
        for s in sequences(trajectory)
    }
    rows = reader.table("learned_tokens").to_pylist()
    assert any(row["begin"] > 0 for row in rows), "some trajectory must be longer than a piece"
    assert len({(r["trajectory_id"], r["segment"], r["begin"]) for r in rows}) == len(rows)
    counted = {key: np.zeros(len(s.tokens), dtype=int) for key, s in whole.items()}
    for row in rows:
        part = slice(row["begin"], row["begin"] + len(row["tokens"]))
        counted[row["trajectory_id"], row["segment"]][part] += row["loss_mask"]
    learned = {row["trajectory_id"] for row in rows}
    for (name, segment), count in counted.items():
        expected = whole[name, segment].loss_mask if name in learned else np.zeros(len(count), dtype=int)
        assert np.array_equal(count, expected.astype(int))
