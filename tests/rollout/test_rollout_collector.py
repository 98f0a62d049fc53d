import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_parts import PROVENANCE, FakeTime, compact_tokenizer, seen_by_engine

from hotpot.config import RolloutSection
from hotpot.envs import BoundEnvironment
from hotpot.errors import EngineError, EnvironmentFailure, ModelFilesError, SamplingOverrideError, StoreError
from hotpot.experience.gate import check
from hotpot.experience.ledger import Lease, Ledger
from hotpot.experience.rules import Limits
from hotpot.rollout import Clock, Dialect, EpisodePlan, Rollout, TaskSampler
from hotpot.testing.engine import FakeEngine
from hotpot.testing.environments import ECHO, EchoEnvironment, echo_environment
from hotpot.timeline import Timeline
from hotpot.types import (
    Action,
    FinishReason,
    Generation,
    GenerationRequest,
    Purpose,
    SamplingParams,
    Split,
    ToolCall,
    Trajectory,
)

DIALECT = Dialect(compact_tokenizer())
SAMPLING = {Purpose.TRAINING: SamplingParams(), Purpose.EVALUATION: SamplingParams(), Purpose.EVALUATION_GREEDY: SamplingParams(temperature=0.0)}  # fmt: skip
TOOL_ID = DIALECT.tokenizer.special_ids["<|tool|>"]


def obedient(prompt: np.ndarray) -> list[int]:
    """Call echo with the word, then answer the word: reads the prompt, as a model must."""
    text = DIALECT.tokenizer.decode(prompt)
    word = text.split("say ")[-1].split("<")[0]
    if TOOL_ID in prompt:
        return DIALECT.encode_action(Action(answer=word)).tolist()
    return DIALECT.encode_action(
        Action(tool_call=ToolCall(name="echo", arguments=f'{{"text":"{word}"}}'))
    ).tolist()


class Log:
    """Keeps what it is told; every attempt must end at most once."""

    def __init__(self) -> None:
        self.leased: list[str] = []
        self.blocks: list[int] = []
        self.failed: dict[str, str] = {}
        self.dropped: dict[str, str] = {}

    def lease(self, leases: Sequence[Lease]) -> None:
        self.blocks.append(len(leases))
        self.leased += [lease.attempt_id for lease in leases]
        assert len(set(self.leased)) == len(self.leased)

    def fail(self, attempt_id: str, reason: str) -> None:
        self._end(self.failed, attempt_id, reason)

    def drop(self, attempt_id: str, reason: str) -> None:
        self._end(self.dropped, attempt_id, reason)

    def _end(self, ends: dict[str, str], attempt_id: str, reason: str) -> None:
        assert attempt_id in self.leased
        assert attempt_id not in {**self.failed, **self.dropped}
        ends[attempt_id] = reason


def make_rollout(
    engine: Any,
    environment: BoundEnvironment | None = None,
    *,
    log: Any = None,
    clock: Clock | None = None,
    sampling: Any = None,
    timeline: Timeline | None = None,
    **settings: Any,
) -> Rollout:
    return Rollout(
        engine,
        environment or echo_environment(),
        DIALECT,
        RolloutSection(**settings),
        sampling=sampling or SAMPLING,
        provenance=PROVENANCE,
        attempts=Log() if log is None else log,
        redact=lambda text: (text, 0),
        timeline=timeline or Timeline(),
        clock=clock,
        deadline_s=10.0,
    )


def make_plans(num_tasks: int = 4, samples: int = 3) -> list[EpisodePlan]:
    return TaskSampler(echo_environment(), seed=7, samples_per_task=samples).issue(num_tasks)


def flat(batches: Iterator[list[Trajectory]]) -> list[Trajectory]:
    return [trajectory for batch in batches for trajectory in batch]


def recorded(trajectories: list[Trajectory]) -> list[tuple[Any, ...]]:
    """Return what must be equal in two runs: everything but times."""
    return [
        (
            t.row.trajectory_id,
            t.row.reward,
            t.row.end_reason,
            s.prefix_hash,
            s.sampled_tokens.tolist(),
            s.span_stage,
        )
        for t in trajectories
        for s in t.steps
    ]


