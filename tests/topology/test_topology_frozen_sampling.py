"""One engine's temperature is 0 by default: a run refuses it by name; with the guard off its record shows it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotpot.engine import RequestGate
from hotpot.engine.replicas import ReplicaGroup
from hotpot.errors import EnvironmentFailure, SamplingOverrideError
from hotpot.experience import RunReader, open_run
from hotpot.testing.coin import CoinEnvironment
from hotpot.testing.defaulting import DefaultingEngine, greedy_by_default
from hotpot.topology import train, wiring
from hotpot.topology.parts.engines import make_engine
from hotpot.types import GenerationRequest, Purpose, SampleKey, SamplingParams

SHORT = (
    "topology.updates=1",
    "evaluation.num_tasks_final=2",
    "evaluation.every_updates=0",
    "run.self_test=false",
)

USED = """
select purpose, engine, temperature, top_p, top_k, repetition_penalty, precision, count(*) as steps
from steps group by all order by steps desc"""
"""The plain query of docs/logprobs.md."""


def make_greedy(recipe: Any, policy: Any, sampling: Any, version: int) -> DefaultingEngine:
    """Return an engine that samples training greedily, whatever it is asked."""
    training = {Purpose.TRAINING: sampling[Purpose.TRAINING]}
    inner = make_engine(recipe, policy, {**sampling, **greedy_by_default(training)}, version)
    limit = recipe.rollout.max_context_tokens
    gate = RequestGate(sampling, vocab_size=policy.config.vocab_size, max_context_tokens=limit)
    return DefaultingEngine(inner, gate)


@pytest.fixture
def greedy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the run's engine be one of those."""
    monkeypatch.setattr(wiring, "make_engine", make_greedy)


@pytest.fixture
def one_greedy_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the second of the run's two replicas be one of those."""

    def make(recipe: Any, policy: Any, sampling: Any, version: int) -> ReplicaGroup:
        given = (recipe, policy, sampling, version)
        return ReplicaGroup([make_engine(*given), make_greedy(*given)], policy.state_dict())

    monkeypatch.setattr(wiring, "make_engine", make)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    rows = RunReader.open(folder).table("events", ["detail"], where=f"kind = '{kind}'").to_pylist()
    return [json.loads(row["detail"]) for row in rows]


def gauge(folder: Path, name: str) -> float:
    rows = open_run(folder).sql(f"select max(value) as v from metrics where name = '{name}'").to_pylist()
    return float(rows[0]["v"])


@pytest.mark.usefixtures("greedy_engine")
def test_it_is_refused_and_named(recipe, tmp_path) -> None:
    with pytest.raises(EnvironmentFailure, match=r"temperature 0.0 \(frozen: 1.0\)"):
        train(recipe(*SHORT))
    folder = tmp_path / "run"
    told = events(folder, "engine_report_differs")
    assert [one["report"] for one in told] == [
        "engine 'embedded' reports temperature 0.0 (frozen: 1.0)",
    ]
    assert gauge(folder, "rollout/engine_report_differences") == sum(one["count"] for one in told) == 16 * 3
    found = open_run(folder).sql(
        "select state, count(*) as n from attempts where reason like '%temperature 0.0 (frozen: 1.0)%' "
        "group by state order by state"
    )
    assert {row["state"]: row["n"] for row in found.to_pylist()} == {"dropped": 16, "failed": 32}
    # No reward of 0 came of it, and no update.
    assert open_run(folder).sql("select 1 from trajectories where purpose = 'training'").num_rows == 0
    assert RunReader.open(folder).table("updates").num_rows == 0


@pytest.mark.usefixtures("greedy_engine")
def test_with_the_guard_off_the_record_shows_it(recipe) -> None:
    folder = train(recipe(*SHORT, "rollout.engine_report_differs=record", "learner.learning_rate=0"))
    used = open_run(folder).sql(USED).to_pylist()
    training = [row for row in used if row["purpose"] == "training"]
    assert [(row["temperature"], row["engine"]) for row in training] == [(0.0, "embedded")]
    assert {row["temperature"] for row in used if row["purpose"] == "evaluation"} == {1.0}
    assert gauge(folder, "rollout/engine_report_differences") == training[0]["steps"] > 0
    assert sum(one["count"] for one in events(folder, "engine_report_differs")) == training[0]["steps"]


