"""Rows of ``steps`` and ``trajectories`` out of what happened. Owns their filling in, and no decision.

Invariants: token arrays are the recorder's own copies, read-only; ids and versions are the same on every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotpot.ids import attempt_id, episode_id, group_id
from hotpot.rollout.prompt import Output, Prompt
from hotpot.rollout.seeds import sampling_seed
from hotpot.rollout.tasks import EpisodePlan
from hotpot.types import (
    SCHEMA_VERSION,
    ContextChange,
    EndReason,
    Generation,
    Purpose,
    StepResult,
    StepRow,
    Trajectory,
    TrajectoryRow,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Who records: what stands on every step of a rollout. Versions as they stand in the lake, ``seed`` the run's."""

    run_id: str
    seed: int
    actor_id: str
    actor_group: str
    env_version: str
    reward_version: str
    prompt_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of one step: microseconds since the epoch, and seconds in the environment."""

    started_us: int
    generated_us: int
    finished_us: int
    environment_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a step stands in its trajectory, the context before sampling (tokens, chained hash), and what the context
    limit did to it."""

    turn: int
    segment: int
    context_tokens: int
    prefix_hash: str
    change: ContextChange
    dropped_tokens: int


class Recorder:
    """Collects the steps of one attempt."""

    def __init__(self, plan: EpisodePlan, attempt: int, purpose: Purpose, provenance: Provenance) -> None:
        number = {"evaluation": plan.evaluation}
        self.plan = plan
        self.attempt_id = attempt_id(plan.issue, plan.sample, attempt, **number)
        self.steps: list[StepRow] = []
        self._seed = sampling_seed(provenance.seed, purpose)
        self._shared: dict[str, Any] = {
            "run_id": provenance.run_id,
            "trajectory_id": self.attempt_id,
            "episode_id": episode_id(plan.issue, plan.sample, **number),
            "group_id": group_id(plan.issue, **number),
            "attempt_id": self.attempt_id,
            "task_id": plan.task.task_id,
            "split": plan.task.split.value,
            "purpose": purpose.value,
            "actor_id": provenance.actor_id,
            "actor_group": provenance.actor_group,
            "env_version": provenance.env_version,
            "reward_version": provenance.reward_version,
            "prompt_version": provenance.prompt_version,
            "schema_version": SCHEMA_VERSION,
        }

    def record(
        self,
        place: Place,
        prompt: Prompt,
        output: Output,
        generation: Generation,
        result: StepResult | None,
        times: StepTimes,
    ) -> StepRow:
        """Add a step. ``result`` is None where the output was cut and the environment not asked."""
        spans = (*prompt.spans, *output.spans)
        report, sampling, versions = generation.report, generation.report.sampling, generation.versions
        call = output.action.tool_call
        values = tuple([float(reward.value) for reward in result.rewards]) if result else ()
        row = StepRow(
            **self._shared,
            turn=place.turn,
            step=len(self.steps),
            segment=place.segment,
            prompt_tokens=prompt.tokens,
            sampled_tokens=output.tokens,
            behaviour_logprobs=own(generation.behaviour_logprobs, np.float32),
            model_logprobs=own(generation.model_logprobs, np.float32),
            span_stage=tuple([stage.value for stage, _ in spans]),
            span_length=tuple([length for _, length in spans]),
            context_tokens=place.context_tokens,
            prefix_hash=place.prefix_hash,
            context_change=place.change.value,
            context_dropped_tokens=place.dropped_tokens,
            reward=sum(values, 0.0),
            reward_names=tuple([reward.name for reward in result.rewards]) if result else (),
            reward_values=values,
            tool_name=None if call is None else call.name,
            tool_error=result.tool_error if result else False,
            finish=generation.finish.value,
            policy_version=versions[0].policy_version,
            policy_checksum=versions[0].checksum,
            span_policy_version=tuple([span.policy_version for span in versions]),
            span_policy_length=tuple([span.length for span in versions]),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            repetition_penalty=sampling.repetition_penalty,
            seed=self._seed,
            issue=self.plan.issue,
            sample=self.plan.sample,
            engine=report.engine,
            precision=report.precision,
            device=report.device,
            num_threads=report.num_threads,
            reused_tokens=report.reused_tokens,
            num_preemptions=report.num_preemptions,
            started_us=times.started_us,
            generated_us=times.generated_us,
            finished_us=times.finished_us,
            queue_s=report.queue_s,
            generate_s=report.generate_s,
            environment_s=times.environment_s,
        )
        self.steps.append(row)
        return row

    def trajectory(self, end: EndReason, *, success: bool, started_us: int, finished_us: int) -> Trajectory:
        """Sum the steps up (at least one)."""
        steps = self.steps
        rewards = _sum_components(steps)
        row = TrajectoryRow(
            **self._shared,
            task_content=self.plan.task.content,
            env=self.plan.task.env,
            evaluation=self.plan.evaluation,
            parent_trajectory_id=None,
            fork_step=None,
            num_turns=steps[-1].turn + 1,
            num_steps=len(steps),
            num_segments=steps[-1].segment + 1,
            num_prompt_tokens=sum([len(step.prompt_tokens) for step in steps]),
            num_sampled_tokens=sum([len(step.sampled_tokens) for step in steps]),
            reward=sum(rewards.values(), 0.0),
            reward_names=tuple(rewards),
            reward_values=tuple(rewards.values()),
            success=success,
            end_reason=end.value,
            tool_errors=sum([step.tool_error for step in steps]),
            policy_version=steps[0].policy_version,
            started_us=started_us,
            finished_us=finished_us,
        )
        return Trajectory(row=row, steps=tuple(steps))


def own(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    """Return a read-only copy of ``array`` as ``dtype``."""
    copy = np.array(array, dtype=dtype)
    copy.flags.writeable = False
    return copy


def _sum_components(steps: Sequence[StepRow]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for step in steps:
        for name, value in zip(step.reward_names, step.reward_values, strict=True):
            sums[name] = sums.get(name, 0.0) + value
    return sums
