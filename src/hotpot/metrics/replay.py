"""Metrics of what is learned again: how much of a batch was drawn from hot and cold, how it is weighed, how old it is."""

from hotpot.metrics.definition import Metric, define

_REPLAYED = """(
  SELECT l.trajectory_id, l."update", any_value(l.weight) AS weight, any_value(l.policy_version) AS policy_version,
    any_value(l.env_version) AS env_version, any_value(l.reward_version) AS reward_version,
    any_value(l.prompt_version) AS prompt_version, any_value(u.policy_version - l.policy_version) AS staleness
  FROM learned_tokens l JOIN updates u ON u."update" = l."update"
  JOIN consumptions c ON c."update" = l."update" AND c.trajectory_id = l.trajectory_id
  WHERE c.source IN ('hot', 'cold')
  GROUP BY l.trajectory_id, l."update")"""
"""One row per use of a trajectory that came from hot or cold; its policy version is the one that sampled it."""


def _per_use(name: str, column: str, unit: str, meaning: str, healthy: str, remedy: str) -> Metric:
    return define(
        f"replay/{name}", "learned_tokens", unit, meaning, f"sum({column})", "count(*)",
        source=_REPLAYED, healthy=healthy, remedy=remedy,
    )  # fmt: skip


METRICS = (
    define(
        "replay/share", "updates", "share",
        "Share of the trajectories in the loss that were drawn from hot or cold.",
        "sum(num_replayed)", "sum(num_trajectories)",
        healthy="around replay.share; above it where many collected groups have no signal",
        remedy="Lower replay.share where it crowds out what was just collected.",
    ),
    _per_use(
        "weight_mean", "weight", "weight", "Mean loss weight of replayed trajectories, over their uses.",
        "near 1",
        "Lower replay.importance_exponent or replay.positive_weight: the weights fight the choice.",
    ),
    _per_use(
        "staleness_mean", "staleness", "policy versions",
        "Mean policy versions between sampling a replayed trajectory and learning it again, over their uses.",
        "a few for hot; below 100 while learn/overlap holds",
        "Lower replay.max_staleness_updates or replay.hot_rounds, or raise replay.hot_share.",
    ),
    define(
        "replay/uses_mean", "learned_tokens", "uses",
        "Mean number of uses of a trajectory that was replayed at least once, its fresh use apart.",
        "count(*)", "count(DISTINCT trajectory_id)", source=_REPLAYED,
        healthy="below 5",
        remedy="Few trajectories are learned again and again: raise replay.hot_rounds or lower replay.share.",
    ),
)  # fmt: skip
"""The metrics of replay."""
