"""How episodes are collected and measured: rollout, sampling, engine, evaluation."""

from typing import Annotated, Literal

from pydantic import Field

from hotpot.config.sections.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from hotpot.types import SamplingParams


class RolloutSection(Section):
    """How episodes are collected."""

    tasks_per_batch: PositiveInt = 16
    """Tasks issued for one update."""
    samples_per_task: PositiveInt = 8
    """Episodes of each issued task; they form one group."""
    max_steps: PositiveInt = 8
    """Model calls in an episode (requests for a hand-over note apart), then it ends with max_steps."""
    max_step_tokens: PositiveInt = 48
    """Tokens sampled in one step, then the episode ends with max_step_tokens."""
    max_context_tokens: PositiveInt = 512
    """Tokens of an episode's context, prompt and output; what happens where it is full says context_overflow."""
    context_overflow: Literal["end", "truncate", "segment"] = "end"
    """What happens where the next prompt does not fit. ``end``: the episode ends with max_context. ``truncate``: as soon
    as less room than max_step_tokens is left, the oldest exchanges (an output and what the environment answered) are left
    out of the prompt, a marker in their place. ``segment``: the model is asked for a note first, which stands for all but
    the newest exchange from then on. Where nothing helps the episode ends with max_context."""
    handover_tokens: PositiveInt = 96
    """Longest note that is handed over to the next window (``segment``), in tokens; a longer one is cut, and not used."""
    handover_request: Annotated[str, Field(min_length=1)] = (
        "The context is full. Write a note for yourself: what is known, what is left to do. Answer with the note only."
    )
    """What the model is told where it is to write that note (``segment``), as a user's message."""
    max_seconds: PositiveFloat = 60.0
    """Time of an episode (its environment's, and the engine's while its request is out), then it ends with max_seconds
    and is not learned from. Not applied in deterministic mode."""
    max_attempts: PositiveInt = 3
    """Tries at an episode whose environment fails, each in a fresh environment; then it is dropped and counted."""
    engine_report_differs: Literal["refuse", "record"] = "refuse"
    """Where an engine reports other sampling parameters than the frozen ones, or another precision or device than it says
    it has: ``refuse`` fails the attempt (and tries again) before its answer reaches the environment; ``record`` goes on.
    It is counted in both, and table steps has what was reported."""
    refill: Literal["none", "until_signal"] = "none"
    """``until_signal``: further tasks are run for groups whose rewards are all (almost) the same, within the update,
    until tasks_per_batch groups have signal (dynamic sampling as in DAPO, arXiv:2503.14476). The others are stored and
    counted as always."""
    max_refill_rounds: PositiveInt = 3
    """Rounds of refilling in one update; then it learns from what it has."""


class SamplingSettings(Section):
    """One frozen set of sampling parameters."""

    temperature: NonNegativeFloat = 1.0
    """Temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass; 1 is off."""
    top_k: NonNegativeInt = 0
    """Top-k; 0 is off."""
    repetition_penalty: PositiveFloat = 1.0
    """Repetition penalty; 1 is off."""

    def params(self) -> SamplingParams:
        """Return the frozen record the engine is given."""
        return SamplingParams(**self.model_dump())


class SamplingSection(Section):
    """Sampling parameters, frozen per purpose for the whole run."""

    training: SamplingSettings = SamplingSettings()
    """For the episodes that are trained on."""
    evaluation: SamplingSettings = SamplingSettings()
    """For hold-out evaluation (greedy evaluation is separate and always greedy)."""


class EngineSection(Section):
    """The inference engine."""

    kind: Literal["embedded"] = "embedded"
    """Which engine; ``embedded`` runs in the process."""
    max_concurrency: PositiveInt = 128
    """Requests that run at once, as far as there is memory for their keys and values."""
    kv_cache_bytes: PositiveInt = 1 << 30
    """Memory for keys and values, never exceeded. Where it is used up, finished requests' are forgotten first, then the
    request that began last waits and goes on later."""
    admit_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Waiting requests are prefilled together once they are this share of all requests in the engine, or nothing runs."""
    prefill_tokens: PositiveInt = 2048
    """Largest padded size of one prefill pass, in tokens; longer prompts are computed in pieces of this size."""


class EvaluationSection(Section):
    """Measuring the policy on tasks that never touch an update."""

    every_updates: NonNegativeInt = 20
    """Updates between scheduled evaluations; 0 is off."""
    num_tasks: PositiveInt = 128
    """Hold-out tasks in a scheduled evaluation."""
    num_tasks_final: PositiveInt = 512
    """Hold-out tasks in the evaluations before and after."""
    greedy: bool = True
    """Evaluate greedily too, on the same tasks."""
