"""Metrics of learning: loss terms, KL, overlap, gradient, speed, staleness, what was skipped.

Means over loss tokens are weighted by each update's loss tokens, means over optimiser steps by its steps, so that a
value over many updates is the value over all their tokens or steps.
"""

from hotpot.metrics.definition import Metric, define

_WALL_S = "(max(finished_us) - min(started_us)) / 1e6"


def _per_loss_token(name: str, column: str, unit: str, meaning: str, healthy: str, remedy: str) -> Metric:
    """Return a mean over the loss tokens of all updates; null where the column is null everywhere."""
    given = f"FILTER (WHERE {column} IS NOT NULL)"
    return define(
        name, "updates", unit, meaning,
        f"sum({column} * num_loss_tokens) {given}", f"sum(num_loss_tokens) {given}",
        mask="optimizer_steps > 0", healthy=healthy, remedy=remedy,
    )  # fmt: skip


def _per_optimizer_step(name: str, column: str, unit: str, meaning: str, healthy: str, remedy: str) -> Metric:
    """Return a mean over the optimiser steps of all updates."""
    return define(
        name, "updates", unit, meaning, f"sum({column} * optimizer_steps)", "sum(optimizer_steps)",
        mask="optimizer_steps > 0", healthy=healthy, remedy=remedy,
    )  # fmt: skip


_FOUND_WRONG = """(
  SELECT e.kind, e."update", e.policy_version, u.env_version, u.reward_version, u.prompt_version
  FROM events e LEFT JOIN updates u ON u."update" = e."update"
  WHERE e.kind IN ('non_finite', 'exploding'))"""
"""One row per optimiser step that was found wrong, with the versions in the update's batch."""


def _found_wrong(name: str, kind: str, meaning: str, healthy: str, remedy: str) -> Metric:
    return define(
        f"learn/{name}", "events", "steps", meaning, "count(*)", "1", mask=f"kind = '{kind}'",
        source=_FOUND_WRONG, cuts=("update", "policy_version", "env_version", "reward_version", "prompt_version"),
        healthy=healthy, remedy=remedy,
    )  # fmt: skip


_LOSS = (
    _per_optimizer_step(
        "learn/loss", "loss", "nats", "Mean loss over optimiser steps, all terms.",
        "near 0 in policy gradients; its level says little",
        "If it is not finite, see learn/skipped_share and the trajectories named in updates.skipped_trajectories.",
    ),
    _per_optimizer_step(
        "learn/policy_loss", "policy_loss", "nats", "Mean policy term of the loss over optimiser steps.",
        "small, either sign",
        "Large values mean large advantages or ratios: see learn/advantage_std and learn/clip_fraction.",
    ),
    _per_optimizer_step(
        "learn/kl_loss", "kl_loss", "nats", "Mean KL term of the loss over optimiser steps, coefficient applied.",
        "below the policy term; 0 where learner.kl_coefficient = 0",
        "Lower learner.kl_coefficient if it dominates.",
    ),
    _per_optimizer_step(
        "learn/entropy_loss", "entropy_loss", "nats",
        "Mean entropy term of the loss over optimiser steps, coefficient applied (negative: a bonus).",
        "small and negative; 0 where learner.entropy_coefficient = 0",
        "Lower learner.entropy_coefficient if it dominates.",
    ),
    _per_optimizer_step(
        "learn/grad_norm", "grad_norm", "norm", "Mean gradient norm before clipping over optimiser steps.",
        "steady; around learner.max_grad_norm or below",
        "If it climbs, lower learner.learning_rate; if it jumps, look at learn/logprob_difference_max and huge rewards.",
    ),
    define(
        "learn/grad_norm_max", "updates", "norm", "Largest gradient norm before clipping of any optimiser step.",
        "max(list_max(grad_norms))", "1",
        healthy="within ten times learn/grad_norm",
        remedy="Cut by update to find it, then read that update's trajectories in learned_tokens.",
    ),
)  # fmt: skip

_POLICY = (
    _per_loss_token(
        "learn/approx_kl", "approx_kl", "nats",
        "Mean k3 estimate of KL(old || new) over loss tokens: how far an update moves the policy.",
        "below 0.05",
        "Lower learner.learning_rate or learner.epochs.",
    ),
    _per_loss_token(
        "learn/reference_kl", "reference_kl", "nats",
        "Mean k3 estimate of KL(new || reference) over loss tokens; null where there is no reference.",
        "rises slowly",
        "If it runs away while hold-out success does not rise, raise learner.kl_coefficient: the reward may be exploited.",
    ),
    _per_loss_token(
        "learn/overlap", "overlap", "share",
        "Mean overlap of old and new policy at sampled tokens: mean of min(1, ratio).",
        "above 0.9",
        "Lower learner.learning_rate, learner.epochs or the staleness.",
    ),
    _per_loss_token(
        "learn/ratio_mean", "ratio_mean", "ratio", "Mean importance ratio new/old over loss tokens.",
        "0.95 to 1.05",
        "Away from 1 the old log-probabilities are not the sampler's: see learn/logprob_difference_mean.",
    ),
    _per_loss_token(
        "learn/clip_fraction", "clip_fraction", "share", "Share of loss tokens whose ratio was clipped.",
        "below 0.2",
        "Lower learner.learning_rate or learner.epochs, or raise learner.minibatches with care.",
    ),
    _per_loss_token(
        "learn/entropy", "entropy", "nats", "Mean entropy of the policy's distribution at the training temperature over loss tokens.",
        "falls slowly",
        "A fast fall is a collapse: lower learner.learning_rate, raise the temperature.",
    ),
    _per_loss_token(
        "learn/explained_variance", "explained_variance", "share",
        "Explained variance of the value function over loss tokens; null where there is no critic.",
        "above 0 and rising",
        "At or below 0 the critic is worse than a constant: raise its learning rate, check its mask.",
    ),
    _per_loss_token(
        "learn/advantage_mean", "advantage_mean", "reward", "Mean advantage over loss tokens.",
        "near 0",
        "Away from 0 long and short trajectories differ in reward; see learner.aggregation.",
    ),
    _per_loss_token(
        "learn/advantage_std", "advantage_std", "reward",
        "Standard deviation of the advantage over loss tokens, averaged over updates by their loss tokens.",
        "above 0",
        "0 means no signal: see learn/kept_group_share.",
    ),
)  # fmt: skip

