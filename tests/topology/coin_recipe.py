"""The recipe of a tiny policy on the coin environment, and how recipes find that environment in a test."""

from typing import Any

import pytest

from hotpot.testing.coin import coin_environment
from hotpot.topology.parts import ingredients

SETTINGS: dict[str, Any] = {
    "env": {"kind": "coin"},
    "run": {"deterministic": True},
    "warmstart": {
        "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 2, "steps": 60, "batch_size": 8,
        "max_context_tokens": 128, "learning_rate": 1e-2,
    },
    "rollout": {"tasks_per_batch": 4, "samples_per_task": 4, "max_context_tokens": 128, "max_step_tokens": 16},
    "learner": {"minibatches": 2, "learning_rate": 3e-3},
    "topology": {"updates": 3},
    "evaluation": {"every_updates": 2, "num_tasks": 8, "num_tasks_final": 16},
    "checkpoint": {"every_updates": 1},
}  # fmt: skip


def use_coin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingredients, "load_environment", lambda _kind, params: coin_environment(params))
