"""V-trace of a run that replays: table ``steps``, the recipe and the weights give every advantage and return, in float64."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hotpot.experience import open_run
from hotpot.models import load_decoder
from hotpot.topology import train
from hotpot.topology.resume.checkpoints import checkpoint_folder

TRACE = (
    "learner.advantages=vtrace", "learner.critic=head", "learner.value_coefficient=0.5", "learner.gae_lambda=0.9",
    "learner.discount=0.98", "learner.vtrace_rho_bar=1.2", "learner.vtrace_c_bar=0.9", "learner.learning_rate=1e-2",
    "replay.share=0.5", "replay.hot_share=0.5", "checkpoint.keep=9",
)  # fmt: skip


def said(folder: Path, tokens: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability of each token, and the value of the state before it; float64 [n], 0 for the first. One more value:
    that of the state behind them all."""
    decoder = load_decoder(folder).double()
    head = load_file(folder / "learner" / "critic.safetensors")
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        hidden = decoder(ids, torch.arange(len(tokens))[None])[0]
        logits = hidden @ decoder.embed_tokens.weight.T / temperature
        values = (hidden @ head["head.weight"].double().T)[:, 0] + head["head.bias"].double()
    logprobs = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return np.append(0.0, logprobs.numpy()), np.append(0.0, values.numpy())


def trajectory_of(steps: list[dict[str, Any]]) -> tuple[np.ndarray, ...]:
    """Tokens, mask, behaviour log-probabilities and rewards of a trajectory of one segment, from its steps."""
    tokens: list[int] = []
    mask: list[bool] = []
    behaviour: list[float] = []
    rewards: list[float] = []
    for step in sorted(steps, key=lambda step: step["step"]):
        given, sampled = step["prompt_tokens"], step["sampled_tokens"]
        tokens += [*given, *sampled]
        mask += [False] * len(given) + [True] * len(sampled)
        behaviour += [0.0] * len(given) + list(step["behaviour_logprobs"])
        rewards += [0.0] * (len(given) + len(sampled))
        rewards[-1] = sum(step["reward_values"])
    return np.array(tokens), np.array(mask), np.array(behaviour), np.array(rewards)


def traced(
    log_ratio: np.ndarray, rewards: np.ndarray, values: np.ndarray, told: dict[str, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and targets of IMPALA, sum by sum as its equation 1 has them. ``values`` float64 [n + 1]."""
    ratio, gamma, n = np.exp(log_ratio), told["discount"], len(log_ratio)
    rho = np.minimum(ratio, told["vtrace_rho_bar"])
    c = told["gae_lambda"] * np.minimum(ratio, told["vtrace_c_bar"])
    delta = rho * (rewards + gamma * values[1:] - values[:-1])
    v = np.append(
        [
            values[s] + sum(gamma ** (t - s) * np.prod(c[s:t]) * delta[t] for t in range(s, n))
            for s in range(n)
        ],
        values[-1],
    )
    return rho * (rewards + gamma * v[1:] - values[:-1]), v[:-1]


@pytest.mark.slow
def test_steps_and_weights_give_every_advantage_and_return(run) -> None:
    folder = run(*TRACE, "topology.updates=4", "evaluation.every_updates=0")
    reader = open_run(folder)
    told = json.loads((folder / "recipe.json").read_text())["learner"]
    steps: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for step in reader.table("steps", where="purpose = 'training'").to_pylist():
        steps[step["trajectory_id"]].append(step)
    ends = {row["trajectory_id"]: row["end_reason"] for row in reader.table("trajectories").to_pylist()}
    learned = reader.table("learned_tokens").to_pylist()
    off_policy = 0
    for row in learned:
        tokens, mask, behaviour, rewards = trajectory_of(steps[row["trajectory_id"]])
        logprobs, values = said(checkpoint_folder(folder, row["update"] - 1), tokens, 1.0)
        at = np.flatnonzero(mask)
        behind = 0.0 if ends[row["trajectory_id"]] == "answered" else values[-1]
        log_ratio = logprobs[at] - behaviour[at]
        gains, targets = traced(log_ratio, rewards[at], np.append(values[at], behind), told)
        assert row["loss_mask"] == mask.astype(int).tolist()
        np.testing.assert_allclose(np.array(row["advantages"])[at], gains, rtol=0, atol=1e-5)
        np.testing.assert_allclose(np.array(row["returns"])[at], targets, rtol=0, atol=1e-5)
        np.testing.assert_allclose(np.array(row["old_logprobs"])[at], logprobs[at], rtol=0, atol=1e-5)
        off_policy += int((np.abs(log_ratio) > 0.05).any())
    replayed = reader.sql("select sum(num_replayed) as n from updates")["n"][0].as_py()
    assert replayed > 8
    assert off_policy > 4


@pytest.mark.slow
def test_a_resumed_run_with_v_trace_goes_on_bit_for_bit(run, recipe) -> None:
    def lines(folder: Path) -> list[dict[str, Any]]:
        query = 'select batch_hash, losses, weights_checksum, learner_state from updates order by "update"'
        return list(open_run(folder).sql(query).to_pylist())

    straight = run(*TRACE, "topology.updates=4", "run.id=straight")
    folder = run(*TRACE, "topology.updates=2", "run.id=parts")
    train(recipe(*TRACE, "run.id=parts", "topology.updates=4"), resume=folder)
    assert lines(folder) == lines(straight)