_TRUST = (
    _per_loss_token(
        "learn/logprob_difference_mean", "logprob_difference_mean", "nats",
        "Mean |learner - sampler| log-probability at the sampling weights (first pass).",
        "below 1e-5 in float32",
        "Engine and learner compute different things: precision, template, positions. Stop and look.",
    ),
    define(
        "learn/logprob_difference_max", "updates", "nats",
        "Largest |learner - sampler| log-probability at the sampling weights (first pass).",
        "max(logprob_difference_max)", "1",
        healthy="below 1e-4 in float32",
        remedy="As for learn/logprob_difference_mean; a rising trend is an alarm even at learning rate 0.",
    ),
    _per_loss_token(
        "learn/staleness_mean", "staleness_mean", "policy versions", "Mean staleness over the loss tokens that were not replayed.",
        "0 in sync",
        "Publish more often, or lower the queue's depth.",
    ),
    define(
        "learn/staleness_max", "updates", "policy versions", "Largest staleness of any loss token that was not replayed.",
        "max(staleness_max)", "1",
        healthy="0 in sync; at most the bound elsewhere",
        remedy="Lower the staleness bound.",
    ),
    define(
        "learn/skipped_share", "updates", "share",
        "Share of optimiser steps skipped for a non-finite loss or gradient, or an exploding one.",
        "sum(skipped_steps)", "sum(skipped_steps + optimizer_steps)",
        healthy="0",
        remedy="updates.skipped_trajectories names the trajectories; look at their log-probabilities with `hotpot show`.",
    ),
    define(
        "learn/skipped_steps", "updates", "steps",
        "Optimiser steps skipped for a non-finite loss or gradient, or an exploding one.",
        "sum(skipped_steps)", "1",
        healthy="0",
        remedy="As for learn/skipped_share.",
    ),
    _found_wrong(
        "non_finite_steps", "non_finite",
        "Optimiser steps with a non-finite loss or gradient; each has an event that names tokens or trajectories.",
        "0",
        "Read the event's detail and its file of evidence: select detail from events where kind = 'non_finite'.",
    ),
    _found_wrong(
        "exploding_steps", "exploding",
        "Optimiser steps whose gradient norm was above learner.max_grad_norm_ratio times its running median.",
        "0, or rare",
        "Read the event's detail: it names the trajectories with the largest gradients. Lower learner.learning_rate, or set learner.skip_exploding.",
    ),
    define(
        "learn/no_signal_share", "groups", "share",
        "Share of groups whose rewards were all (almost) the same, or of fewer than two members; those that a refill "
        "replaced are among them.",
        "count(*) FILTER (WHERE NOT kept)", "count(*)",
        healthy="below 0.7",
        remedy="Cut by env_version to see whose tasks are too easy or too hard; set tasks.pools, or rollout.refill.",
    ),
    define(
        "learn/kept_group_share", "updates", "share",
        "Share of collected groups that entered the loss (equal-reward groups carry no signal).",
        "sum(num_groups_kept)", "sum(num_groups)",
        healthy="above 0.3",
        remedy="Tasks are too easy or too hard for the policy, or rollout.samples_per_task is too small.",
    ),
)  # fmt: skip

_SPEED = (
    define(
        "learn/updates_per_s", "updates", "updates per second",
        "Updates per second of wall time between the first start and the last end in the cut.",
        "count(*)", _WALL_S,
        healthy="steady",
        remedy="Compare system/generate_share and system/learner_idle_share to see which half is slow.",
    ),
    define(
        "learn/tokens_per_s", "updates", "tokens per second",
        "Tokens learned from, given and sampled, per second spent learning; each pass over them counts.",
        "sum(num_tokens * epochs)", "sum(learn_s)",
        healthy="steady",
        remedy="See learn/padding_share and learner.micro_batch_tokens.",
    ),
    define(
        "learn/padding_share", "updates", "share", "Padding computed, as a share of it and the batch's tokens together.",
        "sum(num_padding_tokens)", "sum(num_padding_tokens + num_tokens)",
        healthy="below 0.2",
        remedy="Raise learner.micro_batch_tokens, so that lengths pack better.",
    ),
)  # fmt: skip

METRICS = (*_LOSS, *_POLICY, *_TRUST, *_SPEED)
"""The metrics of learning."""
