"""The step-0 self-test: is the set-up right, before anything is learned with it?

::

    first batch ──► masks: token by token against the steps
                ──► agreement: the learner's log-probabilities against the sampler's
    an engine of the same kind ──► publish: changed weights change what it says, the same ones do not
                               ──► incremental: steps that reused what earlier ones computed, computed in one go

Owns the checks of masks and agreement (pure) and the words on what differs; :mod:`hotpot.topology.checks.publish_check` and
:mod:`hotpot.topology.checks.incremental` have the others. Each returns a problem in words, empty where there is none.

What it can't see: an engine that goes wrong later (``updates.logprob_difference_max`` shows that), or a wrong reward.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotpot.config import Recipe
from hotpot.config.sections.run import SELF_TEST_TOLERANCE
from hotpot.engine import Engine
from hotpot.engine.remote import RemoteEngine
from hotpot.experience import TrainingSequence
from hotpot.learner import Learner
from hotpot.learner.scoring import Scored, score_sequences
from hotpot.topology.checks.incremental import NOT_MEASURED, measure_incremental
from hotpot.topology.checks.publish_check import check_publish
from hotpot.topology.parts.engines import frozen_sampling, spare_engine
from hotpot.topology.updates.batch import UpdateBatch, learnable
from hotpot.types import (
    Purpose,
    StepRow,
)

NUM_TRAJECTORIES = 8
"""Trajectories whose tokens are scored; masks are checked on all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What the comparison of log-probabilities came to, in nats over ``num_tokens`` tokens; where there were none,
    ``not_compared`` says why.
    """

    problem: str
    not_compared: str = ""
    num_tokens: int = 0
    largest: float = 0.0
    mean: float = 0.0


def run_self_test(
    recipe: Recipe,
    learner: Learner,
    batch: UpdateBatch,
    *,
    policy_version: int,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Make all checks on the first batch and return what the event ``self_test`` says: ``problem`` and the figures.

    ``policy_version`` is the one that the learner's weights are served as. An engine of the recipe's kind is made for
    the publishes, so that the run's own, ``engine``, keeps its versions.
    """
    told, sampling = recipe.run.self_test_tolerance, frozen_sampling(recipe)
    served = engine.info().precision if isinstance(engine, RemoteEngine) else "float32"
    tolerance = told or max(_tolerance(learner), _rounding(served) if served != "float32" else 0.0)
    agreed = check_agreement(learner, batch, policy_version=policy_version, tolerance=tolerance)
    problem = check_masks(batch) or agreed.problem
    incremental = NOT_MEASURED
    if not problem:
        rounding = told or (tolerance if learner.exact else _rounding(served))
        training = sampling[Purpose.TRAINING]
        with spare_engine(recipe, learner.policy(), engine) as spare:
            problem = check_publish(spare, learner, batch.collected[0], sampling=training, tolerance=rounding)
            if not problem:
                incremental = measure_incremental(
                    spare,
                    learner.weights(),
                    batch.collected,
                    versions={policy_version, *batch.aliases},
                    sampling=training,
                )
                problem = incremental.problem(rounding)
    return {
        "update": batch.update,
        "problem": problem,
        "num_trajectories": len(batch.trajectories),
        "num_tokens_compared": agreed.num_tokens,
        "not_compared": agreed.not_compared,
        "logprob_difference_max": agreed.largest if np.isfinite(agreed.largest) else None,
        "logprob_difference_mean": agreed.mean if np.isfinite(agreed.mean) else None,
        "incremental_difference_max": incremental.largest,
        "num_steps_incremental": incremental.num_steps,
        "num_tokens_incremental": incremental.num_tokens,
        "tolerance": tolerance,
        "precision": learner.precision,
    }


def _tolerance(learner: Learner) -> float:
    """Return what is taken for rounding where the recipe says nothing; in the exact arithmetic nothing is."""
    return 0.0 if learner.exact else SELF_TEST_TOLERANCE[learner.precision]


def _rounding(precision: str) -> float:
    """Return what an engine's log-probabilities may differ by where it computes in ``precision``."""
    return SELF_TEST_TOLERANCE["float32" if precision == "float32" else "bfloat16"]


def check_masks(batch: UpdateBatch) -> str:
    """Compare what is to be learned with the steps, token by token: masks true exactly on sampled tokens."""
    parts = {(part.trajectory_id, part.segment): part for part in batch.sequences()}
    for trajectory in learnable(batch.trajectories):
        for segment, steps in itertools.groupby(trajectory.steps, key=lambda step: step.segment):
            name = (trajectory.row.trajectory_id, segment)
            if name not in parts:
                return f"trajectory {name[0]}, segment {segment}: it is recorded, but not in the batch"
            problem = _check_mask(parts[name], list(steps))
            if problem:
                return f"trajectory {name[0]}, segment {segment}: {problem}"
    return ""


