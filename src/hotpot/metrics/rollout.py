"""Metrics of collecting experience: speed, length, diversity, time per step, sampling parameters, reward."""

from hotpot.metrics.definition import SAMPLING_CUTS, define, define_gauge

_TRAINING = "purpose = 'training'"
_WALL_S = "(max(finished_us) - min(started_us)) / 1e6"

_PER_TRAJECTORY = """(
  SELECT trajectory_id, any_value(group_id) AS group_id, any_value(actor_id) AS actor_id,
    any_value(actor_group) AS actor_group, any_value(split) AS split, any_value(purpose) AS purpose,
    any_value(env_version) AS env_version, any_value(reward_version) AS reward_version,
    any_value(prompt_version) AS prompt_version, arg_min(policy_version, step) AS policy_version,
    list(sampled_tokens ORDER BY step)::VARCHAR AS sampled, arg_max(sampled_tokens, step)::VARCHAR AS last_step,
    list(coalesce(tool_name, '') ORDER BY step)::VARCHAR AS tool_path
  FROM steps GROUP BY trajectory_id)"""
"""One row per trajectory: what it sampled, what it sampled last, and the tools it called in order."""

_SPEED = (
    define(
        "rollout/trajectories_per_s", "trajectories", "trajectories per second",
        "Training trajectories finished per second of wall time between the first start and the last end in the cut. "
        "Over a whole run that time includes learning and evaluation.",
        "count(*)", _WALL_S, mask=_TRAINING,
        healthy="steady over the run; equal across actors within 20 %",
        remedy="Compare rollout/generate_s_per_step and rollout/environment_s_per_step, then cut by actor_id for a straggler.",
    ),
    define(
        "rollout/sampled_tokens_per_s", "trajectories", "tokens per second",
        "Tokens the model sampled in training per second of wall time between the first start and the last end in the cut.",
        "sum(num_sampled_tokens)", _WALL_S, mask=_TRAINING,
        healthy="steady over the run",
        remedy="Raise engine.max_concurrency or rollout.tasks_per_batch; look at engine/prefix_hit_share for the prefix cache.",
    ),
    define(
        "rollout/generate_s_per_step", "steps", "seconds",
        "Inference time per step: from the request's admission to its last token.",
        "sum(generate_s)", "count(*)",
        healthy="grows with context length only",
        remedy="Fewer requests at once, or shorter steps (rollout.max_step_tokens); check system/engine_queue_depth.",
    ),
    define(
        "rollout/queue_s_per_step", "steps", "seconds",
        "Time per step that the request waited in the engine before it was admitted.",
        "sum(queue_s)", "count(*)",
        healthy="below rollout/generate_s_per_step",
        remedy="Raise engine.max_concurrency or lower engine.admit_share.",
    ),
    define(
        "rollout/environment_s_per_step", "steps", "seconds",
        "Time per step that the environment took to answer.",
        "sum(environment_s)", "count(*)",
        healthy="far below rollout/generate_s_per_step",
        remedy="Profile the environment's tools; cut by env_version to see whether a new version is slower.",
    ),
)  # fmt: skip

_LENGTH = (
    define(
        "rollout/steps_mean", "trajectories", "steps", "Mean steps per training trajectory.",
        "sum(num_steps)", "count(*)", mask=_TRAINING,
        healthy="near what the task needs",
        remedy="If it rises to rollout.max_steps, look at trajectories with `hotpot show`: the agent is going round in circles.",
    ),
    define(
        "rollout/sampled_tokens_mean", "trajectories", "tokens", "Mean sampled tokens per training trajectory.",
        "sum(num_sampled_tokens)", "count(*)", mask=_TRAINING,
        healthy="no trend without a trend in success",
        remedy="A steady rise without success is length exploitation: look at the reward's components.",
    ),
    define(
        "rollout/tokens_mean", "trajectories", "tokens",
        "Mean tokens per training trajectory, given and sampled; tokens a rewritten history gives again count again.",
        "sum(num_prompt_tokens + num_sampled_tokens)", "count(*)", mask=_TRAINING,
        healthy="well below rollout.max_context_tokens",
        remedy="Raise rollout.max_context_tokens, or shorten what the tools return.",
    ),
    define(
        "rollout/cut_share", "trajectories", "share",
        "Share of training trajectories that a limit cut off before the agent answered.",
        "count(*) FILTER (WHERE end_reason <> 'answered')", "count(*)", mask=_TRAINING,
        healthy="below 0.1",
        remedy="Group by end_reason with `hotpot sql` and raise the limit that cuts.",
    ),
    define(
        "rollout/tool_error_share", "trajectories", "share",
        "Share of training steps that the environment answered with an error (malformed or failed call).",
        "sum(tool_errors)", "sum(num_steps)", mask=_TRAINING,
        healthy="falling",
        remedy="If it jumps, cut by env_version and prompt_version: a tool or the prompt changed.",
    ),
)  # fmt: skip

