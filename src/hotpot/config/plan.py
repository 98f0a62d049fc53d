"""The sizes a recipe comes to: which batch size multiplies which, before anything runs.

Pure arithmetic over a :class:`Recipe`; every number says how it was made. Bounds are upper bounds: episodes end early,
equal-reward groups leave the loss, and a run may stop before its last update. It reads no file and knows no model.
"""

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hotpot.config.plan_flow import PlanLine, episodes_at_once, flow_lines
from hotpot.config.recipe import Recipe
from hotpot.config.sections.rollout import RolloutSection

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every derived size of a recipe. ``max_`` marks an upper bound; ``flow`` is said line by line.

    ``episodes_per_update`` is 0 where the run learns from a record, ``optimizer_steps_per_update`` 0 where it only
    collects.
    """

    mode: str
    tasks_per_update: int
    samples_per_task: int
    episodes_per_update: int
    generation_waves: int
    max_sampled_tokens_per_episode: int
    max_sampled_tokens_per_update: int
    max_context_tokens_per_episode: int
    max_windows_per_episode: int
    max_context_tokens_per_update: int
    cache_tokens: int
    epochs: int
    minibatches: int
    optimizer_steps_per_update: int
    replayed_per_update: int
    max_episodes_per_optimizer_step: int
    micro_batch_tokens: int
    min_episodes_per_micro_batch: int
    updates: int
    total_episodes: int
    total_optimizer_steps: int
    max_total_sampled_tokens: int
    max_total_context_tokens: int
    environments: int
    evaluates_greedily: bool
    evaluation_settings: int
    scheduled_evaluations: int
    episodes_per_scheduled_evaluation: int
    episodes_per_final_evaluation: int
    evaluation_episodes: int
    checkpoints: int
    flow: tuple[PlanLine, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, for JSON."""
        return {**asdict(self), "flow": [asdict(line) for line in self.flow], "notes": list(self.notes)}

    def lines(self) -> tuple[PlanLine, ...]:
        """Return the sizes in reading order, each with how it was made."""
        return (
            *_lines(_rollout_lines(self)),
            *self.flow,
            *_lines((*_learner_lines(self), *_total_lines(self), *_evaluation_lines(self))),
        )


