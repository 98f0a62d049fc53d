"""The load of the store's benchmark: real episodes, replicated with jitter to any number.

Owns the way from recorded trajectories to new ones that pass the gate. A replica keeps the steps, tools, stages, endings
and versions of a recorded episode. Its tokens are joined from several recorded episodes, so that a trajectory has about
:data:`TOKENS_PER_TRAJECTORY`; a quarter of them is drawn anew, lengths vary, log-probabilities and rewards move in every
bit of the mantissa, every step carries a reward, times and ids are its own. Everything is a pure function of the recording, the seed and the
replica's number, and is made when it is asked for: nothing but the recording stays in memory.
"""

import dataclasses
import math
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotpot.experience import Lease, open_run, read_trajectories
from hotpot.ids import attempt_id, canonical_json, episode_id, group_id, prefix_hash, sha256_hex, task_id
from hotpot.types import StepRow, Trajectory, TrajectoryRow

TOKENS_PER_TRAJECTORY = 1_000
GROUP_SIZE = 8
TRAJECTORIES_PER_VERSION = 128
EPOCH_US = 1_750_000_000_000_000
FRESH_TOKENS = 0.25
"""Share of the tokens that are drawn anew."""

_MODEL_STAGES = ("thought", "tool_call", "answer")


def record(folder: Path, hotpot: Sequence[str], *, updates: int = 4) -> Path:
    """Warm-start a small policy and record its episodes at the order desk; return the run folder.

    ``RECORDED`` in the environment names a run folder to take instead.
    """
    if "RECORDED" in os.environ:
        return Path(os.environ["RECORDED"])
    recipe, model = "recipes/order_desk.toml", folder / "model"
    warm = [*hotpot, "model", "warmstart", recipe, "warmstart.steps=250", "--out", str(model)]
    train = [
        *hotpot, "train", recipe, "run.id=recorded", f"run.folder={folder}", f"model.path={model}",
        "debug.mode=rollout_only", f"topology.updates={updates}", "evaluation.every_updates=0",
        "evaluation.num_tasks_final=1", "evaluation.greedy=false",
    ]  # fmt: skip
    for command in (warm, train):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "recorded"


