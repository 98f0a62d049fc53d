"""Episodes that may not begin: who waits for a resting environment or a publish, and how the loop waits meanwhile."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from collector_parts import Log, make_plans, make_rollout, obedient

from hotpot.config import ActorsSection
from hotpot.rollout import ONLY, EpisodePlan, Mix, Rollout, TaskSampler
from hotpot.rollout.actors import InlineActors, Reply, inline
from hotpot.rollout.collection import Collection
from hotpot.testing.engine import FakeEngine
from hotpot.testing.environments import echo_environment
from hotpot.types import Purpose

TURNS = 100
"""More than any of these collections needs."""


def hold(rollout: Rollout) -> None:
    rollout.held = {ONLY}


def pause(rollout: Rollout) -> None:
    rollout.paused = True


def holdout(num_tasks: int) -> list[EpisodePlan]:
    return TaskSampler(Mix.of(echo_environment()), seed=7, samples_per_task=1).holdout(0, num_tasks)


def brought(rollout: Rollout, work: Collection) -> list[str]:
    """Let ``rollout`` turn until ``work`` is at its end, and return what came of it; give up where it never is."""
    found: list[str] = []
    for _ in range(TURNS):
        rollout.turn(0.0)
        found += [trajectory.row.trajectory_id for trajectory in work.take()]
        if not work.unfinished:
            break
    return sorted(found)


@pytest.mark.parametrize("stand_still", [hold, pause])
def test_an_evaluation_waits_neither_for_a_resting_environment_nor_for_a_publish(
    stand_still: Callable[[Rollout], None],
) -> None:
    log = Log()
    rollout = make_rollout(FakeEngine(obedient, max_concurrency=2), log=log)
    stand_still(rollout)
    training, evaluation = rollout.begin(Purpose.TRAINING), rollout.begin(Purpose.EVALUATION)
    rollout.add(training, make_plans(2, 2))
    rollout.add(evaluation, holdout(3))
    measured = [f"v0:{task}.0.0" for task in range(3)]
    assert brought(rollout, evaluation) == measured
    assert sorted(log.leased) == measured
    assert len(training.waiting) == 4
    rollout.held, rollout.paused = (), False
    assert brought(rollout, training) == ["0.0.0", "0.1.0", "1.0.0", "1.1.0"]


def test_where_nothing_may_begin_the_loop_waits_for_actors_and_does_not_spin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rollout = make_rollout(FakeEngine(obedient))
    asked: list[float] = []

    def ready(timeout_s: float) -> list[Reply]:
        asked.append(timeout_s)
        return []

    with monkeypatch.context() as patch:
        patch.setattr(rollout.actors, "ready", ready)
        rollout.turn(0.25)  # nobody has anything to do: the line is full
        assert asked == [0.25]
        hold(rollout)
        work = rollout.begin(Purpose.TRAINING)
        rollout.add(work, make_plans(1, 2))
        rollout.turn(0.25)
        assert asked == [0.25, 0.25]
    rollout.held = ()
    assert brought(rollout, work) == ["0.0.0", "0.1.0"]


def test_inline_actors_sleep_where_they_have_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(inline, "time", SimpleNamespace(sleep=slept.append))
    actors = InlineActors({ONLY: echo_environment().make}, ActorsSection())
    assert actors.ready(0.25) == []
    assert slept == [0.25]
    assert actors.ready(0.0) == []
    assert slept == [0.25]
    rollout = make_rollout(FakeEngine(obedient))
    work = rollout.begin(Purpose.TRAINING)
    rollout.add(work, make_plans(1, 2))
    for _ in range(TURNS):
        rollout.turn(0.25)
        if not work.unfinished:
            break
    assert not work.unfinished
    assert slept == [0.25]
