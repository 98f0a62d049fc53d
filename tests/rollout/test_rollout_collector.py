import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collector_parts import (
    DIALECT,
    SAMPLING,
    TOOL_ID,
    Log,
    flat,
    make_plans,
    make_rollout,
    obedient,
    recorded,
)
from rollout_parts import seen_by_engine

from hotpot.errors import EngineError, EnvironmentFailure, ModelFilesError, SamplingOverrideError, StoreError
from hotpot.experience.gate.gate import check
from hotpot.experience.gate.rules import Limits
from hotpot.experience.log.ledger import Lease, Ledger
from hotpot.experience.records.redact import Redactor
from hotpot.rollout import Mix, Past, TaskSampler, same_experience
from hotpot.testing.engine import FakeEngine
from hotpot.testing.environments import ECHO, EchoEnvironment, echo_environment
from hotpot.types import (
    EngineInfo,
    FinishReason,
    Generation,
    GenerationRequest,
    Purpose,
    SamplingParams,
    Split,
)


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


def test_control_returns_after_every_engine_step() -> None:
    engine = FakeEngine(obedient, max_concurrency=4, tokens_per_step=1)
    batches = make_rollout(engine).collect(make_plans(), Purpose.TRAINING)
    assert next(batches) == []
    batches.close()


def test_trajectories_come_out_as_they_finish() -> None:
    engine = FakeEngine(obedient, max_concurrency=4)
    batches = make_rollout(engine).collect(make_plans(), Purpose.TRAINING)
    first = next(batch for batch in batches if batch)
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


def test_secrets_in_reasons_reach_neither_ledger_nor_counts() -> None:
    secret = "sk-" + "a1" * 20

    class Leaky(EchoEnvironment):
        def reset(self, task: Any, seed: int) -> Any:
            raise RuntimeError("x" * 270 + f" key {secret} was refused")

        def close(self) -> None:
            raise RuntimeError(f"{secret} still in use")

    bound = dataclasses.replace(echo_environment(), spec=dataclasses.replace(ECHO, make=Leaky))
    log = Log()
    rollout = make_rollout(FakeEngine(obedient), bound, log=log, max_attempts=2, redact=Redactor().redact)
    assert flat(rollout.collect(make_plans(1, 1), Purpose.TRAINING)) == []
    texts = [
        *log.failed.values(),
        *log.dropped.values(),
        *rollout.counts.failures,
        *rollout.counts.close_failures,
    ]
    assert len(texts) == 4
    assert not any("sk-" in text for text in texts)
    assert "[redacted:api_key] was refused" in log.failed["0.0.0"]
    assert rollout.counts.redactions == 4


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


def test_whatever_raises_leaves_no_attempt_open_and_counts_each_once() -> None:
    class Breaking(FakeEngine):
        def step(self) -> list[Generation]:
            generations = super().step()
            if len(self.submitted) > 10:
                return [
                    dataclasses.replace(g, request_id="what?") if i == 3 else g
                    for i, g in enumerate(generations)
                ]
            return generations

    log = Log()
    rollout = make_rollout(Breaking(obedient, max_concurrency=8), log=log)
    with pytest.raises(EngineError, match=r"what\?.*not out"):
        flat(rollout.collect(make_plans(), Purpose.TRAINING))
    assert set(log.dropped) == set(log.leased)
    # Three episodes had ended in that step, but nobody got their trajectories.
    assert (rollout.counts.finished, rollout.counts.dropped) == (0, 8)


def test_a_ledger_that_breaks_ends_the_collection() -> None:
    class Broken(Log):
        def lease(self, leases: Sequence[Lease]) -> None:
            raise StoreError("disk full")

    with pytest.raises(StoreError, match="disk full"):
        flat(make_rollout(FakeEngine(obedient), log=Broken()).collect(make_plans(), Purpose.TRAINING))


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
    plans = TaskSampler(Mix.of(echo_environment()), seed=7, samples_per_task=3).holdout(4, 5)
    trajectories = flat(make_rollout(engine).collect(plans, purpose))
    assert {r.sampling for r in engine.submitted} == {SAMPLING[purpose]}
    assert {t.row.trajectory_id for t in trajectories} == {f"v4:{i}.0.0" for i in range(5)}
    assert {(t.row.evaluation, t.row.split, t.row.purpose) for t in trajectories} == {
        (4, "holdout", purpose.value)
    }
    assert all(check(t, Limits(run_id="run", vocabulary_size=512)) is None for t in trajectories)


