"""Time in a collection: deadlines of requests, and what episodes are charged."""

import dataclasses
from typing import Any

import pytest
from collector_parts import Log, flat, make_plans, make_rollout, obedient
from rollout_parts import FakeTime

from hotpot.envs import BoundEnvironment
from hotpot.errors import EngineError
from hotpot.rollout import Clock
from hotpot.testing.engine import FakeEngine
from hotpot.testing.environments import ECHO, EchoEnvironment, echo_environment
from hotpot.timeline import Timeline
from hotpot.types import Generation, Purpose, StepResult


def test_an_engine_that_never_answers_is_named_with_its_request() -> None:
    time = FakeTime()

    class Silent(FakeEngine):
        def step(self) -> list[Generation]:
            time.seconds += 1.0
            return []

    log = Log()
    rollout = make_rollout(Silent(obedient), log=log, clock=Clock(time))
    with pytest.raises(EngineError, match=r"request '0\.0\.0:0' got no answer in 11 s"):
        flat(rollout.collect(make_plans(), Purpose.TRAINING))
    assert time.seconds == 1011.0
    assert len(log.dropped) == 12


def test_one_starved_request_is_found_among_busy_ones() -> None:
    time = FakeTime()

    class Starving(FakeEngine):
        def step(self) -> list[Generation]:
            time.seconds += 1.0
            self._running.pop("0.0.0:0", None)
            return super().step()

    plans = make_plans(40, 1)
    with pytest.raises(EngineError, match=r"request '0\.0\.0:0'"):
        flat(
            make_rollout(Starving(obedient, max_concurrency=2), clock=Clock(time)).collect(
                plans, Purpose.TRAINING
            )
        )


def test_time_the_taker_spends_is_not_the_engines() -> None:
    time = FakeTime()
    engine = FakeEngine(obedient, max_concurrency=2, tokens_per_step=4)
    taken = 0
    for batch in make_rollout(engine, clock=Clock(time)).collect(make_plans(), Purpose.TRAINING):
        time.seconds += 1e5
        taken += len(batch)
    assert taken == 12


def test_time_is_counted_by_span() -> None:
    timeline = Timeline(keep_slices=True)
    flat(make_rollout(FakeEngine(obedient), timeline=timeline).collect(make_plans(), Purpose.TRAINING))
    assert {s.name for s in timeline.slices} == {"generate", "environment", "tools", "store"}
    assert "tools" not in timeline.totals()


class Ticking(FakeEngine):
    """Every step takes ``step_s`` seconds of ``time``."""

    def __init__(self, time: FakeTime, step_s: float, **keywords: Any) -> None:
        super().__init__(obedient, **keywords)
        self.time, self.step_s = time, step_s

    def step(self) -> list[Generation]:
        self.time.seconds += self.step_s
        return super().step()


def slow_environment(time: FakeTime, step_s: float) -> BoundEnvironment:
    class Slow(EchoEnvironment):
        def step(self, action: Any) -> StepResult:
            time.seconds += step_s
            return super().step(action)

    return dataclasses.replace(echo_environment(), spec=dataclasses.replace(ECHO, make=Slow))


@pytest.mark.parametrize(("tool_s", "end"), [(40.0, "answered"), (60.0, "max_seconds")])
def test_an_episode_is_charged_its_own_environment_only(tool_s: float, end: str) -> None:
    """Twelve tools take turns in one thread, and the taker dawdles: none of that is another episode's time."""
    time = FakeTime()
    rollout = make_rollout(
        Ticking(time, 1.0, max_concurrency=5),
        slow_environment(time, tool_s),
        clock=Clock(time),
        max_seconds=60.0,
    )
    ends = []
    for batch in rollout.collect(make_plans(), Purpose.TRAINING):
        time.seconds += 1000.0
        ends += [trajectory.row.end_reason for trajectory in batch]
    assert ends == [end] * 12


@pytest.mark.parametrize(("step_s", "end"), [(5.0, "answered"), (30.0, "max_seconds")])
def test_an_episode_is_charged_the_engines_work_while_its_request_is_out(step_s: float, end: str) -> None:
    time = FakeTime()
    rollout = make_rollout(
        Ticking(time, step_s, tokens_per_step=8), clock=Clock(time), max_seconds=60.0, deadline_s=1e6
    )
    trajectories = flat(rollout.collect(make_plans(), Purpose.TRAINING))
    assert {trajectory.row.end_reason for trajectory in trajectories} == {end}
    assert len(trajectories) == 12


def test_what_finished_is_out_before_a_request_that_did_not_raises() -> None:
    time = FakeTime()

    class Starving(Ticking):
        def step(self) -> list[Generation]:
            self._running.pop("0.0.0:0", None)
            return super().step()

    log = Log()
    rollout = make_rollout(Starving(time, 6.0), log=log, clock=Clock(time))
    batches = rollout.collect(make_plans(), Purpose.TRAINING)
    taken = next(batch for batch in batches if batch)
    with pytest.raises(EngineError, match=r"request '0\.0\.0:0'"):
        list(batches)
    assert (rollout.counts.finished, rollout.counts.dropped) == (len(taken), 1) == (11, 1)
    assert list(log.dropped) == ["0.0.0"]