def make_plan(recipe: Recipe) -> Plan:
    """Return the sizes that ``recipe`` comes to."""
    rollout, learner, topology, evaluation = (
        recipe.rollout,
        recipe.learner,
        recipe.topology,
        recipe.evaluation,
    )
    collects = recipe.debug.mode != "learn_from_record"
    learns = recipe.debug.mode != "rollout_only"
    batch = rollout.tasks_per_batch * rollout.samples_per_task
    episodes = batch if collects else 0
    context, windows = rollout.max_context_tokens, _max_windows(rollout)
    sampled = _max_sampled(rollout)
    steps = learner.epochs * learner.minibatches if learns else 0
    share = recipe.replay.share if collects and learns else 0.0
    replayed = math.floor(batch * share / (1 - share) + 0.5)
    # A run that only collects measures nothing: its policy is the one it began with.
    settings = (2 if evaluation.greedy else 1) * len(recipe.environments) if learns else 0
    every = evaluation.every_updates if learns else 0
    # The evaluation "after" measures the last update, so a scheduled one there would only repeat it.
    scheduled = (topology.updates - 1) // every if every else 0
    per_scheduled = evaluation.num_tasks * settings
    per_final = evaluation.num_tasks_final * settings
    return Plan(
        mode=recipe.debug.mode,
        tasks_per_update=rollout.tasks_per_batch,
        samples_per_task=rollout.samples_per_task,
        episodes_per_update=episodes,
        generation_waves=_waves(recipe) if episodes else 0,
        max_sampled_tokens_per_episode=sampled,
        max_sampled_tokens_per_update=episodes * sampled,
        max_context_tokens_per_episode=context * windows,
        max_windows_per_episode=windows,
        max_context_tokens_per_update=episodes * context * windows,
        cache_tokens=recipe.engine.max_concurrency * context,
        epochs=learner.epochs,
        minibatches=learner.minibatches,
        optimizer_steps_per_update=steps,
        replayed_per_update=replayed,
        max_episodes_per_optimizer_step=math.ceil((batch + replayed) / learner.minibatches),
        micro_batch_tokens=learner.micro_batch_tokens,
        min_episodes_per_micro_batch=max(1, learner.micro_batch_tokens // (context * windows)),
        updates=topology.updates,
        total_episodes=episodes * topology.updates,
        total_optimizer_steps=steps * topology.updates,
        max_total_sampled_tokens=episodes * sampled * topology.updates,
        max_total_context_tokens=episodes * context * topology.updates,
        environments=len(recipe.environments),
        evaluates_greedily=evaluation.greedy and learns,
        evaluation_settings=settings,
        scheduled_evaluations=scheduled,
        episodes_per_scheduled_evaluation=per_scheduled,
        episodes_per_final_evaluation=per_final,
        evaluation_episodes=scheduled * per_scheduled + 2 * per_final,
        checkpoints=_checkpoints(recipe),
        flow=flow_lines(recipe),
        notes=_notes(recipe),
    )


def plan_table(plan: Plan) -> "Table":
    """Return the plan as a table for a terminal."""
    from rich.table import Table

    table = Table(title="Plan: what the recipe comes to", title_justify="left")
    table.add_column("size", no_wrap=True)
    table.add_column("value", justify="right", style="cyan", no_wrap=True)
    table.add_column("how it is made", style="dim", overflow="fold")
    last = ""
    for line in plan.lines():
        if line.part != last:
            table.add_section()
            table.add_row(f"[bold]{line.part}")
        table.add_row(f"  {line.name}", f"{line.shown} {line.unit}", line.made_of)
        last = line.part
    return table


def _waves(recipe: Recipe) -> int:
    """Return how often actors or engine are filled by the episodes that are issued for an update."""
    issued = recipe.rollout.tasks_per_batch * recipe.episodes_per_task
    return math.ceil(issued / min(episodes_at_once(recipe), recipe.engine.max_concurrency))


_Row = tuple[str, str, int, str, str]


def _lines(rows: tuple[_Row, ...]) -> tuple[PlanLine, ...]:
    return tuple(
        PlanLine(part=part, name=name, value=value, unit=unit, made_of=made_of)
        for part, name, value, unit, made_of in rows
    )


def _rollout_lines(plan: Plan) -> tuple[_Row, ...]:
    part = "an update collects"
    if plan.mode == "learn_from_record":
        return ((part, "episodes", 0, "episodes", "debug.mode = learn_from_record takes the stored ones"),)
    per_update = plan.episodes_per_update
    sampled, windows = plan.max_sampled_tokens_per_episode, plan.max_windows_per_episode
    context = plan.max_context_tokens_per_episode // windows
    of_windows = f" x {windows} windows" if windows > 1 else ""
    return (
        (part, "tasks", plan.tasks_per_update, "tasks", "rollout.tasks_per_batch"),
        (part, "samples of each", plan.samples_per_task, "episodes", "rollout.samples_per_task: one group"),
        (part, "episodes", per_update, "episodes", f"{plan.tasks_per_update} x {plan.samples_per_task}"),
        (part, "waves", plan.generation_waves, "waves", "episodes that are issued / those that actors and engine take at once, rounded up"),
        (part, "sampled tokens, at most", plan.max_sampled_tokens_per_update, "tokens",
         f"{per_update} x {sampled} (max_steps x max_step_tokens, {'and notes' if windows > 1 else 'within the context'})"),
        (part, "context tokens, at most", plan.max_context_tokens_per_update, "tokens",
         f"{per_update} x {context} (rollout.max_context_tokens){of_windows}"),
        (part, "key/value cache", plan.cache_tokens, "tokens", f"engine.max_concurrency x {context}"),
    )  # fmt: skip


def _learner_lines(plan: Plan) -> tuple[_Row, ...]:
    part = "an update learns"
    if plan.mode == "rollout_only":
        return ((part, "optimiser steps", 0, "steps", "debug.mode = rollout_only learns nothing"),)
    return (
        (part, "optimiser steps", plan.optimizer_steps_per_update, "steps",
         f"{plan.epochs} learner.epochs x {plan.minibatches} learner.minibatches"),
        (part, "replayed trajectories, at most", plan.replayed_per_update, "trajectories",
         "episodes x replay.share / (1 - replay.share), rounded"),
        (part, "episodes in one, about", plan.max_episodes_per_optimizer_step, "episodes",
         "episodes and replayed / learner.minibatches, rounded up; dealt evenly by tokens"),
        (part, "one forward pass, at most", plan.micro_batch_tokens, "tokens",
         "learner.micro_batch_tokens, padding included"),
        (part, "episodes in one, at least", plan.min_episodes_per_micro_batch, "episodes",
         f"{plan.micro_batch_tokens} / {plan.max_context_tokens_per_episode}; shorter episodes: more"),
    )  # fmt: skip


def _total_lines(plan: Plan) -> tuple[_Row, ...]:
    part = "the run"
    return (
        (part, "updates", plan.updates, "updates", "topology.updates"),
        (part, "episodes", plan.total_episodes, "episodes", f"{plan.updates} x {plan.episodes_per_update}"),
        (part, "sampled tokens, at most", plan.max_total_sampled_tokens, "tokens",
         f"{plan.updates} x {plan.max_sampled_tokens_per_update}"),
        (part, "context tokens, at most", plan.max_total_context_tokens, "tokens",
         f"{plan.updates} x {plan.max_context_tokens_per_update}"),
        (part, "optimiser steps", plan.total_optimizer_steps, "steps",
         f"{plan.updates} x {plan.optimizer_steps_per_update}"),
        (part, "checkpoints on disk", plan.checkpoints, "checkpoints",
         "first, last and the newest checkpoint.keep between"),
    )  # fmt: skip


def _evaluation_lines(plan: Plan) -> tuple[_Row, ...]:
    part = "evaluation"
    times = f"x {plan.evaluation_settings} (the recipe's sampling{', greedy' * plan.evaluates_greedily}"
    times += f"; {plan.environments} environments)" if plan.environments > 1 else ")"
    return (
        (part, "before and after, each", plan.episodes_per_final_evaluation, "episodes",
         f"evaluation.num_tasks_final {times}"),
        (part, "scheduled", plan.scheduled_evaluations, "evaluations",
         "every evaluation.every_updates updates, the last one apart"),
        (part, "a scheduled one", plan.episodes_per_scheduled_evaluation, "episodes",
         f"evaluation.num_tasks {times}"),
        (part, "episodes", plan.evaluation_episodes, "episodes",
         (f"2 x {plan.episodes_per_final_evaluation} + {plan.scheduled_evaluations} x "
         f"{plan.episodes_per_scheduled_evaluation}")),
    )  # fmt: skip


def _checkpoints(recipe: Recipe) -> int:
    if recipe.debug.mode == "rollout_only":
        return 1
    every = recipe.checkpoint.every_updates
    between = (recipe.topology.updates - 1) // every if every else 0
    return 2 + min(between, recipe.checkpoint.keep)


def _max_windows(rollout: RolloutSection) -> int:
    """Return the most windows of an episode: one a step where a full context does not end it, and one a note."""
    notes = rollout.max_steps - 1 if rollout.context_overflow == "segment" else 0
    return 1 if rollout.context_overflow == "end" else rollout.max_steps + notes


def _max_sampled(rollout: RolloutSection) -> int:
    steps = rollout.max_steps * rollout.max_step_tokens
    if rollout.context_overflow == "end":
        return min(steps, rollout.max_context_tokens)
    notes = rollout.max_steps - 1 if rollout.context_overflow == "segment" else 0
    return steps + notes * rollout.handover_tokens


_OVERFLOW = {
    "end": "long episodes end with max_context",
    "truncate": "long episodes go on without their oldest exchanges (rollout.context_overflow)",
    "segment": "long episodes go on with a note in place of their earlier exchanges (rollout.context_overflow)",
}


def _notes(recipe: Recipe) -> tuple[str, ...]:
    rollout, learner = recipe.rollout, recipe.learner
    notes = []
    if rollout.max_steps * rollout.max_step_tokens > rollout.max_context_tokens:
        notes.append(
            f"{rollout.max_steps} steps of {rollout.max_step_tokens} tokens do not fit in "
            f"rollout.max_context_tokens = {rollout.max_context_tokens}: {_OVERFLOW[rollout.context_overflow]}"
        )
    if 0 < learner.segment_tokens < rollout.max_context_tokens:
        notes.append(
            f"learner.segment_tokens = {learner.segment_tokens}: longer episodes are learned in pieces, each without the "
            f"context before it but for {learner.segment_overlap} tokens (learner.segment_overlap)"
        )
    if recipe.replay.share > 0 and recipe.replay.weighting == "positive" and not recipe.replay.only_positive:
        notes.append(
            "replay.weighting = positive without replay.only_positive: where successes run out the draws are failures "
            "alone, which unlearn what both share"
        )
    if rollout.refill != "none":
        notes.append(
            f"rollout.refill = {rollout.refill}: an update may run up to rollout.max_refill_rounds = "
            f"{rollout.max_refill_rounds} further rounds of tasks; its episodes are then more than shown"
        )
    if recipe.tasks.mix:
        named = ", ".join(
            f"{entry.name} ({entry.kind}, weight {entry.weight:g})" for entry in recipe.tasks.mix
        )
        notes.append(f"tasks.mix: {named}")
    if learner.ratio == "sequence" and learner.clip_high > 0.05:
        notes.append(
            f"learner.ratio = sequence with learner.clip_high = {learner.clip_high:g}: a sequence's ratio is a mean over its "
            "tokens and rarely leaves such a range; arXiv:2507.18071 clips at 3e-4 and 4e-4"
        )
    if learner.critic_extra_epochs:
        notes.append(
            f"learner.critic_extra_epochs = {learner.critic_extra_epochs}: after its optimiser steps an update takes "
            f"{learner.critic_extra_epochs * learner.minibatches} more in which only the critic learns"
        )
    if learner.learning_rate == 0 and recipe.debug.mode != "rollout_only":
        notes.append("learner.learning_rate = 0: everything runs and the policy stays as it is")
    if recipe.topology.max_seconds is not None:
        notes.append(
            f"topology.max_seconds = {recipe.topology.max_seconds:g}: the run may end before its last update"
        )
    return tuple(notes)