_DIVERSITY = (
    define(
        "rollout/diversity_sequences", "steps", "share",
        "Distinct sampled token sequences inside a group, as a share of its training trajectories.",
        "count(DISTINCT (group_id, sampled))", "count(*)", source=_PER_TRAJECTORY, mask=_TRAINING,
        healthy="above 0.5; falls as the policy becomes sure",
        remedy="Near 1/samples_per_task there is nothing to learn from: raise the temperature, or look for lost randomness (seed, greedy engine).",
    ),
    define(
        "rollout/diversity_tool_paths", "steps", "share",
        "Distinct sequences of tool names inside a group, as a share of its training trajectories.",
        "count(DISTINCT (group_id, tool_path))", "count(*)", source=_PER_TRAJECTORY, mask=_TRAINING,
        healthy="falls as the policy finds its way",
        remedy="If it collapses while success is low, the policy settled too early: lower learner.learning_rate.",
    ),
    define(
        "rollout/diversity_last_steps", "steps", "share",
        "Distinct last steps (the answers, as sampled) inside a group, as a share of its training trajectories.",
        "count(DISTINCT (group_id, last_step))", "count(*)", source=_PER_TRAJECTORY, mask=_TRAINING,
        healthy="falls as success rises",
        remedy="As for rollout/diversity_sequences.",
    ),
    define(
        "rollout/sampled_surprise", "steps", "nats",
        "Mean negative behaviour log-probability of sampled training tokens: an estimate of the entropy sampled from.",
        "-sum(list_sum(behaviour_logprobs))", "sum(len(sampled_tokens))", mask=_TRAINING, more_cuts=SAMPLING_CUTS,
        healthy="falls slowly; never 0 in training",
        remedy="0 means greedy sampling: cut by actor_id, engine and temperature to find who.",
    ),
)  # fmt: skip

_SAMPLING = (
    define(
        "rollout/sampling_sets", "steps", "sets",
        "Distinct sets of sampling parameters really used in training.",
        "count(DISTINCT (temperature, top_p, top_k, repetition_penalty))", "1", mask=_TRAINING, more_cuts=SAMPLING_CUTS,
        healthy="exactly 1",
        remedy="Cut rollout/sampled_steps by temperature, top_p, top_k and repetition_penalty to see which, and by actor_id to see who.",
    ),
    define(
        "rollout/sampled_steps", "steps", "steps",
        "Steps recorded. Cut by the sampling parameters it is their distribution.",
        "count(*)", "1", more_cuts=SAMPLING_CUTS,
        healthy="one set of parameters per purpose",
        remedy="As for rollout/sampling_sets.",
    ),
    define(
        "rollout/greedy_share", "steps", "share", "Share of training steps that were sampled greedily (temperature 0).",
        "count(*) FILTER (WHERE temperature = 0)", "count(*)", mask=_TRAINING, more_cuts=SAMPLING_CUTS[1:],
        healthy="0",
        remedy="Cut by actor_group and engine: one engine ignores the frozen parameters.",
    ),
    define(
        "rollout/precisions", "steps", "precisions", "Distinct pairs of engine and precision that sampled for training.",
        "count(DISTINCT (engine, precision))", "1", mask=_TRAINING, more_cuts=SAMPLING_CUTS,
        healthy="exactly 1",
        remedy="Do not mix replicas of different precision: bring them to one.",
    ),
)  # fmt: skip

_DEPARTURES = (
    define_gauge(
        "rollout/sampling_overrides", "refusals",
        "Tries to sample otherwise than frozen that were refused since the process began: requests with other parameters, "
        "and environments that ask for some.",
        "0",
        "Read the events sampling_override: they name the sender and what it asked for.",
        largest=True,
    ),
    define_gauge(
        "rollout/engine_report_differences", "answers",
        "Answers whose engine reported other sampling parameters than the frozen ones, or another precision or device than "
        "it says it has, since the process began; refused or, with rollout.engine_report_differs = 'record', taken.",
        "0",
        "Read the events engine_report_differs, then mend the engine's defaults (a server's own temperature, its dtype).",
        largest=True,
    ),
)  # fmt: skip

_REWARD = (
    define(
        "rollout/reward_mean", "trajectories", "reward", "Mean reward of training trajectories.",
        "sum(reward)", "count(*)", mask=_TRAINING,
        healthy="rising",
        remedy="After a jump run `hotpot lineage RUN`: did a version change with it?",
    ),
    define(
        "rollout/reward_variance", "trajectories", "reward squared",
        "Population variance of the reward of training trajectories.",
        "var_pop(reward)", "1", mask=_TRAINING,
        healthy="above 0",
        remedy="0 means no signal: every trajectory has the same reward; make tasks easier or harder.",
    ),
    define(
        "rollout/success_rate", "trajectories", "share", "Share of training trajectories that solved their task.",
        "count(*) FILTER (WHERE success)", "count(*)", mask=_TRAINING,
        healthy="rising with evaluation/success_rate",
        remedy="If the hold-out does not follow, see evaluation/success_gap.",
    ),
    define(
        "rollout/segments_mean", "trajectories", "segments",
        "Mean segments per training trajectory: 1 + the times a template rewrote history or the context limit did.",
        "sum(num_segments)", "count(*)", mask=_TRAINING,
        healthy="exactly 1 unless windows are asked for (rollout.context_overflow)",
        remedy="Above rollout/windows_mean the chat template rewrites history: use one that only appends.",
    ),
)  # fmt: skip

METRICS = (*_SPEED, *_LENGTH, *_DIVERSITY, *_SAMPLING, *_DEPARTURES, *_REWARD)
"""The metrics of collecting experience."""
