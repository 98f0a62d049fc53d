"""Engines of a run, and how many threads they and the learner compute with.

Owns the making of an engine from a recipe. Knows no run folder.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from hotpot.config import EngineSection, Recipe
from hotpot.engine import Engine
from hotpot.engine.embedded import EmbeddedEngine
from hotpot.engine.remote import RemoteEngine, borrow, make_remote_engine
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
) -> Engine:
    """Return the recipe's engine; it serves ``policy``'s weights, copied, as policy version ``version``."""
    settings = recipe.engine
    if isinstance(settings, EngineSection):
        return _embedded(settings, recipe, policy, sampling, version)
    return make_remote_engine(
        policy,
        policy.state_dict(),
        settings=settings,
        max_context_tokens=recipe.rollout.max_context_tokens,
        sampling=sampling,
        policy_version=version,
    )


@contextmanager
def spare_engine(recipe: Recipe, policy: Policy, engine: Engine | None) -> Iterator[Engine]:
    """Give a second engine of the recipe's kind that serves ``policy`` as version 0 and nobody, for tests of publishing.

    Behind HTTP it is a second client of the server of ``engine``, which gets its weights back at the end: a second server
    would want as much memory again.
    """
    settings = recipe.engine
    spare: Engine
    if isinstance(engine, RemoteEngine) and not isinstance(settings, EngineSection):
        spare = borrow(engine, policy, policy.state_dict(), settings)
    else:
        small = recipe.model_copy(update={"engine": settings.model_copy(update={"max_concurrency": 1})})
        spare = make_engine(small, policy, frozen_sampling(recipe), version=0)
    try:
        yield spare
    finally:
        spare.close()


def _embedded(
    settings: EngineSection,
    recipe: Recipe,
    policy: Policy,
    sampling: dict[Purpose, SamplingParams],
    version: int,
) -> EmbeddedEngine:
    exact = recipe.run.deterministic and policy.can_be_exact
    return EmbeddedEngine(
        policy.config if isinstance(policy, Decoder) else policy,
        policy.state_dict(),
        settings=settings,
        max_context_tokens=recipe.rollout.max_context_tokens,
        sampling=sampling,
        policy_version=version,
        exact=exact,
        forgetful=recipe.run.deterministic and not exact,
    )


def choose_threads(recipe: Recipe, policy: Policy) -> Threads:
    """Return the thread counts of the recipe, or those measured best on the policy for each of the two kinds of work."""
    fixed = 1 if recipe.run.deterministic else recipe.run.threads
    if fixed:
        return Threads(engine=fixed, learner=fixed)
    if not isinstance(recipe.engine, EngineSection):  # a server computes with threads of its own
        learner = measure_threads(training_work(policy))[0]
        return Threads(engine=learner, learner=learner)
    sampling = {Purpose.EVALUATION: SamplingParams()}
    engine = _embedded(recipe.engine, recipe, policy, sampling, version=0)
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