def check_agreement(learner: Learner, batch: UpdateBatch, *, policy_version: int, tolerance: float) -> Agreed:
    """Compare learner and sampler on some trajectories' tokens, as far as today's weights sampled them."""
    parts = _some(
        [
            part
            for part in batch.sequences()
            if part.loss_mask.any() and not part.replayed and _is_of(part, policy_version)
        ]
    )
    if not parts:
        return Agreed(
            problem="",
            not_compared="no trajectory of the first batch was sampled by the weights that the learner starts from",
        )
    scored = score_sequences(learner.decoder, parts, temperature=learner.temperature)
    raw = learner.settings.old_logprobs == "recomputed"
    gaps = [_gap(part, own, raw=raw) for part, own in zip(parts, scored, strict=True)]
    everything = np.concatenate(gaps)
    worst = max(range(len(gaps)), key=lambda index: _largest(gaps[index]))
    found = Agreed(
        problem="", num_tokens=len(everything), largest=_largest(everything), mean=float(everything.mean())
    )
    if found.largest <= tolerance:
        return found
    words = _disagreement(parts[worst], scored[worst], gaps[worst], raw=raw)
    told = f"{words}; more than run.self_test_tolerance = {tolerance}. {_cause(batch, learner, parts, scored, tolerance)}"
    return replace(found, problem=told)


def _check_mask(part: TrainingSequence, steps: Sequence[StepRow]) -> str:
    tokens = np.concatenate([piece for step in steps for piece in (step.prompt_tokens, step.sampled_tokens)])
    lengths = [n for step in steps for n in (len(step.prompt_tokens), len(step.sampled_tokens))]
    sampled = np.repeat(np.tile([False, True], len(steps)), lengths)
    behaviour = np.zeros(len(tokens), np.float32)
    behaviour[sampled] = np.concatenate([step.behaviour_logprobs for step in steps])
    if len(part.tokens) != len(tokens):
        return f"{len(part.tokens)} tokens are to be learned from, {len(tokens)} were recorded"
    wrong = np.flatnonzero(part.tokens != tokens)
    if len(wrong):
        at = int(wrong[0])
        return f"token {at} is {int(part.tokens[at])}, recorded was {int(tokens[at])}"
    wrong = np.flatnonzero(part.loss_mask != sampled)
    if len(wrong):
        at = int(wrong[0])
        says, was = ("sampled" if flags[at] else "given" for flags in (part.loss_mask, sampled))
        shifted = next((by for by in (-1, 1) if np.array_equal(np.roll(sampled, by), part.loss_mask)), 0)
        cause = f" (the mask is shifted by {shifted})" if shifted else ""
        return f"the mask says of token {at} that it was {says}, the steps say it was {was}{cause}"
    wrong = np.flatnonzero(part.behaviour_logprobs != behaviour)
    if len(wrong):
        at = int(wrong[0])
        return (
            f"token {at} has the behaviour log-probability {part.behaviour_logprobs[at]:.6f}, "
            f"recorded was {behaviour[at]:.6f}"
        )
    return ""


def _is_of(part: TrainingSequence, policy_version: int) -> bool:
    return bool((part.token_policy_version[part.loss_mask] == policy_version).all())


def _some(parts: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    places = np.unique(np.linspace(0, max(len(parts) - 1, 0), NUM_TRAJECTORIES).astype(int))
    return [parts[place] for place in places] if parts else []


def _recorded(part: TrainingSequence, *, raw: bool) -> NDArray[np.float64]:
    values = part.model_logprobs if raw else part.behaviour_logprobs
    return values[part.loss_mask].astype(np.float64)


def _gap(part: TrainingSequence, own: Scored, *, raw: bool) -> NDArray[np.float64]:
    gap: NDArray[np.float64] = np.abs(
        (own.model_logprobs if raw else own.logprobs) - _recorded(part, raw=raw)
    )
    return np.where(np.isfinite(gap), gap, np.inf)


def _largest(gap: NDArray[np.float64]) -> float:
    return float(gap.max())


def _disagreement(part: TrainingSequence, own: Scored, gap: NDArray[np.float64], *, raw: bool) -> str:
    at = int(gap.argmax())
    mine = (own.model_logprobs if raw else own.logprobs)[at]
    return (
        f"trajectory {part.trajectory_id}, segment {part.segment}, token {int(own.positions[at])} (id "
        f"{int(part.tokens[own.positions[at]])}): the learner's log-probability is {mine:.6f}, the sampler's "
        f"{_recorded(part, raw=raw)[at]:.6f}, {gap[at]:.3g} nats apart"
    )


def _cause(
    batch: UpdateBatch,
    learner: Learner,
    parts: Sequence[TrainingSequence],
    scored: Sequence[Scored],
    tolerance: float,
) -> str:
    """Return what most likely is wrong, in words."""
    used = {step.temperature for trajectory in batch.collected for step in trajectory.steps}
    if used != {learner.temperature} and learner.settings.old_logprobs == "recorded":
        return (
            f"Likely cause: the engine sampled at temperature {sorted(used)}, the learner computes at "
            f"{learner.temperature}; give both sampling.training.temperature"
        )
    recomputed = learner.settings.old_logprobs == "recomputed"
    apart = [_largest(_gap(part, own, raw=recomputed)) for part, own in zip(parts, scored, strict=True)]
    if learner.exact and max(apart) <= SELF_TEST_TOLERANCE["float32"]:
        return (
            "Both agree up to rounding, and run.deterministic promises every bit: the kernels of this machine sum otherwise than "
            "hotpot.models.exact knows; set run.self_test_tolerance to 0.001 to go on without that promise"
        )
    raw = [_gap(part, own, raw=True).mean() for part, own in zip(parts, scored, strict=True)]
    if max(raw) <= tolerance:
        return (
            "Likely cause: at temperature 1 both agree, so temperature or filters are applied on one side only "
            "(top_p, top_k, repetition_penalty need learner.old_logprobs = 'recomputed')"
        )
    return (
        "Likely cause: the engine serves other weights than the learner's (stale or another model), or computes another "
        "architecture or precision"
    )