class Load:
    """Replicas of the training trajectories of a run folder. ``vocabulary_size`` is what the store is opened with."""

    def __init__(self, recorded: Path, *, run_id: str, seed: int = 0) -> None:
        found = read_trajectories(open_run(recorded), "purpose = 'training'")
        self._recorded = [t for t in found if all(step.segment == 0 for step in t.steps)]
        self._run_id = run_id
        self._seed = seed
        tokens = [len(s.prompt_tokens) + len(s.sampled_tokens) for t in self._recorded for s in t.steps]
        self._joined = TOKENS_PER_TRAJECTORY * len(self._recorded) / sum(tokens)
        self.vocabulary_size = 1 + max(
            int(array.max())
            for t in self._recorded
            for s in t.steps
            for array in (s.prompt_tokens, s.sampled_tokens)
            if array.size
        )

    @property
    def num_recorded(self) -> int:
        """How many recorded episodes there are to replicate."""
        return len(self._recorded)

    def batch(self, first: int, count: int) -> list[Trajectory]:
        """Return replicas ``first`` to ``first + count - 1``."""
        return [self.replica(number) for number in range(first, first + count)]

    def leases(self, trajectories: Sequence[Trajectory]) -> list[Lease]:
        """Return the lease each trajectory's attempt needs before the store takes it."""
        names = [field.name for field in dataclasses.fields(Lease)]
        return [Lease(**{name: getattr(t.row, name) for name in names}) for t in trajectories]

    def replica(self, number: int) -> Trajectory:
        """Return replica ``number``."""
        random = np.random.default_rng((self._seed, number))
        task = self._recorded[number // GROUP_SIZE * 7919 % len(self._recorded)]
        base = self._recorded[int(random.integers(len(self._recorded)))]
        parts = max(1, round(self._joined * random.uniform(0.5, 1.5)))
        others = [self._recorded[i] for i in random.integers(len(self._recorded), size=parts - 1)]
        version = 1 + number // TRAJECTORIES_PER_VERSION
        content = canonical_json({"issue": number // GROUP_SIZE, "recorded": task.row.task_content})
        shared = self._identity(task_id(base.row.env, content), number, version)
        clock = EPOCH_US + 40_000 * number + int(random.integers(20_000))
        steps: list[StepRow] = []
        chain, context = "", 0
        for step in base.steps:
            joined = [step, *(other.steps[min(step.step, len(other.steps) - 1)] for other in others)]
            prompt, sampled, logprobs = self._tokens(joined, random)
            stages, lengths = _spans(joined, len(prompt), len(sampled))
            context += len(prompt)
            chain = prefix_hash(prompt, extends=chain)
            times = _times(step, clock, random)
            names = step.reward_names or base.row.reward_names[:1]
            noise = random.normal(0.0, 0.01, len(names)).tolist()
            rewards = tuple(map(sum, zip(step.reward_values or (0.0,) * len(names), noise, strict=True)))
            steps.append(
                replace(
                    step,
                    **shared,
                    **times,
                    prompt_tokens=prompt,
                    sampled_tokens=sampled,
                    model_logprobs=logprobs,
                    behaviour_logprobs=logprobs,
                    span_stage=stages,
                    span_length=lengths,
                    context_tokens=context,
                    prefix_hash=chain,
                    reused_tokens=context - len(prompt),
                    reward=math.fsum(rewards),
                    reward_names=names,
                    reward_values=rewards,
                    policy_checksum=sha256_hex(str(version))[:32],
                    span_policy_version=(version,),
                    span_policy_length=(len(sampled),),
                    issue=number // GROUP_SIZE,
                    sample=number % GROUP_SIZE,
                )
            )
            clock = times["finished_us"] + 10
            context += len(sampled)
            chain = prefix_hash(sampled, extends=chain)
        return Trajectory(row=_summary(base, {**shared, "task_content": content}, steps), steps=tuple(steps))

    def _identity(self, task: str, number: int, version: int) -> dict[str, Any]:
        issue, sample = divmod(number, GROUP_SIZE)
        return {
            "run_id": self._run_id,
            "trajectory_id": attempt_id(issue, sample, 0),
            "attempt_id": attempt_id(issue, sample, 0),
            "episode_id": episode_id(issue, sample),
            "group_id": group_id(issue),
            "task_id": task,
            "policy_version": version,
        }

    def _tokens(
        self, joined: Sequence[StepRow], random: np.random.Generator
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
        prompt = self._perturbed(np.concatenate([step.prompt_tokens for step in joined]), random)
        sampled = self._perturbed(np.concatenate([step.sampled_tokens for step in joined]), random)
        logprobs = np.concatenate([step.model_logprobs for step in joined])
        kept = max(1, len(sampled) - int(random.integers(1 + len(sampled) // 10)))
        moved = logprobs[:kept] * np.exp(random.normal(0.0, 0.3, kept)) - 1e-7
        return prompt, sampled[:kept], moved.astype(np.float32)

    def _perturbed(self, tokens: NDArray[np.int32], random: np.random.Generator) -> NDArray[np.int32]:
        fresh = random.random(len(tokens)) < FRESH_TOKENS
        tokens[fresh] = random.integers(self.vocabulary_size, size=int(fresh.sum()), dtype=np.int32)
        return tokens


def _spans(joined: Sequence[StepRow], given: int, sampled: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return stages over the joined tokens: the shares each stage has in the parts, given tokens first."""
    totals: dict[str, int] = {}
    for step in joined:
        for stage, length in zip(step.span_stage, step.span_length, strict=True):
            totals[stage] = totals.get(stage, 0) + length
    spans: list[tuple[str, int]] = []
    for count, made in ((given, False), (sampled, True)):
        names = [stage for stage in totals if (stage in _MODEL_STAGES) is made]
        left = count
        for name in names[:-1]:
            length = min(left, totals[name])
            spans.append((name, length))
            left -= length
        spans.append((names[-1], left))
    kept = [(name, length) for name, length in spans if length > 0]
    return tuple(name for name, _ in kept), tuple(length for _, length in kept)


def _times(step: StepRow, clock: int, random: np.random.Generator) -> dict[str, Any]:
    queue, generate, environment = (
        np.array([step.queue_s, step.generate_s, step.environment_s]) * np.exp(random.normal(0.0, 0.2, 3))
    ).tolist()
    generated = clock + round(1e6 * (queue + generate))
    return {
        "queue_s": queue,
        "generate_s": generate,
        "environment_s": environment,
        "started_us": clock,
        "generated_us": generated,
        "finished_us": generated + round(1e6 * environment),
    }


def _summary(base: Trajectory, shared: dict[str, Any], steps: Sequence[StepRow]) -> TrajectoryRow:
    sums: dict[str, float] = {}
    for step in steps:
        for name, value in zip(step.reward_names, step.reward_values, strict=True):
            sums[name] = sums.get(name, 0.0) + value
    return replace(
        base.row,
        **shared,
        num_prompt_tokens=sum(len(step.prompt_tokens) for step in steps),
        num_sampled_tokens=sum(len(step.sampled_tokens) for step in steps),
        reward=math.fsum(sums.values()),
        reward_names=tuple(sums),
        reward_values=tuple(sums.values()),
        started_us=steps[0].started_us,
        finished_us=steps[-1].finished_us,
    )
