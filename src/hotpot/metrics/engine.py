"""Metrics of the engine: how much of each prompt it did not have to compute, and what that costs in exactness."""

from hotpot.metrics.definition import CUTS, SAMPLING_CUTS, define, define_gauge

_STEPS = "(SELECT *, split_part(env_version, '@', 1) AS env FROM steps)"
"""The steps with their environment's name."""

_CUTS = (*(cut for cut in CUTS if cut != "update"), *SAMPLING_CUTS, "env", "step")

METRICS = (
    define(
        "engine/prefix_hit_share", "steps", "share",
        "Share of prompt tokens whose keys and values the engine had from earlier work: the hit rate of the prefix cache. "
        "The prompt of a step is its whole context.",
        "sum(reused_tokens)", "sum(context_tokens)", source=_STEPS, cuts=_CUTS,
        healthy="above 0.9 from the second step of an episode on; at the first, the share of a group's common prompt",
        remedy="Cut by step and env: low everywhere means that something changes the prefix (a template, a date), or that the "
        "cache is too small; low at later steps only, that a session loses its place (engine/preemptions).",
    ),
    define(
        "engine/prefill_tokens", "steps", "tokens",
        "Prompt tokens computed: those of each step's context that were not reused. What a preempted or restarted prompt "
        "cost twice is not in it.",
        "sum(context_tokens - reused_tokens)", "1", source=_STEPS, cuts=_CUTS,
        healthy="about the tokens that environments and tasks bring",
        remedy="As for engine/prefix_hit_share.",
    ),
    define(
        "engine/prefill_tokens_per_step", "steps", "tokens", "Prompt tokens computed per step.",
        "sum(context_tokens - reused_tokens)", "count(*)", source=_STEPS, cuts=_CUTS,
        healthy="from the second step on, the length of a tool's reply",
        remedy="As for engine/prefix_hit_share.",
    ),
    define_gauge(
        "engine/preemptions", "preemptions",
        "Times a request lost its place in the engine's memory and was taken up again later, in answers since the process "
        "began.",
        "0, or few beside the steps",
        "Each computes a context again: raise the engine's memory, or lower engine.max_concurrency.",
        largest=True,
    ),
    define_gauge(
        "engine/incremental_difference_max", "nats",
        "Largest |log-probability| difference between steps as the engine computed them on top of earlier ones and the same "
        "steps computed in one go by an engine that holds nothing: a few steps of the first batch of each start and resume.",
        "0 in deterministic mode, else below 0.0001",
        "Larger is no rounding: the engine reuses what it must not. See event self_test, which has the figures.",
        largest=True,
    ),
)  # fmt: skip
"""The metrics of the engine."""
