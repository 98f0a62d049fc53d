"""Measuring the policy being served on hold-out tasks: success with its interval, failed episodes counted apart.

::

    plans(number, tasks) ──► collect(plans, purpose) ──► one EvaluationRow per purpose

Owns the sums. Knows neither engine, environment nor store: wiring hands them in as callables. Invariants: each
measurement has a number of its own, also the greedy one on the same tasks; every trajectory of a measurement was
sampled by one policy version; an episode that failed is in ``num_failed`` and in no mean.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from hotpot.errors import EngineError, EnvironmentFailure
from hotpot.evaluation.intervals import Interval, independent_difference, wilson
from hotpot.types import (
    SCHEMA_VERSION,
    EngineInfo,
    EvaluationRow,
    Purpose,
    SamplingParams,
    Split,
    Trajectory,
)

PlanT = TypeVar("PlanT")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredVersions:
    """What was measured, as it stands on the steps."""

    env: str
    env_version: str
    reward_version: str
    prompt_version: str


class Evaluator(Generic[PlanT]):
    """Measures whatever policy the engine serves.

    Parameters
    ----------
    plans: from the number of an evaluation and a number of tasks to the episodes to run; the same tasks every time.
    collect: runs plans for a purpose and yields trajectories, already stored, as they finish.
    info: what the engine serves right now.
    next_number: hands out numbers of evaluations, never one twice.
    sampling: the frozen parameters of each purpose.
    now_s: seconds since the epoch.
    """

    def __init__(
        self,
        *,
        run_id: str,
        plans: Callable[[int, int], Sequence[PlanT]],
        collect: Callable[[Sequence[PlanT], Purpose], Iterator[list[Trajectory]]],
        info: Callable[[], EngineInfo],
        next_number: Callable[[], int],
        sampling: Mapping[Purpose, SamplingParams],
        versions: MeasuredVersions,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._run_id = run_id
        self._plans = plans
        self._collect = collect
        self._info = info
        self._next_number = next_number
        self._sampling = dict(sampling)
        self._versions = versions
        self._now_s = now_s

    def evaluate(
        self, label: str, update: int, num_tasks: int, *, greedy: bool = False
    ) -> list[EvaluationRow]:
        """Measure on ``num_tasks`` hold-out tasks with the recipe's sampling, and greedily too if asked.

        ``label`` is before, scheduled, after or manual; ``update`` the number of updates behind the snapshot. Returns
        one row per measurement, the sampled one first.

        Raises :class:`EnvironmentFailure` where every episode failed and :class:`EngineError` where the policy changed
        while it was measured.
        """
        purposes = [Purpose.EVALUATION, *([Purpose.EVALUATION_GREEDY] if greedy else [])]
        return [self._measure(label, update, num_tasks, purpose) for purpose in purposes]

    def _measure(self, label: str, update: int, num_tasks: int, purpose: Purpose) -> EvaluationRow:
        started_s, info = self._now_s(), self._info()
        number = self._next_number()
        plans = self._plans(number, num_tasks)
        trajectories: list[Trajectory] = []
        for finished in self._collect(plans, purpose):
            trajectories += finished
        if not trajectories:
            raise EnvironmentFailure(
                f"all {len(plans)} episodes of evaluation {number} in environment {self._versions.env_version} failed, so there is "
                "nothing to measure; "
                "look at the attempts' reasons (table attempts)"
            )
        _check_one_policy(trajectories, info, number)
        successes = sum(trajectory.row.success for trajectory in trajectories)
        success = wilson(successes, len(trajectories))
        ended_s = self._now_s()
        return EvaluationRow(
            run_id=self._run_id,
            evaluation=number,
            update=update,
            label=label,
            purpose=purpose.value,
            split=Split.HOLDOUT.value,
            env=self._versions.env,
            num_tasks=len(trajectories),
            num_failed=len(plans) - len(trajectories),
            success_rate=success.estimate,
            success_low=success.low,
            success_high=success.high,
            reward_mean=_mean([trajectory.row.reward for trajectory in trajectories]),
            steps_mean=_mean([trajectory.row.num_steps for trajectory in trajectories]),
            sampled_tokens_mean=_mean([trajectory.row.num_sampled_tokens for trajectory in trajectories]),
            temperature=self._sampling[purpose].temperature,
            policy_version=info.policy_version,
            policy_checksum=info.checksum,
            env_version=self._versions.env_version,
            reward_version=self._versions.reward_version,
            prompt_version=self._versions.prompt_version,
            schema_version=SCHEMA_VERSION,
            seconds=max(0.0, ended_s - started_s),
            time_us=int(ended_s * 1e6),
        )


def verdicts(trajectories: Sequence[Trajectory]) -> dict[str, bool]:
    """Return success by task id, for :func:`~hotpot.evaluation.intervals.paired_difference`."""
    return {trajectory.row.task_id: trajectory.row.success for trajectory in trajectories}


def generalisation_gap(training: Sequence[Trajectory], holdout: EvaluationRow) -> Interval:
    """Return training success minus hold-out success, with the interval for independent shares.

    ``training`` are trajectories of one policy (those of one update). Episodes of one task are not independent, so the
    interval is somewhat too narrow where tasks have several samples. Raises ValueError where there are none.
    """
    solved = sum(trajectory.row.success for trajectory in training)
    return independent_difference(
        (solved, len(training)), (round(holdout.success_rate * holdout.num_tasks), holdout.num_tasks)
    )


def _check_one_policy(trajectories: Sequence[Trajectory], info: EngineInfo, number: int) -> None:
    for trajectory in trajectories:
        for step in trajectory.steps:
            if set(step.span_policy_version) != {info.policy_version}:
                raise EngineError(
                    f"evaluation {number} began on policy version {info.policy_version}, but step {step.step} of "
                    f"{trajectory.row.trajectory_id} was sampled by {sorted(set(step.span_policy_version))}; "
                    "publish nothing while a snapshot is measured"
                )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