@pytest.mark.usefixtures("greedy_engine")
@pytest.mark.parametrize("kind", ["async", "batched_async"])
def test_it_is_told_as_it_happens_where_collecting_has_no_end(recipe, kind: str) -> None:
    settings = (f"topology.kind={kind}", "topology.serial=true", "topology.updates=3")
    folder = train(recipe(*SHORT, *settings, "rollout.engine_report_differs=record"))
    told = RunReader.open(folder).table("events", ["update"], where="kind = 'engine_report_differs'")
    assert 0 in told["update"].to_pylist()
    answers = open_run(folder).sql("select count(*) as n from steps where purpose = 'training'").to_pylist()
    assert sum(one["count"] for one in events(folder, "engine_report_differs")) >= answers[0]["n"] > 0


@pytest.mark.usefixtures("one_greedy_replica")
def test_one_replica_of_two_is_refused_by_number_and_nothing_it_sampled_is_learned(recipe) -> None:
    folder = train(recipe(*SHORT, "rollout.max_attempts=8"))
    assert {one["report"] for one in events(folder, "engine_report_differs")} == {
        "engine 'embedded, replica 1' reports temperature 0.0 (frozen: 1.0)"
    }
    used = open_run(folder).sql(USED).to_pylist()
    assert {row["temperature"] for row in used if row["purpose"] == "training"} == {1.0}
    assert RunReader.open(folder).table("updates").num_rows == 1


@pytest.mark.usefixtures("one_greedy_replica")
def test_with_the_guard_off_the_record_says_which_replica(recipe) -> None:
    folder = train(recipe(*SHORT, "rollout.engine_report_differs=record", "learner.learning_rate=0"))
    used = open_run(folder).sql(USED).to_pylist()
    assert {(row["engine"], row["temperature"]) for row in used if row["purpose"] == "training"} == {
        ("embedded", 1.0),
        ("embedded, replica 1", 0.0),
    }


def test_an_environment_that_asks_the_engine_is_named_in_events_and_metrics(recipe, monkeypatch) -> None:
    engines: list[Any] = []

    def make(*arguments: Any) -> Any:
        engines.append(make_engine(*arguments))
        return engines[-1]

    def judged(self: CoinEnvironment, action: Any) -> Any:
        if action.answer is not None:
            with pytest.raises(SamplingOverrideError):  # and it tells nobody
                engines[0].submit(_judgement())
        return step(self, action)

    step = CoinEnvironment.step
    monkeypatch.setattr(wiring, "make_engine", make)
    monkeypatch.setattr(CoinEnvironment, "step", judged)
    folder = train(recipe(*SHORT))
    told = events(folder, "sampling_override")
    answered = open_run(folder).sql("select count(*) as n from trajectories where end_reason = 'answered'")
    assert sum(one["count"] for one in told) == answered.to_pylist()[0]["n"] > 4
    assert gauge(folder, "rollout/sampling_overrides") > 4
    last = told[0]["last"][-1]
    assert (last["request_id"], last["session_id"], last["sender"]) == ("j", "judge", "the coin's judge")
    assert (last["asked"]["temperature"], last["frozen"]["temperature"]) == (0.0, 1.0)


def _judgement() -> Any:
    return GenerationRequest(
        request_id="j",
        session_id="judge",
        prompt=np.zeros(3, np.int32),
        stop_tokens=(),
        max_tokens=1,
        purpose=Purpose.TRAINING,
        sampling=SamplingParams(temperature=0.0),
        key=SampleKey(seed=0, issue=0, sample=0, step=0),
        sender="the coin's judge",
    )
