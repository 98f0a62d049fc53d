"""Metrics of measuring the policy on tasks that never touch an update, and of its gap to training."""

from hotpot.metrics.definition import Metric, define

_HELD_OUT = "split = 'holdout'"
_TRAINED = "purpose = 'training'"
_MEASURED = "purpose = 'evaluation' AND split = 'holdout'"


def _measured(name: str, column: str, purpose: str, unit: str, meaning: str) -> Metric:
    return define(
        f"evaluation/{name}", "evaluations", unit, meaning,
        f"sum({column} * num_tasks)", "sum(num_tasks)", mask=f"purpose = '{purpose}' AND {_HELD_OUT}",
        healthy="rising with training; no fall of more than its interval",
        remedy="Cut by update and env_version; after a fall run `hotpot lineage RUN`, then look at failed tasks with `hotpot show`.",
    )  # fmt: skip


def _gap(name: str, of: str, unit: str, what: str) -> Metric:
    return define(
        f"evaluation/{name}", "trajectories", unit,
        f"{what} of training trajectories minus that of hold-out trajectories at the recipe's sampling; "
        "null in a cut that lacks either.",
        f"avg({of}) FILTER (WHERE {_TRAINED}) - avg({of}) FILTER (WHERE {_MEASURED})", "1",
        mask=f"({_TRAINED}) OR ({_MEASURED})", without_cuts=("split", "purpose"),
        healthy="within -0.1 to 0.1 of each other, cut by policy_version",
        remedy="A growing gap is memorised tasks or an exploited reward: compare reward components on both splits.",
    )  # fmt: skip


METRICS = (
    _measured(
        "success_rate", "success_rate", "evaluation", "share",
        "Share of hold-out tasks solved at the recipe's sampling.",
    ),
    _measured(
        "success_rate_greedy", "success_rate", "evaluation_greedy", "share",
        "Share of hold-out tasks solved greedily.",
    ),
    _measured(
        "reward_mean", "reward_mean", "evaluation", "reward",
        "Mean reward on hold-out tasks at the recipe's sampling.",
    ),
    _measured(
        "reward_mean_greedy", "reward_mean", "evaluation_greedy", "reward",
        "Mean reward on hold-out tasks, greedily.",
    ),
    _measured(
        "steps_mean", "steps_mean", "evaluation", "steps",
        "Mean steps per hold-out episode at the recipe's sampling.",
    ),
    define(
        "evaluation/failed_share", "evaluations", "share",
        "Share of evaluation episodes that failed (infrastructure) and are not counted.",
        "sum(num_failed)", "sum(num_failed + num_tasks)",
        healthy="0",
        remedy="Read the reasons in attempts: `hotpot sql RUN \"select reason, count(*) from attempts group by 1\"`.",
    ),
    _gap("success_gap", "success::INT", "share", "Success rate"),
    _gap("reward_gap", "reward", "reward", "Mean reward"),
)  # fmt: skip
"""The metrics of evaluation."""
