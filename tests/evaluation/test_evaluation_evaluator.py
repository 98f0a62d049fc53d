import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hotpot.errors import EngineError, EnvironmentFailure
from hotpot.evaluation import Evaluator, MeasuredVersions, generalisation_gap, verdicts, wilson
from hotpot.testing.engine import FakeEngine
from hotpot.testing.records import make_trajectory
from hotpot.types import EvaluationRow, Purpose, SamplingParams, Trajectory

SAMPLING = {Purpose.EVALUATION: SamplingParams(), Purpose.EVALUATION_GREEDY: SamplingParams(temperature=0.0)}
VERSIONS = MeasuredVersions(env="fake", env_version="e", reward_version="r", prompt_version="p")


class World:
    """Stands in for rollout and engine: every third task is solved, those in ``failing`` never finish."""

    def __init__(self, failing: Sequence[int] = (), policy_version: int = 3, sampled_by: int = 3) -> None:
        self.failing = set(failing)
        self.sampled_by = sampled_by
        self.stored: list[Trajectory] = []
        self.runs: list[tuple[int, Purpose]] = []
        self.engine = FakeEngine(lambda _: [], policy_version=policy_version)
        self._numbers = itertools.count(10)
        self._clock = itertools.count(1000.0, 2.5)

    def plans(self, number: int, num_tasks: int) -> list[tuple[int, int]]:
        return [(number, task) for task in range(num_tasks)]

    def collect(self, plans: Sequence[tuple[int, int]], purpose: Purpose) -> Iterator[list[Trajectory]]:
        self.runs.append((len(plans), purpose))
        for number, task in plans:
            if task not in self.failing:
                trajectory = make_trajectory(
                    issue=task, evaluation=number, purpose=purpose, reward=float(task % 3 == 0),
                    num_steps=2, policy_version=self.sampled_by,
                )  # fmt: skip
                self.stored.append(trajectory)
                yield [trajectory]

    def evaluator(self) -> Evaluator[tuple[int, int]]:
        return Evaluator(
            run_id="run",
            plans=self.plans,
            collect=self.collect,
            info=self.engine.info,
            next_number=lambda: next(self._numbers),
            sampling=SAMPLING,
            versions=VERSIONS,
            now_s=lambda: next(self._clock),
        )


def test_one_measurement() -> None:
    world = World()
    (row,) = world.evaluator().evaluate("before", 0, 9)
    interval = wilson(3, 9)
    assert isinstance(row, EvaluationRow)
    assert (row.success_rate, row.success_low, row.success_high) == (
        interval.estimate,
        interval.low,
        interval.high,
    )
    assert (row.evaluation, row.update, row.label, row.purpose, row.split) == (
        10,
        0,
        "before",
        "evaluation",
        "holdout",
    )
    assert (row.num_tasks, row.num_failed, row.reward_mean, row.steps_mean) == (9, 0, 1 / 3, 2.0)
    assert row.sampled_tokens_mean == sum(t.row.num_sampled_tokens for t in world.stored) / 9
    assert (row.policy_version, row.policy_checksum, row.temperature) == (3, "fake-3", 1.0)
    assert (row.env, row.env_version, row.reward_version, row.prompt_version) == ("fake", "e", "r", "p")
    assert (row.seconds, row.time_us) == (2.5, 1_002_500_000)
    assert len(world.stored) == 9


def test_greedy_has_a_number_and_a_row_of_its_own() -> None:
    world = World()
    rows = world.evaluator().evaluate("scheduled", 20, 6, greedy=True)
    assert [(row.purpose, row.evaluation, row.temperature) for row in rows] == [
        ("evaluation", 10, 1.0),
        ("evaluation_greedy", 11, 0.0),
    ]
    assert world.runs == [(6, Purpose.EVALUATION), (6, Purpose.EVALUATION_GREEDY)]


def test_failed_episodes_are_counted_apart() -> None:
    (row,) = World(failing=[0, 1, 8]).evaluator().evaluate("after", 60, 9)
    assert (row.num_tasks, row.num_failed) == (6, 3)
    assert row.success_rate == 2 / 6


def test_nothing_to_measure_is_an_error_and_no_zero() -> None:
    with pytest.raises(EnvironmentFailure, match="all 3 episodes of evaluation 10 in environment e failed"):
        World(failing=range(3)).evaluator().evaluate("after", 60, 3)


def test_a_policy_that_changes_is_no_snapshot() -> None:
    with pytest.raises(EngineError, match=r"began on policy version 3.*sampled by .4."):
        World(sampled_by=4).evaluator().evaluate("after", 60, 3)


def test_verdicts_are_by_task() -> None:
    world = World()
    world.evaluator().evaluate("before", 0, 4)
    found = verdicts(world.stored)
    assert list(found.values()) == [True, False, False, True]
    assert set(found) == {t.row.task_id for t in world.stored}


def test_the_gap_is_training_minus_holdout() -> None:
    (row,) = World().evaluator().evaluate("after", 60, 9)
    training = [make_trajectory(issue=i, reward=float(i < 8)) for i in range(10)]
    gap = generalisation_gap(training, row)
    assert gap.estimate == pytest.approx(0.8 - 1 / 3)
    assert gap.low < gap.estimate < gap.high
    with pytest.raises(ValueError, match="no share"):
        generalisation_gap([], row)


def test_rows_fit_the_table() -> None:
    (row,) = World().evaluator().evaluate("manual", 1, 3)
    values: dict[str, Any] = dataclasses.asdict(row)
    assert all(value is not None for value in values.values())
