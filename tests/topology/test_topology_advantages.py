"""Table ``steps`` and the recipe alone give every mask and advantage that was learned from, in float64."""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotpot.experience import open_run

Found = dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]


def reference(steps: list[dict[str, Any]], advantages: str) -> Found:
    """Mask and advantages float64 [n] of each (trajectory, segment) of a group whose rewards differ, from steps alone."""
    rewards: dict[str, float] = defaultdict(float)
    groups: dict[str, set[str]] = defaultdict(set)
    masks: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for step in sorted(steps, key=lambda step: (step["trajectory_id"], step["step"])):
        name = step["trajectory_id"]
        rewards[name] += sum(step["reward_values"])
        groups[step["group_id"]].add(name)
        given, sampled = len(step["prompt_tokens"]), len(step["sampled_tokens"])
        masks[name, step["segment"]] += [False] * given + [True] * sampled
    gains: dict[str, float] = {}
    for names in groups.values():
        values = np.array([rewards[name] for name in names], dtype=np.float64)
        if np.ptp(values) <= 1e-6 * max(1.0, np.abs(values).max()):
            continue
        for name in names:
            others = [rewards[other] for other in names if other != name]
            gains[name] = {
                "group_mean": lambda own, v=values: own - v.mean(),
                "group_normalized": lambda own, v=values: (own - v.mean()) / v.std(),
                "rloo": lambda own, o=others: own - np.mean(o),
            }[advantages](rewards[name])
    return {
        (name, segment): (np.array(mask), np.array(mask) * gains[name])
        for (name, segment), mask in masks.items()
        if name in gains and any(mask)
    }


@pytest.mark.slow
@pytest.mark.parametrize("advantages", ["group_mean", "group_normalized", "rloo"])
def test_steps_alone_give_every_mask_and_advantage(run: Callable[..., Path], advantages: str) -> None:
    folder = run(f"learner.advantages={advantages}", "topology.updates=3", "evaluation.every_updates=0")
    reader = open_run(folder)
    told = json.loads((folder / "recipe.json").read_text())
    assert told["learner"]["advantages"] == advantages
    batch = told["rollout"]["tasks_per_batch"]

    # A synchronous run learns from what it has just collected: tasks are issued in order, so many for each update.
    by_update: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for step in reader.table("steps", where="purpose = 'training'").to_pylist():
        by_update[step["issue"] // batch + 1].append(step)
    learned = reader.table("learned_tokens").to_pylist()
    assert len(by_update) == 3
    assert len({row["update"] for row in learned}) > 1

    for update, steps in by_update.items():
        expected = reference(steps, told["learner"]["advantages"])
        rows = {(row["trajectory_id"], row["segment"]): row for row in learned if row["update"] == update}
        assert set(rows) == set(expected)
        for key, (mask, gains) in expected.items():
            assert rows[key]["loss_mask"] == mask.astype(int).tolist()
            # The column is float32.
            np.testing.assert_allclose(rows[key]["advantages"], gains.astype(np.float32), rtol=0, atol=1e-7)
