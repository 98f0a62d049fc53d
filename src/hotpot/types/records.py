"""The rows of the lake's tables. Each field is a column: its type, meaning and unit live here and nowhere else.

The Arrow schemas, the metadata in the files, the gate's checks and ``docs/tables.md`` are derived from these classes.
Type rules: ``int`` is int64, ``float`` float64, ``str`` string, ``bool`` bool; ``NDArray[np.int32]`` and
``NDArray[np.float32]`` and ``NDArray[np.float64]`` and ``NDArray[np.int64]`` are lists of that type; ``tuple[str, ...]``,
``tuple[int, ...]`` and ``tuple[float, ...]`` are lists; ``X | None`` is a nullable column, all others hold no null.
Times are integer microseconds since the Unix epoch (``_us``), durations are float seconds (``_s``).
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION = 6
"""Version of everything in this module. It grows by one with every change of a column that has landed."""


def column(meaning: str, *, unit: str = "") -> Any:
    """Declare a column with its meaning and unit; both travel in the table's own metadata."""
    return field(metadata={"meaning": meaning, "unit": unit})


class DiscardReason(StrEnum):
    """Why a finished trajectory is never learned from as fresh experience."""

    OVERFLOW_OLDEST = "overflow_oldest"
    """The queue was full, and its group had waited longest."""
    OVERFLOW_NEWEST = "overflow_newest"
    """The queue was full when its group came."""
    STALE = "stale"
    """Its oldest token was further behind the learner than the bound."""
    SURPLUS = "surplus"
    """It finished when its group had enough."""
    NOT_LEARNABLE = "not_learnable"
    """Nothing of its batch could be learned from: all were cut by rollout.max_seconds."""
    SETTINGS_CHANGED = "settings_changed"
    """It waited when the run was resumed under other settings of what is collected."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRow:
    """Table ``steps``: one model call and what the environment returned for it.

    The tokens of a trajectory are, step by step, ``prompt_tokens`` then ``sampled_tokens``: nothing is stored twice.
    ``span_stage``/``span_length`` cover exactly those tokens in that order.
    """

    run_id: str = column("Run that recorded the step")
    trajectory_id: str = column("Trajectory the step belongs to")
    episode_id: str = column("Episode the trajectory belongs to")
    group_id: str = column("Episodes of one issued task that share a baseline")
    attempt_id: str = column("Try at the episode, on the ledger")
    task_id: str = column("Content hash of the task")
    split: str = column("Split of the task: train or holdout")
    purpose: str = column("Why the episode ran: training, evaluation or evaluation_greedy")
    actor_id: str = column("Actor that ran the episode")
    actor_group: str = column("Actor group (actors that share an engine)")
    turn: int = column("Turn inside the trajectory, from 0")
    step: int = column("Step inside the trajectory, from 0; counts on across turns")
    segment: int = column("Grows by one where the rendered prompt did not extend the recorded tokens, from 0")
    prompt_tokens: NDArray[np.int32] = column(
        "Tokens given to the model since the last sampled token", unit="token ids"
    )
    sampled_tokens: NDArray[np.int32] = column(
        "Tokens the model sampled; the loss falls on these only", unit="token ids"
    )
    behaviour_logprobs: NDArray[np.float32] = column(
        "Log-probability of each sampled token under the distribution it was sampled from", unit="nats"
    )
    model_logprobs: NDArray[np.float32] = column(
        "Log-probability of each sampled token under the raw model at temperature 1, unfiltered", unit="nats"
    )
    span_stage: tuple[str, ...] = column("Stage of each span over prompt_tokens then sampled_tokens")
    span_length: tuple[int, ...] = column("Length of each span", unit="tokens")
    context_tokens: int = column("Length of the whole context the model saw before sampling", unit="tokens")
    prefix_hash: str = column(
        "Hash chained over the token chunks on record up to and with prompt_tokens, within the segment"
    )
    context_change: str = column(
        "What the context limit did to this step's prompt: none, truncated, handover (the step writes the note), segmented, "
        "fallback (truncated for want of a note)"
    )
    context_dropped_tokens: int = column(
        "Tokens by which the prompt is shorter than the whole conversation would have been; 0 where nothing was left out",
        unit="tokens",
    )
    reward: float = column("Sum of the reward components of the step", unit="reward")
    reward_names: tuple[str, ...] = column("Name of each reward component of the step")
    reward_values: tuple[float, ...] = column("Value of each reward component of the step", unit="reward")
    tool_name: str | None = column("Tool the model called, if it called one")
    tool_error: bool = column("Whether the environment answered with an error (malformed or failed call)")
    finish: str = column("Why the generation ended: stop, max_tokens, max_context")
    env_version: str = column("Version of the environment: name@declared+fingerprint~perturbation")
    reward_version: str = column("Version of the reward function")
    prompt_version: str = column("Version of the prompt template: system prompt, chat template, tokenizer")
    policy_version: int = column("Policy version that sampled the first token")
    schema_version: int = column("Version of this schema")
    policy_checksum: str = column("Checksum of the weights that sampled the first token")
    span_policy_version: tuple[int, ...] = column(
        "Policy version of each run of sampled tokens (weights may change in flight)"
    )
    span_policy_length: tuple[int, ...] = column("Length of each run of sampled tokens", unit="tokens")
    temperature: float = column("Sampling temperature really used; 0 is greedy")
    top_p: float = column("Nucleus mass really used; 1 is off")
    top_k: int = column("Top-k really used; 0 is off")
    repetition_penalty: float = column("Repetition penalty really used; 1 is off")
    seed: int = column(
        "Seed in the sampling key: the run's for training, for evaluations a hash of it and the purpose; with issue, "
        "sample and step it fixes every random number"
    )
    issue: int = column("How many times the task sampler had issued a task before this one")
    sample: int = column("Sample of the issued task")
    engine: str = column("Engine that sampled, as it names itself")
    precision: str = column("Precision the engine computed in")
    device: str = column("Device the engine computed on")
    num_threads: int = column("Threads the engine computed with")
    reused_tokens: int = column("Context tokens the engine did not compute again", unit="tokens")
    num_preemptions: int = column(
        "Times the engine took the request's memory away and went on later", unit="preemptions"
    )
    started_us: int = column("When the step's prompt was ready", unit="microseconds since the epoch")
    generated_us: int = column("When the model's output was complete", unit="microseconds since the epoch")
    finished_us: int = column("When the environment had answered", unit="microseconds since the epoch")
    queue_s: float = column("Time the request waited in the engine", unit="seconds")
    generate_s: float = column("Time from admission to the last token", unit="seconds")
    environment_s: float = column("Time the environment took to answer", unit="seconds")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryRow:
    """Table ``trajectories``: what one agent did in one episode, summed up."""

    run_id: str = column("Run that recorded the trajectory")
    trajectory_id: str = column("Id, unique inside the run")
    episode_id: str = column("Episode")
    group_id: str = column("Group")
    attempt_id: str = column("Attempt on the ledger")
    task_id: str = column("Content hash of the task")
    task_content: str = column("The task as canonical JSON")
    env: str = column("Environment's name")
    split: str = column("Split of the task: train or holdout")
    purpose: str = column("Why the episode ran")
    evaluation: int | None = column("Number of the evaluation it belongs to, if any")
    actor_id: str = column("Actor that ran the episode")
    actor_group: str = column("Actor group")
    parent_trajectory_id: str | None = column("Trajectory this one forked from, if any")
    fork_step: int | None = column("Step of the parent at which it forked")
    num_turns: int = column("Turns", unit="turns")
    num_steps: int = column("Steps", unit="steps")
    num_segments: int = column(
        "Segments: 1 + the times a prompt did not extend the recorded tokens (a template rewrote history, or the context "
        "limit did)",
        unit="segments",
    )
    num_prompt_tokens: int = column("Tokens given to the model", unit="tokens")
    num_sampled_tokens: int = column("Tokens the model sampled", unit="tokens")
    reward: float = column("Sum of all reward components of all steps", unit="reward")
    reward_names: tuple[str, ...] = column("Reward components, in order of first appearance")
    reward_values: tuple[float, ...] = column("Sum of each reward component over the steps", unit="reward")
    success: bool = column("The environment's verdict; false where the episode was cut by a limit")
    end_reason: str = column("Why the episode ended: answered or the limit that cut it")
    tool_errors: int = column("Steps answered with an error", unit="steps")
    env_version: str = column("Version of the environment")
    reward_version: str = column("Version of the reward function")
    prompt_version: str = column("Version of the prompt template")
    policy_version: int = column("Policy version that sampled the first token")
    schema_version: int = column("Version of this schema")
    started_us: int = column("Start of the episode", unit="microseconds since the epoch")
    finished_us: int = column("End of the episode", unit="microseconds since the epoch")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """A finished trajectory as it crosses from rollout to experience: its summary and its steps, in order."""

    row: TrajectoryRow
    steps: tuple[StepRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupRow:
    """Table ``groups``: the episodes of one issued task that shared a baseline in one update."""

    run_id: str = column("Run")
    group_id: str = column("Group")
    task_id: str = column("Content hash of the task")
    update: int = column("Update that used the group")
    size: int = column("Trajectories in the group", unit="trajectories")
    reward_mean: float = column("Mean reward over the group", unit="reward")
    reward_std: float = column("Population standard deviation of the reward over the group", unit="reward")
    kept: bool = column(
        "Whether the group entered the loss (equal-reward groups carry no signal and are dropped)"
    )
    reason: str = column("Why it was not kept; empty where it was")
    env_version: str = column("Version of the environment")
    reward_version: str = column("Version of the reward function")
    prompt_version: str = column("Version of the prompt template")
    policy_version: int = column("Oldest policy version in the group")
    schema_version: int = column("Version of this schema")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateRow:
    """Table ``updates``: one batch learned. Means are over loss tokens unless the column says otherwise."""

    run_id: str = column("Run")
    update: int = column("Number of the update, from 1; never reused")
    parent_update: int = column("Update whose weights this one started from; 0 is the starting model")
    policy_version: int = column("Policy version the update started from")
    new_policy_version: int = column("Policy version published after it")
    batch_hash: str = column(
        "Hash over the batch's tokens, masks, log-probabilities and advantages, in order"
    )
    num_groups: int = column("Groups collected", unit="groups")
    num_groups_kept: int = column("Groups with signal", unit="groups")
    num_trajectories: int = column("Trajectories in the loss", unit="trajectories")
    num_tokens: int = column("Tokens in the batch, given and sampled, padding apart", unit="tokens")
    num_collected_tokens: int = column(
        "Tokens of all trajectories collected for the update, given and sampled", unit="tokens"
    )
    num_loss_tokens: int = column("Sampled tokens the loss fell on", unit="tokens")
    num_padding_tokens: int = column("Padding computed", unit="tokens")
    num_shared_tokens: int = column(
        "Tokens not computed again in a pass because rows of it share them as a prefix", unit="tokens"
    )
    num_replayed: int = column("Trajectories in the loss that came from hot or cold", unit="trajectories")
    collected_trajectories: tuple[str, ...] = column(
        "Trajectories collected for the update, in the order they were stored; those with end_reason max_seconds were not "
        "learned from"
    )
    drawn_trajectories: tuple[str, ...] = column("Trajectories that replay drew beside them, in order")
    drawn_sources: tuple[str, ...] = column("Where each drawn trajectory came from: hot or cold")
    drawn_weights: NDArray[np.float64] = column("Weight of each drawn trajectory's tokens in the loss")
    peer_trajectories: tuple[str, ...] = column(
        "Members of drawn trajectories' groups that were not in the batch but counted in their baselines"
    )
    epochs: int = column("Passes over the batch", unit="epochs")
    optimizer_steps: int = column(
        "Optimiser steps taken, those in which only the critic learned left out", unit="steps"
    )
    critic_steps: int = column(
        "Optimiser steps taken in which only the critic learned, behind the others", unit="steps"
    )
    skipped_steps: int = column(
        "Optimiser steps skipped for a non-finite or exploding loss or gradient", unit="steps"
    )
    skipped_critic_steps: int = column(
        "Those of skipped_steps in which only the critic would have learned", unit="steps"
    )
    skipped_trajectories: tuple[str, ...] = column("Trajectories named by a skipped step")
    skipped_at: tuple[int, ...] = column(
        "Which optimiser steps were skipped, counted from 0 over all that were tried"
    )
    step_hashes: tuple[str, ...] = column(
        "Per optimiser step tried, in order: hash over the pieces dealt to it and their layout in passes"
    )
    pass_tokens: int = column("Largest padded size of one forward and backward pass", unit="tokens")
    learning_rate: float = column("Learning rate of the last optimiser step")
    critic_learning_rate: float | None = column(
        "Learning rate of the critic's own weights, if there is a critic"
    )
    loss: float = column("Mean loss over the update's optimiser steps", unit="nats")
    policy_loss: float = column("Mean policy term of the loss", unit="nats")
    kl_loss: float = column("Mean KL term of the loss, coefficient applied", unit="nats")
    entropy_loss: float = column(
        "Mean entropy term of the loss, coefficient applied: negative where there is a bonus, else 0",
        unit="nats",
    )
    value_loss: float | None = column(
        "Mean value loss over the update's optimiser steps, coefficient not applied, if there is a value function"
    )
    losses: NDArray[np.float64] = column(
        "Loss of each optimiser step taken, in order: policy, KL and entropy term, and learner.value_coefficient times the "
        "value loss",
        unit="nats",
    )
    policy_losses: NDArray[np.float64] = column(
        "Policy term of the loss of each optimiser step taken, in order", unit="nats"
    )
    kl_losses: NDArray[np.float64] = column(
        "KL term of the loss of each optimiser step taken, in order, coefficient applied", unit="nats"
    )
    entropy_losses: NDArray[np.float64] = column(
        "Entropy term of the loss of each optimiser step taken, in order, coefficient applied", unit="nats"
    )
    value_losses: NDArray[np.float64] = column(
        "Value loss of each optimiser step taken, in order, coefficient not applied; empty without a value function"
    )
    critic_losses: NDArray[np.float64] = column(
        "Value loss of each optimiser step taken in which only the critic learned, in order, coefficient not applied"
    )
    entropies: NDArray[np.float64] = column(
        "Mean entropy over the loss tokens of each optimiser step taken, in order", unit="nats"
    )
    grad_norms: NDArray[np.float64] = column(
        "Gradient norm before clipping of each optimiser step taken, in order"
    )
    critic_grad_norms: NDArray[np.float64] = column(
        "Gradient norm before clipping of a critic with a decoder of its own, of each optimiser step taken, in order, those "
        "in which only it learned last; empty without one"
    )
    grad_norm: float = column("Mean gradient norm before clipping over the optimiser steps")
    clip_fraction: float = column("Share of loss tokens whose ratio was clipped")
    ratio_mean: float = column("Mean importance ratio new/old over loss tokens of all optimiser steps")
    approx_kl: float = column(
        "Mean k3 estimate of KL(old || new) over loss tokens (schulman 2020)", unit="nats"
    )
    reference_kl: float | None = column(
        "Mean k3 estimate of KL(new || reference) over loss tokens, if there is one", unit="nats"
    )
    entropy: float = column(
        "Mean entropy of the policy's distribution at the training temperature over loss tokens", unit="nats"
    )
    overlap: float = column("Mean overlap of old and new policy at sampled tokens: mean of min(1, ratio)")
    explained_variance: float | None = column("Explained variance of the value function, if there is one")
    logprob_difference_max: float = column(
        "Largest |learner - sampler| log-probability at the sampling weights (first pass)", unit="nats"
    )
    logprob_difference_mean: float = column(
        "Mean |learner - sampler| log-probability (first pass)", unit="nats"
    )
    advantage_mean: float = column("Mean advantage over loss tokens", unit="reward")
    advantage_std: float = column("Standard deviation of the advantage over loss tokens", unit="reward")
    reward_mean: float = column("Mean reward over all trajectories collected for the update", unit="reward")
    success_rate: float = column("Share of trajectories collected for the update that succeeded")
    staleness_mean: float = column("Mean staleness over loss tokens", unit="policy versions")
    staleness_max: int = column("Largest staleness over loss tokens", unit="policy versions")
    env_version: str = column("Environment versions in the batch, joined by '|' where mixed")
    reward_version: str = column("Reward versions in the batch, joined by '|' where mixed")
    prompt_version: str = column("Prompt versions in the batch, joined by '|' where mixed")
    schema_version: int = column("Version of this schema")
    started_us: int = column("When collection for the update began", unit="microseconds since the epoch")
    finished_us: int = column("When its weights were published", unit="microseconds since the epoch")
    generate_s: float = column("Wall time of the main loop in generation", unit="seconds")
    environment_s: float = column("Wall time of the main loop in environments and rendering", unit="seconds")
    store_s: float = column("Wall time of the main loop in gate, log and ledger", unit="seconds")
    learn_s: float = column("Wall time of the main loop in learning", unit="seconds")
    publish_s: float = column("Wall time of the main loop in publishing", unit="seconds")
    weights_checksum: str = column("Checksum of the weights after it, as they were published")
    learner_settings: str = column("The recipe's section learner as it was in force, as canonical JSON")
    learner_state: str = column(
        "What the learner carried into the update besides weights and moments, as canonical JSON"
    )
    temperature: float = column("Training temperature the log-probabilities in the ratio are at")
    total_updates: int = column("Updates the learning rate's schedule ran over", unit="updates")
    lost_updates: int = column(
        "Update numbers before it that are not on the way to its weights; the schedule leaves them out",
        unit="updates",
    )
    reference_checksum: str | None = column("Checksum of the reference policy's weights, if there is one")
    proximal_policy_version: int | None = column(
        "Policy version whose log-probabilities, recomputed, the ratio was to; null where it was to the recorded ones only"
    )
    seed: int = column("Seed of the run")
    num_threads: int = column("Threads the learner computed with")
    deterministic: bool = column("Whether the run was in deterministic mode")
    cpu_capability: str = column("Vector instructions that torch computed with, as it names them")
    torch_build: str = column("Version and commit of torch")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearnedTokensRow:
    """Table ``learned_tokens``: one trajectory in one update, a list entry per token of the trajectory it trained on."""

    run_id: str = column("Run")
    update: int = column("Update")
    position: int = column("Position of the trajectory in the batch, from 0")
    trajectory_id: str = column("Trajectory")
    group_id: str = column("Group")
    segment: int = column("Segment of the trajectory")
    begin: int = column(
        "Place of the first token within the segment: above 0 where the segment was cut into pieces",
        unit="tokens",
    )
    weight: float = column("Weight of the trajectory's tokens in the loss")
    tokens: NDArray[np.int32] = column("Tokens of the piece, given and sampled", unit="token ids")
    loss_mask: NDArray[np.int32] = column("1 where the loss fell on the token, else 0")
    advantages: NDArray[np.float32] = column("Advantage at each token; 0 under the mask", unit="reward")
    returns: NDArray[np.float32] = column("Return at each token; 0 under the mask", unit="reward")
    old_logprobs: NDArray[np.float32] = column(
        "Old log-probability used in the ratio; 0 under the mask", unit="nats"
    )
    new_logprobs: NDArray[np.float32] = column(
        "Learner's log-probability at the weights the update started from (with learner.agreement = 'first_minibatch' at "
        "those the token's own first optimiser step started from); 0 under the mask",
        unit="nats",
    )
    env_version: str = column("Version of the environment")
    reward_version: str = column("Version of the reward function")
    prompt_version: str = column("Version of the prompt template")
    policy_version: int = column("Policy version that sampled the first token")
    schema_version: int = column("Version of this schema")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MetricRow:
    """Table ``metrics``: gauges of the process (memory, idle share, queue depth) that no other table can be asked for."""

    run_id: str = column("Run")
    name: str = column("Metric, as in docs/metrics.md")
    value: float = column("Value, in the metric's unit")
    update: int = column("Update in progress")
    policy_version: int = column("Policy version being served")
    env_version: str = column("Environment versions being run, joined by '|'")
    time_us: int = column("When it was measured", unit="microseconds since the epoch")
    schema_version: int = column("Version of this schema")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvaluationRow:
    """Table ``evaluations``: one snapshot measured on one split at one setting."""

    run_id: str = column("Run")
    evaluation: int = column("Number of the evaluation, from 0")
    update: int = column("Updates the snapshot had behind it")
    label: str = column("before, scheduled, after, or manual")
    purpose: str = column("evaluation (the recipe's sampling) or evaluation_greedy")
    split: str = column("Split measured")
    env: str = column("Environment measured")
    num_tasks: int = column("Tasks measured", unit="tasks")
    num_failed: int = column("Episodes that failed (infrastructure) and are not counted", unit="episodes")
    success_rate: float = column("Share of tasks solved")
    success_low: float = column("Lower end of the 95 % Wilson interval of success_rate")
    success_high: float = column("Upper end of the 95 % Wilson interval of success_rate")
    reward_mean: float = column("Mean reward", unit="reward")
    steps_mean: float = column("Mean steps per episode", unit="steps")
    sampled_tokens_mean: float = column("Mean sampled tokens per episode", unit="tokens")
    temperature: float = column("Sampling temperature used")
    policy_version: int = column("Policy version measured")
    policy_checksum: str = column("Checksum of the weights measured")
    env_version: str = column("Version of the environment")
    reward_version: str = column("Version of the reward function")
    prompt_version: str = column("Version of the prompt template")
    schema_version: int = column("Version of this schema")
    seconds: float = column("Wall time of the evaluation", unit="seconds")
    time_us: int = column("When it ended", unit="microseconds since the epoch")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EventRow:
    """Table ``events``: what happened to the run itself: start, publish, drop, recovery, stop."""

    run_id: str = column("Run")
    kind: str = column(
        "Kind of event: run_started, publish, checkpoint, recovered, attempt_failed, stopped, ..."
    )
    detail: str = column("What happened, as canonical JSON")
    update: int = column("Update in progress")
    policy_version: int = column("Policy version being served")
    time_us: int = column("When", unit="microseconds since the epoch")
    schema_version: int = column("Version of this schema")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VersionRow:
    """Table ``versions``: what each version string *is*, so that lineage can say what changed."""

    run_id: str = column("Run")
    kind: str = column("env, reward, prompt, policy or schema")
    version: str = column("The version as it stands on the steps")
    manifest: str = column(
        "What the fingerprint covers, as canonical JSON: files and hashes, parameters, packages"
    )
    sources: str = column("Text of the small files the fingerprint covers, as canonical JSON {name: text}")
    first_seen_us: int = column("When the run first used it", unit="microseconds since the epoch")
    schema_version: int = column("Version of this schema")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuarantineRow:
    """Table ``quarantine``: what the gate refused, with the reason and the whole payload."""

    run_id: str = column("Run")
    quarantine_id: str = column("Id of this refusal, unique inside the run")
    record_kind: str = column("Table the record was meant for")
    record_id: str = column("Id of the record, as far as it could be read")
    producer: str = column("Actor that produced it")
    reason: str = column("Rule it broke, machine-readable: the rule's name")
    detail: str = column("The value, the rule and the remedy in words")
    payload: str = column("The record as JSON")
    payload_schema_version: int = column("Schema version the record claimed; -1 where that can't be read")
    time_us: int = column("When", unit="microseconds since the epoch")
    schema_version: int = column("Version of this schema")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttemptRow:
    """Table ``attempts``: the ledger's attempts, mirrored. An attempt ends in exactly one state."""

    run_id: str = column("Run")
    attempt_id: str = column("Attempt")
    episode_id: str = column("Episode")
    group_id: str = column("Group")
    task_id: str = column("Content hash of the task")
    purpose: str = column("Why the episode ran")
    state: str = column("leased, finished, failed or dropped")
    reason: str = column("Why it failed or was dropped; empty otherwise")
    owner: str = column("Owner of the ledger that leased it (its fencing token)")
    leased_us: int = column("When it was leased", unit="microseconds since the epoch")
    closed_us: int | None = column("When it ended", unit="microseconds since the epoch")
    schema_version: int = column("Version of this schema")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConsumptionRow:
    """Table ``consumptions``: one use of a trajectory by one update, mirrored from the ledger."""

    run_id: str = column("Run")
    trajectory_id: str = column("Trajectory")
    update: int = column("Update that used it")
    epochs: int = column("Passes over it inside the update", unit="epochs")
    source: str = column("fresh (just collected), hot or cold")
    weight: float = column(
        "Weight of the trajectory's tokens in the loss: 1, or what replay corrects its choice by"
    )
    time_us: int = column("When", unit="microseconds since the epoch")
    schema_version: int = column("Version of this schema")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DiscardRow:
    """Table ``discards``: one finished trajectory that no update learns from as fresh, mirrored from the ledger."""

    run_id: str = column("Run")
    trajectory_id: str = column("Trajectory")
    group_id: str = column("Group")
    reason: str = column(
        "Why: stale, overflow_oldest or overflow_newest (of the queue), surplus (its group had enough)"
    )
    update: int = column("Update in progress, or to come, when it was discarded")
    policy_version: int = column("The learner's policy version then")
    staleness: int = column(
        "policy_version minus the oldest version that sampled a token of the trajectory (weights of another number that are "
        "the same, after a resume, taken for the same)",
        unit="policy versions",
    )
    time_us: int = column("When", unit="microseconds since the epoch")
    schema_version: int = column("Version of this schema")


TABLES: dict[str, type] = {
    "steps": StepRow,
    "trajectories": TrajectoryRow,
    "groups": GroupRow,
    "updates": UpdateRow,
    "learned_tokens": LearnedTokensRow,
    "metrics": MetricRow,
    "evaluations": EvaluationRow,
    "events": EventRow,
    "versions": VersionRow,
    "quarantine": QuarantineRow,
    "attempts": AttemptRow,
    "consumptions": ConsumptionRow,
    "discards": DiscardRow,
}
"""Every table of the lake and the class of its rows."""
