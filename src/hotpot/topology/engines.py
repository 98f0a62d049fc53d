"""Engines of a run, and how many threads they and the learner compute with.

Owns the making of an engine from a recipe. Knows no run folder.
"""

from dataclasses import dataclass

import numpy as np

from hotpot.config import Recipe
from hotpot.engine.embedded import EmbeddedEngine
from hotpot.models import Decoder, Policy, measure_threads, training_work
from hotpot.types import GenerationRequest, Purpose, SampleKey, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """Threads that engine and learner compute with."""

    engine: int
    learner: int


GREEDY = SamplingParams(temperature=0.0)


def frozen_sampling(recipe: Recipe) -> dict[Purpose, SamplingParams]:
    """Return the sampling parameters of each purpose, as the recipe freezes them."""
    return {
        Purpose.TRAINING: recipe.sampling.training.params(),
        Purpose.EVALUATION: recipe.sampling.evaluation.params(),
        Purpose.EVALUATION_GREEDY: GREEDY,
    }


def make_engine(
    recipe: Recipe, policy: Policy, sampling: dict[Purpose, SamplingParams], version: int
) -> EmbeddedEngine:
    """Return an engine that serves ``policy``'s weights, copied, as policy version ``version``."""
    return EmbeddedEngine(
        policy.config if isinstance(policy, Decoder) else policy,
        policy.state_dict(),
        settings=recipe.engine,
        max_context_tokens=recipe.rollout.max_context_tokens,
        sampling=sampling,
        policy_version=version,
        forgetful=recipe.run.deterministic,
    )


def choose_threads(recipe: Recipe, policy: Policy) -> Threads:
    """Return the thread counts of the recipe, or those measured best on the policy for each of the two kinds of work."""
    fixed = 1 if recipe.run.deterministic else recipe.run.threads
    if fixed:
        return Threads(engine=fixed, learner=fixed)
    sampling = {Purpose.EVALUATION: SamplingParams()}
    engine = make_engine(recipe, policy, sampling, version=0)
    number = 0

    def generate() -> None:
        nonlocal number
        for row in range(min(64, recipe.engine.max_concurrency)):
            number += 1
            engine.submit(
                GenerationRequest(
                    request_id=str(number),
                    session_id=str(number),
                    prompt=np.zeros(min(32, recipe.rollout.max_context_tokens - 8), dtype=np.int32),
                    stop_tokens=(),
                    max_tokens=4,
                    purpose=Purpose.EVALUATION,
                    sampling=sampling[Purpose.EVALUATION],
                    key=SampleKey(seed=0, issue=row, sample=0, step=0),
                )
            )
        while not engine.idle:
            engine.step()

    chosen = Threads(engine=measure_threads(generate)[0], learner=measure_threads(training_work(policy))[0])
    engine.close()
    return chosen