def test_holdout_tasks_are_never_run_for_training() -> None:
    sampler = TaskSampler(Mix.of(echo_environment()), seed=7, samples_per_task=1)
    for plans, purpose in (
        (sampler.holdout(0, 1), Purpose.TRAINING),
        (sampler.issue(1), Purpose.EVALUATION),
        ([dataclasses.replace(sampler.holdout(0, 1)[0], evaluation=None)], Purpose.TRAINING),
    ):
        with pytest.raises(ValueError, match="can't be run for"):
            next(make_rollout(FakeEngine(obedient)).collect(plans, purpose))


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


def test_what_is_settled_is_not_run_again_or_only_as_company() -> None:
    plans = make_plans(num_tasks=2, samples=3)
    whole = flat(make_rollout(FakeEngine(obedient)).collect(plans, Purpose.TRAINING))
    finished = {t.row.episode_id: [t] for t in whole if t.row.episode_id in ("0.0", "1.2")}
    past = Past(finished=finished, lost=frozenset({"0.1"}), next_attempts={"0.0": 1, "0.1": 1, "0.2": 2})

    log = Log()
    found = flat(make_rollout(FakeEngine(obedient), log=log).collect(plans, Purpose.TRAINING, past))
    wanted = {"0.2.2", "1.0.0", "1.1.0"}
    assert {t.row.trajectory_id for t in found} == set(log.leased) == wanted
    assert {t.row.trajectory_id for t in past.brought(plans)} == {"0.0.0", "1.2.0"}

    log, company = Log(), dataclasses.replace(past, company=True)
    engine = FakeEngine(obedient)
    found = flat(make_rollout(engine, log=log).collect(plans, Purpose.TRAINING, company))
    assert set(log.leased) == wanted
    assert {t.row.episode_id for t in found} == {t.row.episode_id for t in whole}
    assert company.brought(plans) == []
    again = [t for t in found if t.row.episode_id == "0.0"]
    assert same_experience(again, finished["0.0"])
    assert not same_experience(again, finished["1.2"])


def test_company_that_breaks_is_no_failure_of_the_run() -> None:
    plans, log = make_plans(num_tasks=1, samples=2), Log()
    rollout = make_rollout(FakeEngine(obedient), echo_environment(failing_starts=100), log=log)
    past = Past(lost=frozenset({"0.0"}), company=True)
    assert flat(rollout.collect(plans, Purpose.TRAINING, past)) == []
    assert set(log.leased) == {"0.1.0", "0.1.1", "0.1.2"}
    assert (rollout.counts.dropped, sum(rollout.counts.failures.values())) == (1, 3)


class Boastful(FakeEngine):
    """Says that it holds more context than it does, as one would whose replica was replaced by a smaller one."""

    def info(self) -> EngineInfo:
        return dataclasses.replace(super().info(), max_context_tokens=512)


def test_a_prompt_that_the_engine_has_no_room_for_ends_its_episode_and_no_other() -> None:
    plans, log = make_plans(num_tasks=2), Log()
    whole = FakeEngine(obedient)
    steps = flat(make_rollout(whole).collect(plans, Purpose.TRAINING))[0].steps
    first, second = (step.context_tokens for step in steps)
    limit = second - 2
    assert limit > first
    engine = Boastful(obedient, max_context_tokens=limit)
    trajectories = flat(make_rollout(engine, log=log).collect(plans, Purpose.TRAINING))
    assert len(trajectories) == len(plans)
    assert {(t.row.end_reason, t.row.num_steps) for t in trajectories} <= {
        ("max_context", 1),
        ("answered", 2),
    }
    assert any(t.row.end_reason == "max_context" for t in trajectories)
    assert log.failed == log.dropped == {}
    assert all(check(t, Limits(run_id="run", vocabulary_size=512)) is None for t in trajectories)


def test_an_opening_that_the_engine_has_no_room_for_fails_with_that_reason() -> None:
    plans, log = make_plans(num_tasks=1, samples=2), Log()
    rollout = make_rollout(Boastful(obedient, max_context_tokens=8), log=log, max_attempts=2)
    assert flat(rollout.collect(plans, Purpose.TRAINING)) == []
    assert set(log.failed) == {"0.0.0", "0.1.0"}
    assert all(
        "too long for the engine" in reason for reason in (*log.failed.values(), *log.dropped.values())
    )
    assert set(log.dropped) == {"0.0.1", "0.1.1"}
