"""Metrics of what waits between actors and learner: how much, how stale it is, what goes, and whether long episodes lack."""

from hotpot.metrics.definition import Metric, define, define_gauge

_ISSUE = "try_cast(regexp_extract(group_id, '^g([0-9]+)$', 1) AS BIGINT)"

_ISSUED_ABOUT_THEN = f"""(
  WITH made AS (
    SELECT trajectory_id, env_version, num_steps, num_sampled_tokens, {_ISSUE} AS issue
    FROM trajectories WHERE purpose = 'training'),
  collected AS (
    SELECT u."update", u.policy_version, made.trajectory_id, made.issue
    FROM (SELECT "update", policy_version, unnest(collected_trajectories) AS trajectory_id FROM updates) u
    JOIN made USING (trajectory_id)),
  spans AS (
    SELECT "update", any_value(policy_version) AS policy_version, min(issue) AS first, max(issue) AS last
    FROM collected GROUP BY "update")
  SELECT s."update", s.policy_version, made.env_version, made.num_steps, made.num_sampled_tokens,
    (s."update", made.trajectory_id) IN (SELECT ("update", trajectory_id) FROM collected) AS collected
  FROM spans s JOIN made ON made.issue BETWEEN s.first AND s.last)"""
"""Per update, the finished trajectories of all tasks issued between the first and the last task of its batch; ``collected``
are those in it."""

_EPISODES = """(
  SELECT e.*, coalesce(t.env_version, '') AS env_version, coalesce(t.policy_version, -1) AS policy_version
  FROM (
    SELECT episode_id, any_value(group_id) AS group_id, bool_or(state = 'finished') AS finished,
      bool_or(starts_with(reason, 'cut: ')) AS cut
    FROM attempts WHERE purpose = 'training' GROUP BY episode_id HAVING bool_and(state <> 'leased')) e
  LEFT JOIN (
    SELECT group_id, min(env_version) AS env_version, min(policy_version) AS policy_version
    FROM trajectories WHERE purpose = 'training' GROUP BY group_id) t USING (group_id))"""
"""One row per training episode that ended. Its versions are those of its group's trajectories; of a group without any, the
environment's is empty and the policy's -1."""

_TOKENS = """(
  SELECT u."update", u.policy_version, s.env_version, s.length,
    u.policy_version - s.version AS staleness
  FROM (SELECT "update", policy_version, unnest(collected_trajectories) AS trajectory_id FROM updates) u
  JOIN (
    SELECT trajectory_id, env_version, unnest(span_policy_version) AS version, unnest(span_policy_length) AS length
    FROM steps) s USING (trajectory_id))"""
"""Runs of sampled tokens of what an update collected, each of one recorded policy version."""

_DISCARDED = """(
  SELECT d.trajectory_id, d.reason, d."update", d.policy_version, d.staleness, coalesce(t.env_version, '') AS env_version
  FROM discards d LEFT JOIN trajectories t USING (trajectory_id))"""
"""One row per discard; the environment's version is empty where its trajectory was deleted."""

_UPDATE_CUTS = ("update", "policy_version", "env_version")


def _bias(name: str, column: str, unit: str) -> Metric:
    return define(
        f"queue/length_bias_{name}", "updates", "ratio",
        f"Mean {unit} of the trajectories that updates collected, over the mean of all finished trajectories whose tasks "
        "were issued between the first and the last task of the same batch.",
        f"avg({column}) FILTER (WHERE collected)", f"avg({column})",
        source=_ISSUED_ABOUT_THEN, cuts=_UPDATE_CUTS,
        healthy="near 1; below it in the first updates, where short episodes come first",
        remedy="Below 0.9 for long, long episodes are discarded or cut: raise queue.max_staleness or queue.depth, lower "
        "actors.over_issue.",
    )  # fmt: skip


METRICS = (
    define_gauge(
        "queue/depth", "trajectories", "Mean trajectories that wait for the learner, when sampled.",
        "between one batch and queue.depth",
        "At queue.depth the learner is the slower one: what goes is wasted. Near 0 it waits: more actors.",
    ),
    define_gauge(
        "queue/late_batches", "batches",
        "Batches learned before they were whole, since the process began: the longest wait was over.",
        "0",
        "Raise queue.longest_wait_s, or collect faster: see rollout/trajectories_per_s.",
        largest=True,
    ),
    define_gauge(
        "queue/skipped_batches", "batches",
        "Times the longest wait was over and nothing was learned, since the process began.",
        "0",
        "As for queue/late_batches.",
        largest=True,
    ),
    _bias("steps", "num_steps", "steps"),
    _bias("tokens", "num_sampled_tokens", "sampled tokens"),
    define(
        "queue/unfinished_share", "attempts", "share",
        "Share of the training episodes that ended without a trajectory: cut, given up, or interrupted.",
        "count(*) FILTER (WHERE NOT finished)", "count(*)", source=_EPISODES, cuts=("policy_version", "env_version"),
        healthy="below over_issue / (1 + over_issue), and near 0 without",
        remedy="Group table attempts by reason: the environment breaks, or actors.over_issue cuts what it should not.",
    ),
    define(
        "queue/cut_share", "attempts", "share",
        "Share of the training episodes that ended because their group had enough without them.",
        "count(*) FILTER (WHERE cut AND NOT finished)", "count(*)", source=_EPISODES, cuts=("policy_version", "env_version"),
        healthy="up to over_issue / (1 + over_issue)",
        remedy="What is cut is what is slow: where length matters, lower actors.over_issue and watch queue/length_bias_steps.",
    ),
    define(
        "queue/staleness_mean", "updates", "policy versions",
        "Mean staleness of the sampled tokens that updates collected, by the versions on record.",
        "sum(staleness * length)", "sum(length)", source=_TOKENS, cuts=(*_UPDATE_CUTS, "staleness"),
        healthy="a few; 0 in sync",
        remedy="Lower queue.max_staleness or queue.depth, publish more often, or take a correction (learner).",
    ),
    define(
        "queue/staleness_max", "updates", "policy versions",
        "Largest staleness of a sampled token that updates collected, by the versions on record.",
        "max(staleness)", "1", source=_TOKENS, cuts=(*_UPDATE_CUTS, "staleness"),
        healthy="at most queue.max_staleness (and one for each resume)",
        remedy="Lower queue.max_staleness.",
    ),
    define(
        "queue/collected_tokens", "updates", "tokens",
        "Sampled tokens that updates collected. Cut by staleness it is their distribution.",
        "sum(length)", "1", source=_TOKENS, cuts=(*_UPDATE_CUTS, "staleness"),
        healthy="most at low staleness",
        remedy="As for queue/staleness_mean.",
    ),
    define(
        "queue/discards", "discards", "trajectories",
        "Finished trajectories that were not learned from. Cut by reason it says why.",
        "count(*)", "1", source=_DISCARDED, cuts=("update", "policy_version", "env_version", "reason"),
        healthy="a small share of what is collected",
        remedy="stale: learn faster or raise queue.max_staleness. overflow: fewer actors. surplus: lower actors.over_issue.",
    ),
    define(
        "queue/discard_share", "trajectories", "share", "Share of the finished training trajectories that were discarded.",
        "count(reason)", "count(*)", mask="purpose = 'training'",
        source="""(
  SELECT t.*, d.reason FROM trajectories t LEFT JOIN discards d USING (trajectory_id))""",
        healthy="below 0.1",
        remedy="As for queue/discards.",
    ),
)  # fmt: skip
"""The metrics of the queue."""
