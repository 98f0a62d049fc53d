"""Metrics of the machine and of where the time goes: process gauges, and shares of an update's wall time."""

from hotpot.metrics.definition import Metric, define, define_gauge

_UPDATE_S = "sum(finished_us - started_us) / 1e6"


def _share(name: str, column: str, meaning: str, healthy: str, remedy: str) -> Metric:
    return define(
        f"system/{name}", "updates", "share", meaning, f"sum({column})", _UPDATE_S, healthy=healthy, remedy=remedy
    )  # fmt: skip


def _gauge(name: str, unit: str, meaning: str, healthy: str, remedy: str, *, largest: bool = False) -> Metric:
    return define_gauge(f"system/{name}", unit, meaning, healthy, remedy, largest=largest)


_GAUGES = (
    _gauge(
        "memory_rss_bytes", "bytes", "Largest resident memory of the process among the samples taken.",
        "flat after the first updates",
        "If it climbs, look for what is kept per trajectory; lower engine.max_concurrency and learner.micro_batch_tokens.",
        largest=True,
    ),
    _gauge(
        "processor_idle_share", "share",
        "Mean share of the processor time open to the process that it did not use.",
        "below 0.5 on a machine of one's own",
        "Raise run.threads, or collect and learn side by side.",
    ),
    _gauge(
        "num_threads", "threads", "Mean number of threads of the process.",
        "constant",
        "If it climbs, something starts threads and never ends them.",
    ),
    _gauge(
        "gpu_memory_bytes", "bytes", "Largest GPU memory in use among the samples taken; no rows without a GPU.",
        "below nine tenths of the GPU's",
        "Lower engine.max_concurrency or learner.micro_batch_tokens.",
        largest=True,
    ),
    _gauge(
        "gpu_utilisation", "share", "Mean GPU utilisation; no rows without a GPU.",
        "above 0.5",
        "Larger batches; check system/environment_share.",
    ),
    _gauge(
        "engine_queue_depth", "requests", "Mean requests in the engine, waiting and running, over its steps since the sample before.",
        "around engine.max_concurrency while generating",
        "Too low: collect more episodes at once. Far above: raise engine.max_concurrency.",
    ),
    _gauge(
        "experience_backlog", "segments", "Mean log segments not yet archived in the lake, when sampled.",
        "a few; returns to 0",
        "If it climbs, the archive is slower than the log: a slow disk, or store.archive_every_batches too small.",
    ),
    _gauge(
        "failed_attempts", "attempts", "Tries at an episode whose environment broke, since the process began.",
        "0",
        "Read the reasons: select reason, count(*) from attempts where state = 'failed' group by 1.",
        largest=True,
    ),
    _gauge(
        "dropped_episodes", "episodes", "Episodes given up after all their tries, since the process began.",
        "0",
        "The environment fails again and again: mend it before training on what is left.",
        largest=True,
    ),
    _gauge(
        "quarantined_trajectories", "trajectories", "Trajectories the gate refused, since the process began.",
        "0",
        "Read table quarantine: each has the rule it broke and its payload.",
        largest=True,
    ),
    _gauge(
        "close_failures", "environments", "Environments that could not be closed, since the process began.",
        "0",
        "They may hold on to what they reserved; mend their close.",
        largest=True,
    ),
    _gauge(
        "redactions", "secrets", "Secrets replaced in what environments said, since the process began.",
        "0",
        "A tool shows secrets: take them out at the source.",
        largest=True,
    ),
)  # fmt: skip

_TIME = (
    define(
        "system/publish_s", "updates", "seconds",
        "Publish delay: mean wall time per update from the learned weights to the engine serving them.",
        "sum(publish_s)", "count(*)",
        healthy="far below system/update_s",
        remedy="Publish less often, or to fewer engines at once.",
    ),
    define(
        "system/update_s", "updates", "seconds", "Mean wall time of an update, from its first episode to its publish.",
        _UPDATE_S, "count(*)",
        healthy="steady",
        remedy="See the shares below for which part grew.",
    ),
    define(
        "system/tokens_per_s", "updates", "tokens per second",
        "Tokens of all trajectories collected, given and sampled, per second of the updates' wall time.",
        "sum(num_collected_tokens)", _UPDATE_S,
        healthy="steady",
        remedy="See the shares below for which part grew, and rollout/sampled_tokens_per_s.",
    ),
    define(
        "system/learner_idle_share", "updates", "share",
        "Share of an update's wall time in which the learner did not learn.",
        f"{_UPDATE_S} - sum(learn_s)", _UPDATE_S,
        healthy="0.5 to 0.8 in sync, where it waits for the rollout; below 0.2 elsewhere",
        remedy="Speed up generation, or use a topology in which the learner does not wait.",
    ),
    _share(
        "generate_share", "generate_s", "Share of an update's wall time in generation.",
        "half to four fifths", "Raise engine.max_concurrency; see engine/prefix_hit_share.",
    ),
    _share(
        "environment_share", "environment_s", "Share of an update's wall time in environments and rendering.",
        "below 0.1", "See rollout/environment_s_per_step.",
    ),
    _share(
        "store_share", "store_s", "Share of an update's wall time in gate, log and ledger.",
        "below 0.05", "See system/experience_backlog; a slow fsync is a slow disk.",
    ),
    _share(
        "learn_share", "learn_s", "Share of an update's wall time in learning.",
        "0.2 to 0.5 in sync", "See learn/tokens_per_s and learn/padding_share.",
    ),
)  # fmt: skip

METRICS = (*_GAUGES, *_TIME)
"""The metrics of the machine and of time."""