@pytest.mark.parametrize("concurrency", [1, 5, 128])
def test_all_plans_become_trajectories(concurrency: int) -> None:
    log, plans = Log(), make_plans()
    engine = FakeEngine(obedient, max_concurrency=concurrency, tokens_per_step=3)
    trajectories = flat(make_rollout(engine, log=log).collect(plans, Purpose.TRAINING))
    assert {t.row.trajectory_id for t in trajectories} == {f"{i}.{s}.0" for i in range(4) for s in range(3)}
    assert all(
        t.row.success and t.row.end_reason == "answered" and t.row.num_steps == 2 for t in trajectories
    )
    assert sorted(log.leased) == sorted(t.row.attempt_id for t in trajectories)
    assert log.failed == log.dropped == {}
    assert all(check(t, Limits(run_id="run", vocabulary_size=512)) is None for t in trajectories)
    prompts = {r.request_id: r.prompt.tolist() for r in engine.submitted}
    for trajectory in trajectories:
        for step, context in zip(trajectory.steps, seen_by_engine(trajectory.steps), strict=True):
            assert prompts[f"{step.trajectory_id}:{step.step}"] == context.tolist()


def test_the_engine_gets_batches_and_the_ledger_blocks() -> None:
    class Watching(FakeEngine):
        waiting: list[int] = []  # noqa: RUF012

        def step(self) -> list[Generation]:
            self.waiting.append(len(self._running))
            return super().step()

    log = Log()
    engine = Watching(obedient, max_concurrency=6)
    assert len(flat(make_rollout(engine, log=log).collect(make_plans(), Purpose.TRAINING))) == 12
    assert engine.waiting == [6, 6, 6, 6]
    assert log.blocks == [6, 6]


def test_trajectories_come_out_as_they_finish() -> None:
    engine = FakeEngine(obedient, max_concurrency=4)
    batches = make_rollout(engine).collect(make_plans(), Purpose.TRAINING)
    first = next(batches)
    assert len(first) == 4
    assert len(engine.submitted) == 8
    assert len(flat(batches)) == 8


def test_no_plans_no_trajectories() -> None:
    assert flat(make_rollout(FakeEngine(obedient)).collect([], Purpose.TRAINING)) == []


def test_the_same_run_twice_is_the_same() -> None:
    runs = [
        recorded(
            flat(
                make_rollout(FakeEngine(obedient, tokens_per_step=2)).collect(make_plans(), Purpose.TRAINING)
            )
        )
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_a_failed_attempt_is_tried_again_in_a_fresh_environment() -> None:
    log = Log()
    engine = FakeEngine(obedient)
    rollout = make_rollout(engine, echo_environment(failing_starts=2), log=log, max_attempts=3)
    trajectories = flat(rollout.collect(make_plans(1, 2), Purpose.TRAINING))
    assert len(trajectories) == 2
    assert sorted(log.failed) == ["0.0.0", "0.1.0"]
    assert sorted(t.row.trajectory_id for t in trajectories) == ["0.0.1", "0.1.1"]
    assert sorted(t.row.episode_id for t in trajectories) == ["0.0", "0.1"]
    assert all("fail_at_step" in reason for reason in log.failed.values())
    assert (rollout.counts.finished, rollout.counts.dropped, rollout.counts.started) == (2, 0, 4)
    assert rollout.counts.failures.total() == 2


def test_a_try_again_comes_before_plans_that_wait() -> None:
    engine = FakeEngine(obedient, max_concurrency=1)
    flat(make_rollout(engine, echo_environment(failing_starts=1)).collect(make_plans(3, 1), Purpose.TRAINING))
    assert [r.session_id for r in engine.submitted[::2]] == ["0.0.1", "1.0.0", "2.0.0"]


@pytest.mark.parametrize("at_step", [0, 1, 2])
def test_an_episode_that_fails_every_time_is_dropped_and_no_reward_of_zero(at_step: int) -> None:
    log = Log()
    rollout = make_rollout(
        FakeEngine(obedient), echo_environment({"fail_at_step": at_step}), log=log, max_attempts=2
    )
    assert flat(rollout.collect(make_plans(2, 1), Purpose.TRAINING)) == []
    assert sorted(log.failed) == ["0.0.0", "1.0.0"]
    assert sorted(log.dropped) == ["0.0.1", "1.0.1"]
    assert all(
        reason.startswith("gave up after 2 tries; the last: echo fails") for reason in log.dropped.values()
    )
    assert rollout.counts.dropped == 2


@pytest.mark.parametrize("switch", ["malformed_observation", "malformed_result"])
def test_garbage_is_a_failure(switch: str) -> None:
    log = Log()
    rollout = make_rollout(FakeEngine(obedient), echo_environment({switch: True}), log=log, max_attempts=1)
    assert flat(rollout.collect(make_plans(1, 1), Purpose.TRAINING)) == []
    assert "broke its contract" in log.dropped["0.0.0"]


def test_any_reason_can_be_put_on_the_ledger(tmp_path: Path) -> None:
    class Odd(EchoEnvironment):
        def reset(self, task: Any, seed: int) -> Any:
            raise EnvironmentFailure("\ud800 \x00" + "x" * 10**6)

    bound = dataclasses.replace(echo_environment(), spec=dataclasses.replace(ECHO, make=Odd))
    ledger = Ledger(tmp_path / "control.sqlite", "run")
    rollout = make_rollout(FakeEngine(obedient), bound, log=ledger, max_attempts=2)
    assert flat(rollout.collect(make_plans(1, 1), Purpose.TRAINING)) == []
    assert (ledger.counts().failed, ledger.counts().dropped) == (1, 1)
    assert all(len(row.reason) < 1100 for row in ledger.not_logged())


def test_attempts_on_the_real_ledger_end_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "control.sqlite", "run")
    rollout = make_rollout(
        FakeEngine(obedient), echo_environment(failing_starts=5), log=ledger, max_attempts=2
    )
    trajectories = flat(rollout.collect(make_plans(), Purpose.TRAINING))
    counts = ledger.counts()
    # What finished stays leased until the store has it.
    assert (counts.leased, counts.failed + counts.dropped) == (len(trajectories), 5)
    assert len(trajectories) + rollout.counts.dropped == 12


