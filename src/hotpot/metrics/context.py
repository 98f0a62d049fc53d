"""Metrics of the context limit: who met it, what it left out, how many windows came of it."""

from hotpot.metrics.definition import define

_TRAINING = "purpose = 'training'"

_PER_TRAJECTORY = """(
  SELECT t.*, s.changes, s.windows FROM trajectories t JOIN (
    SELECT trajectory_id, count(*) FILTER (WHERE context_change <> 'none') AS changes,
      1 + count(*) FILTER (WHERE context_change IN ('truncated', 'segmented', 'fallback')) AS windows
    FROM steps GROUP BY trajectory_id) s USING (trajectory_id))"""
"""One row per trajectory, with the steps at which the limit changed something and the windows it was shown in."""

METRICS = (
    define(
        "rollout/context_limit_share", "trajectories", "share",
        "Share of training trajectories that met the context limit: it ended them, or something was left out.",
        "count(*) FILTER (WHERE changes > 0 OR end_reason = 'max_context')", "count(*)",
        source=_PER_TRAJECTORY, mask=_TRAINING,
        healthy="below 0.1",
        remedy="Raise rollout.max_context_tokens, shorten what the tools return, or set rollout.context_overflow.",
    ),
    define(
        "rollout/context_dropped_tokens", "steps", "tokens",
        "Mean tokens by which the context limit shortened a prompt, over the training steps at which it did.",
        "sum(context_dropped_tokens)", "count(*)", mask=f"{_TRAINING} AND context_dropped_tokens > 0",
        healthy="a fraction of rollout.max_context_tokens",
        remedy="Near the whole context: one tool result fills it. Shorten what the tools return.",
    ),
    define(
        "rollout/windows_mean", "trajectories", "windows",
        "Mean windows per training trajectory: 1 + the times something was left out.",
        "sum(windows)", "count(*)", source=_PER_TRAJECTORY, mask=_TRAINING,
        healthy="exactly 1 unless rollout.context_overflow says otherwise; then far below rollout/steps_mean",
        remedy="Near rollout/steps_mean every step computes its prompt anew: raise rollout.max_context_tokens.",
    ),
    define(
        "rollout/notes_lost_share", "steps", "share",
        "Share of hand-over notes in training that were not used: cut, blank, a call, or too long for a window.",
        "count(*) FILTER (WHERE lost)", "count(*)", mask=f"{_TRAINING} AND context_change = 'handover'",
        source="""(
  SELECT *, coalesce(lead(context_change) OVER (PARTITION BY trajectory_id ORDER BY step), 'none') <> 'segmented' AS lost
  FROM steps)""",
        healthy="below 0.1",
        remedy="Raise rollout.handover_tokens, or put rollout.handover_request into words the model follows.",
    ),
    define(
        "rollout/preemptions_per_step", "steps", "preemptions",
        "Times per step that the engine took a request's memory away and computed it again later.",
        "sum(num_preemptions)", "count(*)",
        healthy="below 0.1",
        remedy="Give the engine more memory for keys and values, or lower engine.max_concurrency.",
    ),
)  # fmt: skip
"""The metrics of the context limit."""
