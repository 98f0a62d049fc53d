"""Steps computed on top of earlier ones beside the same steps computed in one go: measured in a run, and a lie is found."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from hotpot.experience import RunReader
from hotpot.models import load_decoder
from hotpot.topology.checks.incremental import NUM_STEPS, IncrementalDifference, measure_incremental
from hotpot.topology.halves import recorded_batches
from hotpot.topology.parts.engines import frozen_sampling, make_engine
from hotpot.types import Purpose, Trajectory

SHORT = (
    "topology.updates=1",
    "evaluation.num_tasks_final=2",
    "evaluation.every_updates=0",
    "run.self_test=false",
)


@pytest.fixture
def trajectories(run) -> list[Trajectory]:
    (batch,) = recorded_batches(run(*SHORT), 4)
    return batch


def measure(
    recipe: Any, model: Any, trajectories: list[Trajectory], version: int = 1
) -> IncrementalDifference:
    decoder, sampling = load_decoder(model), frozen_sampling(recipe())
    engine = make_engine(recipe(), decoder, sampling, 0)
    try:
        return measure_incremental(
            engine,
            decoder.state_dict(),
            trajectories,
            versions={version},
            sampling=sampling[Purpose.TRAINING],
        )
    finally:
        engine.close()


def lie(trajectory: Trajectory, by: float) -> Trajectory:
    """Return it as an engine would have recorded it whose reused keys and values are wrong."""
    steps = [
        dataclasses.replace(
            step, model_logprobs=step.model_logprobs + np.float32(by * (step.reused_tokens > 0))
        )
        for step in trajectory.steps
    ]
    return dataclasses.replace(trajectory, steps=tuple(steps))


def test_the_difference_is_rounding_and_a_wrong_one_is_named(recipe, model, trajectories) -> None:
    found = measure(recipe, model, trajectories)
    assert (found.num_steps, found.num_steps_other) == (NUM_STEPS, 0)
    assert found.num_tokens > NUM_STEPS
    assert found.largest is not None
    assert 0 <= found.largest < 1e-4
    assert found.problem(1e-4) == ""
    wrong = measure(recipe, model, [lie(one, -0.01) for one in trajectories])
    assert wrong.largest == pytest.approx(0.01, abs=1e-4)
    assert "reuses what it must not" in wrong.problem(1e-3)
    assert wrong.worst in wrong.problem(1e-3)


def test_other_random_numbers_are_noticed(recipe, model, trajectories) -> None:
    moved = [
        dataclasses.replace(
            one, steps=tuple(dataclasses.replace(s, sampled_tokens=(s.sampled_tokens + 1)) for s in one.steps)
        )
        for one in trajectories
    ]
    found = measure(recipe, model, moved)
    assert found.num_steps_other == found.num_steps == NUM_STEPS
    assert "begin with other tokens" in found.problem(1e-3)


def test_steps_of_other_weights_are_left_out(recipe, model, trajectories) -> None:
    found = measure(recipe, model, trajectories, version=7)
    assert (found.largest, found.num_steps, found.problem(1e-9)) == (None, 0, "")


def test_a_run_has_it_among_its_metrics(run) -> None:
    folder = run(*SHORT[:-1])
    rows = (
        RunReader.open(folder)
        .table("metrics", where="name = 'engine/incremental_difference_max'")
        .to_pylist()
    )
    assert len(rows) == 1
    assert 0 <= rows[0]["value"] < 1e-4