def test_environments_are_always_closed_once() -> None:
    closed: list[int] = []

    class Counting(EchoEnvironment):
        def close(self) -> None:
            super().close()
            closed.append(id(self))
            raise RuntimeError("stuck")

    made: list[Counting] = []

    def make(params: Any) -> Counting:
        made.append(Counting(params))
        return made[-1]

    bound = dataclasses.replace(echo_environment(), spec=dataclasses.replace(ECHO, make=make))
    rollout = make_rollout(FakeEngine(obedient), bound)
    assert len(flat(rollout.collect(make_plans(), Purpose.TRAINING))) == 12
    assert sorted(closed) == sorted(map(id, made))
    assert rollout.counts.close_failures == {"close raised RuntimeError: stuck": 12}


def test_closing_the_iterator_drops_what_is_open() -> None:
    def ragged(prompt: np.ndarray) -> list[int]:
        """Think for a while that differs by word, so that episodes end at different times."""
        return [9] * (int(prompt.sum()) % 7) + obedient(prompt) if TOOL_ID not in prompt else obedient(prompt)

    log = Log()
    engine = FakeEngine(ragged, max_concurrency=5, tokens_per_step=2)
    rollout = make_rollout(engine, log=log)
    batches = rollout.collect(make_plans(), Purpose.TRAINING)
    got = next(batches)
    batches.close()  # type: ignore[attr-defined]
    taken = {t.row.attempt_id for t in got}
    assert set(log.dropped) == set(log.leased) - taken
    assert len(taken) < len(log.leased) == 5
    assert set(log.dropped.values()) == {"the collection was stopped"}
    # Answers to the requests left behind are not taken for anything else's.
    later = [dataclasses.replace(plan, issue=plan.issue + 4) for plan in make_plans()]
    assert len(flat(rollout.collect(later, Purpose.TRAINING))) == 12


def test_whatever_raises_leaves_no_attempt_open() -> None:
    class Breaking(FakeEngine):
        def step(self) -> list[Generation]:
            generations = super().step()
            if len(self.submitted) > 10:
                return [
                    dataclasses.replace(g, request_id="what?") if i == 1 else g
                    for i, g in enumerate(generations)
                ]
            return generations

    log = Log()
    engine = Breaking(obedient, max_concurrency=8)
    with pytest.raises(EngineError, match=r"what\?.*not out"):
        flat(make_rollout(engine, log=log).collect(make_plans(), Purpose.TRAINING))
    assert set(log.dropped) == set(log.leased)


def test_a_ledger_that_breaks_ends_the_collection() -> None:
    class Broken(Log):
        def lease(self, leases: Sequence[Lease]) -> None:
            raise StoreError("disk full")

    with pytest.raises(StoreError, match="disk full"):
        flat(make_rollout(FakeEngine(obedient), log=Broken()).collect(make_plans(), Purpose.TRAINING))


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


def test_sampling_parameters_cannot_be_overridden() -> None:
    other = {**SAMPLING, Purpose.TRAINING: SamplingParams(temperature=0.5)}
    engine, log = FakeEngine(obedient), Log()
    with pytest.raises(SamplingOverrideError):
        flat(make_rollout(engine, sampling=other, log=log).collect(make_plans(), Purpose.TRAINING))
    assert engine.gate.overrides == {Purpose.TRAINING: 1}
    assert set(log.dropped) == set(log.leased)


