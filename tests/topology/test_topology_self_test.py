"""The step-0 self-test: three broken set-ups stop in their first update with words on what differs, a sound one doesn't."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotpot.engine.embedded import EmbeddedEngine
from hotpot.errors import SelfTestError
from hotpot.experience import RunReader, sequences
from hotpot.models import checksum
from hotpot.topology import train, wiring
from hotpot.topology.updates import batch as batches
from hotpot.types import PublishReport, Purpose

SHORT = ("topology.updates=1", "evaluation.num_tasks_final=2", "evaluation.every_updates=0")


def told(folder: Path) -> list[dict[str, Any]]:
    rows = RunReader.open(folder).table("events", ["detail"], where="kind = 'self_test'").to_pylist()
    return [json.loads(row["detail"]) for row in rows]


def refused(recipe: Callable[..., Any], tmp_path: Path, *overrides: str) -> str:
    """The words a broken set-up is stopped with; nothing was learned, and the record says why."""
    with pytest.raises(SelfTestError) as caught:
        train(recipe(*SHORT, *overrides))
    folder = tmp_path / "run"
    assert RunReader.open(folder).table("updates").num_rows == 0
    (found,) = told(folder)
    assert found["problem"]
    assert found["problem"] in str(caught.value)
    return found["problem"]


def test_a_sound_set_up_passes_at_the_start_and_at_each_resume(run, recipe) -> None:
    folder = run(*SHORT)
    train(recipe(*SHORT, "topology.updates=2"), resume=folder)
    found = told(folder)
    assert [one["problem"] for one in found] == ["", ""]
    assert [(one["logprob_difference_max"], one["tolerance"]) for one in found] == [(0.0, 0.0)] * 2
    assert all(one["num_tokens_compared"] > 50 for one in found)
    versions = RunReader.open(folder).table("versions", ["version"], where="kind = 'policy'")
    assert sorted(int(row["version"]) for row in versions.to_pylist()) == [1, 2, 3, 4]


def test_it_can_be_left_out(run) -> None:
    assert told(run(*SHORT, "run.self_test=false")) == []


def test_stale_weights_that_are_reported_as_new(recipe, tmp_path, monkeypatch) -> None:
    def lying(self: EmbeddedEngine, weights: Any, policy_version: int) -> PublishReport:
        self._version, self._checksum = policy_version, checksum(weights)
        return PublishReport(policy_version=policy_version, checksum=self._checksum, seconds=0.0)

    monkeypatch.setattr(EmbeddedEngine, "publish", lying)
    assert "samples from stale ones" in refused(recipe, tmp_path)


def test_stale_weights_that_are_not_even_reported(recipe, tmp_path, monkeypatch) -> None:
    def idle(_self: EmbeddedEngine, _weights: Any, policy_version: int) -> PublishReport:
        return PublishReport(policy_version=policy_version, checksum="", seconds=0.0)

    monkeypatch.setattr(EmbeddedEngine, "publish", idle)
    assert "goes on with stale weights" in refused(recipe, tmp_path)


def test_an_engine_that_serves_another_model(recipe, tmp_path, monkeypatch) -> None:
    make = wiring.make_engine

    def other(recipe: Any, decoder: Any, sampling: Any, version: int) -> EmbeddedEngine:
        engine = make(recipe, decoder, sampling, version)
        own = {name: tensor * 1.1 for name, tensor in decoder.state_dict().items()}
        engine._passes._serving.fill(own)
        return engine

    monkeypatch.setattr(wiring, "make_engine", other)
    problem = refused(recipe, tmp_path)
    assert "the engine serves other weights" in problem
    assert "the learner's log-probability is" in problem


def test_an_engine_that_rounds_otherwise_where_every_bit_was_promised(recipe, tmp_path, monkeypatch) -> None:
    make = wiring.make_engine

    def inexact(recipe: Any, decoder: Any, sampling: Any, version: int) -> EmbeddedEngine:
        run = recipe.run.model_copy(update={"deterministic": False})
        return make(recipe.model_copy(update={"run": run}), decoder, sampling, version)

    monkeypatch.setattr(wiring, "make_engine", inexact)
    problem = refused(recipe, tmp_path)
    assert "more than run.self_test_tolerance = 0.0" in problem
    assert "set run.self_test_tolerance to 0.001 to go on without that promise" in problem


def test_a_temperature_of_the_sampler_alone(recipe, tmp_path, monkeypatch) -> None:
    frozen = wiring.frozen_sampling

    def colder(recipe: Any) -> Any:
        found = frozen(recipe)
        return {**found, Purpose.TRAINING: dataclasses.replace(found[Purpose.TRAINING], temperature=0.7)}

    monkeypatch.setattr(wiring, "frozen_sampling", colder)
    problem = refused(recipe, tmp_path)
    assert "the engine sampled at temperature [0.7], the learner computes at 1.0" in problem
    assert "token " in problem


def test_a_mask_that_is_off_by_one(recipe, tmp_path, monkeypatch) -> None:
    def shifted(trajectory: Any) -> Any:
        return [
            dataclasses.replace(part, loss_mask=np.roll(part.loss_mask, -1)) for part in sequences(trajectory)
        ]

    monkeypatch.setattr(batches, "sequences", shifted)
    problem = refused(recipe, tmp_path)
    assert "shifted by -1" in problem
    assert "segment 0" in problem
