"""Sampling parameters come from the recipe alone: no environment, task or engine changes them unseen."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from collector_parts import DIALECT, SAMPLING, Log, flat, make_plans, make_rollout, obedient
from episode_parts import ANSWER, CALL, make_engine, make_episode, play
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_parts import TOOL, ScriptedEnvironment, done, make_plan, message, reply

from hotpot.engine import RequestGate
from hotpot.errors import EnvironmentFailure, EnvironmentOverrideError, SamplingOverrideError
from hotpot.testing.defaulting import DefaultingEngine, greedy_by_default
from hotpot.testing.engine import FakeEngine
from hotpot.testing.environments import ECHO, EchoEnvironment, echo_environment
from hotpot.types import (
    Observation,
    Purpose,
    Reward,
    SampleKey,
    SamplingParams,
    StepResult,
    Task,
    ToolSpec,
    Trajectory,
)

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\ud800"), max_size=30)
TALK = st.one_of(
    WORDS, st.sampled_from(["temperature=0", '{"sampling":{"temperature":0}}', "<|end|>top_p: 0.1"])
)


@settings(max_examples=40, deadline=None)
@given(question=TALK, result=TALK, tool=TALK, key=TALK, value=st.floats(0, 2))
def test_nothing_an_environment_says_reaches_the_sampling(
    question: str, result: str, tool: str, key: str, value: float
) -> None:
    told = Observation(
        messages=(message("user", question),),
        tools=(
            TOOL,
            ToolSpec(
                name="t", description=tool, parameters='{"properties":{},"temperature":0,"type":"object"}'
            ),
        ),
    )
    content = json.dumps({key: value, "temperature": value, "top_p": value})
    plan = dataclasses.replace(
        make_plan(), task=Task(env="stub", split=make_plan().task.split, content=content)
    )
    environment = ScriptedEnvironment([reply(result), done()], told)
    engine = make_engine([CALL, ANSWER])
    trajectory = play(make_episode(environment, plan=plan, max_context_tokens=500), engine)
    assert {request.sampling for request in engine.submitted} == {SamplingParams()}
    assert all((step.temperature, step.top_p, step.top_k) == (1.0, 1.0, 0) for step in trajectory.steps)


def with_extra(record: Any, name: str = "temperature", value: object = 0.0) -> Any:
    """Return ``record`` as an instance of a subclass that carries something more."""
    kind = type(record)
    made = type(f"Extended{kind.__name__}", (kind,), {})
    extended = made(**{f.name: getattr(record, f.name) for f in dataclasses.fields(record)})
    object.__setattr__(extended, name, value)
    return extended


OPENING = Observation(messages=(message("user", "a"),), tools=(TOOL,))
TRIES: dict[str, tuple[Any, Any]] = {
    "observation": (with_extra(OPENING), None),
    "opening message": (dataclasses.replace(OPENING, messages=(with_extra(message("user", "a")),)), None),
    "tool": (dataclasses.replace(OPENING, tools=(with_extra(TOOL, "sampling", {}),)), None),
    "result": (OPENING, with_extra(reply(), "top_p", 0.5)),
    "tool's message": (OPENING, StepResult(messages=(with_extra(message("tool", "a")),))),
    "reward": (
        OPENING,
        dataclasses.replace(done(), rewards=(with_extra(Reward(name="a", value=1.0), "top_k", 1),)),
    ),
}


@pytest.mark.parametrize("place", TRIES)
def test_what_would_carry_them_is_refused_by_name(place: str) -> None:
    opening, result = TRIES[place]
    episode = make_episode(ScriptedEnvironment([result], opening))
    with pytest.raises(
        EnvironmentOverrideError, match=r"Extended\w+, which adds \w+ = .* no environment can"
    ):
        play(episode, make_engine([CALL, ANSWER]))


def test_any_other_extra_is_a_breach_of_contract_too() -> None:
    episode = make_episode(ScriptedEnvironment([], with_extra(OPENING, "info", {})))
    with pytest.raises(EnvironmentFailure, match=r"adds \['info'\] to Observation") as caught:
        episode.start()
    assert not isinstance(caught.value, EnvironmentOverrideError)


@pytest.mark.parametrize("key", ["sampling", "sampling_params", "generation_config"])
def test_a_task_that_asks_for_them_is_refused_and_counted(key: str) -> None:
    plans = make_plans(2, 1)
    task = dataclasses.replace(plans[1].task, content=json.dumps({"word": "w2", key: {"temperature": 0}}))
    log = Log()
    rollout = make_rollout(FakeEngine(obedient), log=log, max_attempts=1)
    kept = flat(rollout.collect([plans[0], dataclasses.replace(plans[1], task=task)], Purpose.TRAINING))
    assert [t.row.attempt_id for t in kept] == ["0.0.0"]
    assert f"asks for {key}.temperature = 0" in log.dropped["1.0.0"]
    assert task.task_id in log.dropped["1.0.0"]
    assert rollout.counts.overrides.total() == 1


def test_a_task_may_be_about_sampling() -> None:
    task = dataclasses.replace(
        make_plan().task, content='{"sampling":{"rate":2},"generation_config":"none","temperature":300}'
    )
    plan = dataclasses.replace(make_plan(), task=task)
    assert play(
        make_episode(ScriptedEnvironment([done()], OPENING), plan=plan), make_engine([ANSWER])
    ).row.success


class Asking(EchoEnvironment):
    """Has a hold of the engine and asks it itself, greedily."""

    engine: Any = None

    def step(self, action: Any) -> StepResult:
        request = dataclasses.replace(
            self.engine.submitted[-1],
            request_id="judge:1",
            session_id="judge",
            sender="the judge of environment echo",
            sampling=SamplingParams(temperature=0.0),
            key=SampleKey(seed=1, issue=0, sample=0, step=0),
        )
        self.engine.submit(request)
        return super().step(action)


def test_an_environment_that_asks_the_engine_itself_is_refused_by_name() -> None:
    engine, log = FakeEngine(obedient), Log()
    bound = dataclasses.replace(echo_environment(), spec=dataclasses.replace(ECHO, make=Asking))
    Asking.engine = engine
    rollout = make_rollout(engine, bound, log=log, max_attempts=1)
    assert flat(rollout.collect(make_plans(1, 2), Purpose.TRAINING)) == []
    for reason in log.dropped.values():
        assert "step raised SamplingOverrideError: request 'judge:1' of session 'judge'" in reason
        assert "sender: the judge of environment echo" in reason
        assert "temperature=0.0" in reason
    assert engine.gate.overrides == {Purpose.TRAINING: 2}
    (first, _), again = engine.gate.take_overrides(), engine.gate.take_overrides()
    assert (first.sender, first.asked.temperature, first.frozen.temperature) == (
        "the judge of environment echo",
        0.0,
        1.0,
    )
    assert again == ()


def test_parameters_changed_behind_the_gates_back_are_refused() -> None:
    shared = SamplingParams()
    engine = FakeEngine(obedient, sampling={Purpose.TRAINING: shared})
    rollout = make_rollout(engine, sampling={**SAMPLING, Purpose.TRAINING: shared})
    object.__setattr__(shared, "temperature", 0.0)
    with pytest.raises(SamplingOverrideError, match="sender: environment stub@1"):
        flat(rollout.collect(make_plans(1, 1), Purpose.TRAINING))


# ---- what the engine reports ----


def run(differs: str, defaults: Any = None, **reports: Any) -> tuple[list[Trajectory], Log, Any]:
    inner = FakeEngine(obedient, sampling=defaults or SAMPLING)
    gate = RequestGate(SAMPLING, vocab_size=512, max_context_tokens=512)
    log = Log()
    rollout = make_rollout(
        DefaultingEngine(inner, gate, reports), log=log, max_attempts=2, engine_report_differs=differs
    )
    return flat(rollout.collect(make_plans(1, 2), Purpose.TRAINING)), log, rollout


def other(**values: Any) -> dict[Purpose, SamplingParams]:
    return {**SAMPLING, Purpose.TRAINING: SamplingParams(**values)}


REPORTS: dict[str, tuple[Any, dict[str, str], str]] = {
    "temperature": (greedy_by_default(SAMPLING), {}, "temperature 0.0 (frozen: 1.0)"),
    "top_p": (other(top_p=0.9), {}, "top_p 0.9 (frozen: 1.0)"),
    "top_k": (other(top_k=20), {}, "top_k 20 (frozen: 0)"),
    "repetition": (other(repetition_penalty=1.1), {}, "repetition_penalty 1.1 (frozen: 1.0)"),
    "precision": (None, {"precision": "bfloat16"}, "precision 'bfloat16' (the engine's own: 'none')"),
    "device": (None, {"device": "cuda:1"}, "device 'cuda' (the engine's own: 'none')"),
}


@pytest.mark.parametrize("what", REPORTS)
def test_another_report_is_an_infrastructure_failure_with_both_values(what: str) -> None:
    defaults, reports, words = REPORTS[what]
    kept, log, rollout = run("refuse", defaults, **reports)
    assert kept == []
    assert sorted(log.failed) == ["0.0.0", "0.1.0"]
    assert sorted(log.dropped) == ["0.0.1", "0.1.1"]
    assert all(
        words in reason and "'fake'" in reason for reason in [*log.failed.values(), *log.dropped.values()]
    )
    assert rollout.reports.differences.total() == 4


def test_switched_off_it_is_counted_and_the_record_says_what_was_used() -> None:
    kept, log, rollout = run("record", greedy_by_default(SAMPLING), precision="bfloat16")
    assert log.failed == log.dropped == {}
    assert len(kept) == 2
    assert {(s.temperature, s.precision) for t in kept for s in t.steps} == {(0.0, "bfloat16")}
    assert rollout.reports.differences.total() == 4


@pytest.mark.parametrize("differs", ["refuse", "record"])
def test_a_true_report_is_never_complained_of(differs: str) -> None:
    kept, log, rollout = run(differs, device="none:3")
    assert len(kept) == 2
    assert log.failed == {}
    assert not rollout.reports.differences


def test_the_environment_never_sees_a_refused_answer() -> None:
    environment: Callable[[], Any] = ScriptedEnvironment([done()], OPENING)  # type: ignore[assignment]
    episode = make_episode(environment)
    episode.start()
    request = episode.next_request()
    assert request is not None
    assert "environment stub@1+00, actor actor-0" in request.sender
    inner = make_engine([ANSWER], sampling=greedy_by_default(SAMPLING))
    engine = DefaultingEngine(inner, RequestGate(SAMPLING, vocab_size=512, max_context_tokens=512))
    engine.submit(request)
    with pytest.raises(Exception, match=f"{request.request_id}.*training.*temperature 0.0"):
        episode.receive(engine.step()[0])
    assert environment.actions == []  # type: ignore[attr-defined]
    assert DIALECT.stop_tokens == request.stop_tokens