@pytest.mark.parametrize("purpose", [Purpose.EVALUATION, Purpose.EVALUATION_GREEDY])
def test_each_purpose_has_its_own_sampling(purpose: Purpose) -> None:
    engine = FakeEngine(obedient)
    plans = TaskSampler(echo_environment(), seed=7, samples_per_task=3).holdout(4, 5)
    trajectories = flat(make_rollout(engine).collect(plans, purpose))
    assert {r.sampling for r in engine.submitted} == {SAMPLING[purpose]}
    assert {t.row.trajectory_id for t in trajectories} == {f"v4:{i}.0.0" for i in range(5)}
    assert {(t.row.evaluation, t.row.split, t.row.purpose) for t in trajectories} == {
        (4, "holdout", purpose.value)
    }
    assert all(check(t, Limits(run_id="run", vocabulary_size=512)) is None for t in trajectories)


def test_holdout_tasks_are_never_run_for_training() -> None:
    sampler = TaskSampler(echo_environment(), seed=7, samples_per_task=1)
    for plans, purpose in (
        (sampler.holdout(0, 1), Purpose.TRAINING),
        (sampler.issue(1), Purpose.EVALUATION),
        ([dataclasses.replace(sampler.holdout(0, 1)[0], evaluation=None)], Purpose.TRAINING),
    ):
        with pytest.raises(ValueError, match="can't be run for"):
            next(make_rollout(FakeEngine(obedient)).collect(plans, purpose))


def test_time_is_counted_by_span() -> None:
    timeline = Timeline(keep_slices=True)
    flat(make_rollout(FakeEngine(obedient), timeline=timeline).collect(make_plans(), Purpose.TRAINING))
    assert {s.name for s in timeline.slices} == {"generate", "environment", "store"}


def test_versions_that_change_in_flight_are_on_record() -> None:
    class Publishing(FakeEngine):
        def step(self) -> list[Generation]:
            finished = super().step()
            self.publish({}, self.info().policy_version + 1)
            return finished

    engine = Publishing(obedient, tokens_per_step=5)
    for trajectory in flat(make_rollout(engine).collect(make_plans(), Purpose.TRAINING)):
        assert check(trajectory, Limits(run_id="run", vocabulary_size=512)) is None
        assert any(len(step.span_policy_version) > 1 for step in trajectory.steps)


def test_a_template_error_ends_the_run_and_not_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    rollout = make_rollout(FakeEngine(obedient), log=log)

    def refuse(*_: Any, **__: Any) -> Any:
        raise ModelFilesError("the chat template refuses")

    monkeypatch.setattr(DIALECT, "open", refuse)
    with pytest.raises(ModelFilesError):
        flat(rollout.collect(make_plans(), Purpose.TRAINING))
    assert set(log.dropped) == set(log.leased)
    assert rollout.counts.failures == {}


def test_reasons_cannot_fill_the_memory() -> None:
    numbers = iter(range(10**6))

    class Chatty(EchoEnvironment):
        def reset(self, task: Any, seed: int) -> Any:
            raise RuntimeError(f"{next(numbers)} " + "x" * 10_000)

    bound = dataclasses.replace(echo_environment(), spec=dataclasses.replace(ECHO, make=Chatty))
    rollout = make_rollout(FakeEngine(obedient), bound, max_attempts=1)
    assert flat(rollout.collect(make_plans(100, 1), Purpose.TRAINING)) == []
    assert rollout.counts.failures.total() == 100
    assert len(rollout.counts.failures) <= 65
    assert max(map(len, rollout.counts.failures)) <= 200


def test_an_output_that_is_cut_ends_the_episode() -> None:
    def babble(_: np.ndarray) -> Iterator[int]:
        while True:
            yield 9

    engine = FakeEngine(babble)
    trajectories = flat(make_rollout(engine, max_step_tokens=5).collect(make_plans(1, 2), Purpose.TRAINING))
    assert [t.row.end_reason for t in trajectories] == ["max_step_tokens"] * 2
    assert all(s.finish == FinishReason.MAX_TOKENS for t in trajectories for s in t.steps)


def test_requests_reach_the_engine_in_the_order_of_plans() -> None:
    engine = FakeEngine(obedient, max_concurrency=4)
    flat(make_rollout(engine).collect(make_plans(), Purpose.TRAINING))
    first: list[GenerationRequest] = [r for r in engine.submitted if r.key.step == 0]
    assert [(r.key.issue, r.key.sample) for r in first] == [(i, s) for i in range(4) for s in range(3)]


def test_training_tasks_are_of_the_train_split() -> None:
    assert {plan.task.split for plan in make_plans()} == {Split.TRAIN}
