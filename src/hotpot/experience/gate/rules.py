"""The gate's rules: what must hold for a trajectory, one small function each.

A rule takes a trajectory and the :class:`Limits` and returns None, or words naming the value, the rule and the remedy.
:data:`RULES` lists them by their machine-readable names in the order they are tried: ``wrong_type`` comes first, and
the others may rely on what it establishes. Pure: no clock, no file, no state.
"""

import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotpot.experience.gate.known import KnownVersions
from hotpot.experience.records.typecheck import check_row_types, check_step_types, well_formed
from hotpot.ids import prefix_hash, task_id
from hotpot.types import (
    SCHEMA_VERSION,
    ContextChange,
    EndReason,
    FinishReason,
    Purpose,
    Split,
    Stage,
    StepRow,
    Trajectory,
)

LOGPROB_ROUNDING = 1e-5
"""Log-probabilities up to this far above 0 are taken for rounding of a sure token, and stored as they are (nats)."""

REWARD_ROUNDING = 1e-6
"""Relative and absolute difference allowed between a reward and the sum of its components."""

_MODEL_STAGES = frozenset(
    {Stage.THOUGHT.value, Stage.TOOL_CALL.value, Stage.ANSWER.value, Stage.HANDOVER.value}
)
_STAGES = frozenset(stage.value for stage in Stage)
_FINISHES = frozenset(finish.value for finish in FinishReason)
_SPLITS = frozenset(split.value for split in Split)
_PURPOSES = frozenset(purpose.value for purpose in Purpose)
_END_REASONS = frozenset(reason.value for reason in EndReason)

_SHORTENED = frozenset({ContextChange.TRUNCATED, ContextChange.SEGMENTED, ContextChange.FALLBACK})
_CHANGES = frozenset(change.value for change in ContextChange)

_SHARED = (
    "run_id", "trajectory_id", "episode_id", "group_id", "attempt_id", "task_id", "split", "purpose", "actor_id",
    "actor_group", "env_version", "reward_version", "prompt_version", "schema_version",
)  # fmt: skip
_shared = operator.attrgetter(*_SHARED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the gate knows of the run: its id, the size of its vocabulary (token ids lie below it), and the versions it has
    explained."""

    run_id: str
    vocabulary_size: int
    versions: KnownVersions = KnownVersions()


def _wrong_type(trajectory: Trajectory, limits: Limits) -> str | None:
    del limits
    if not well_formed(trajectory):
        return (
            f"{type(trajectory).__name__} is not a Trajectory of a TrajectoryRow and a tuple of StepRow; "
            "build it from the records in hotpot.types"
        )
    return check_row_types((trajectory.row,)) or check_step_types(trajectory.steps)


def _schema_version(trajectory: Trajectory, limits: Limits) -> str | None:
    del limits
    for version in (trajectory.row.schema_version, *(step.schema_version for step in trajectory.steps)):
        if version != SCHEMA_VERSION:
            return (
                f"schema_version = {version}, but this store writes {SCHEMA_VERSION}; "
                "run producer and store from the same release"
            )
    return None


def _missing_version(trajectory: Trajectory, limits: Limits) -> str | None:
    del limits
    row = trajectory.row
    for name in ("env_version", "reward_version", "prompt_version"):
        if not getattr(row, name):
            return f"{name} is empty; every record carries all five versions"
    if row.policy_version < 0:
        return f"policy_version = {row.policy_version}; versions start at 0"
    if any(not step.policy_checksum for step in trajectory.steps):
        return "policy_checksum is empty on a step; the engine reports it with every generation"
    return None


def _identity(trajectory: Trajectory, limits: Limits) -> str | None:
    row = trajectory.row
    if row.run_id != limits.run_id:
        return f"run_id = {row.run_id!r}, but this store keeps run {limits.run_id!r}"
    ids = (row.trajectory_id, row.episode_id, row.group_id, row.attempt_id, row.actor_id, row.actor_group)
    if not all(ids):
        return f"an id is empty among trajectory, episode, group, attempt, actor, actor group: {ids}"
    shared = _shared(row)
    for step in trajectory.steps:
        if _shared(step) != shared:
            differing = [name for name in _SHARED if getattr(step, name) != getattr(row, name)]
            return f"step {step.step} differs from its trajectory in {differing}; they are the same on every step"
    if trajectory.steps and row.policy_version != trajectory.steps[0].policy_version:
        return (
            f"policy_version = {row.policy_version}, but step 0 was sampled by "
            f"{trajectory.steps[0].policy_version}"
        )
    try:
        hashed = task_id(row.env, row.task_content)
    except UnicodeEncodeError as error:
        return f"env or task_content is text that UTF-8 can't carry: {error}"
    if row.task_id != hashed:
        return f"task_id = {row.task_id!r} is not the hash of env {row.env!r} and task_content"
    if (row.parent_trajectory_id is None) != (row.fork_step is None):
        return "parent_trajectory_id and fork_step are set together or not at all"
    return None


def _unknown_version(trajectory: Trajectory, limits: Limits) -> str | None:
    row, known = trajectory.row, limits.versions
    used = [("env", row.env_version), ("reward", row.reward_version), ("prompt", row.prompt_version)]
    sampled = {row.policy_version}
    for step in trajectory.steps:
        sampled.add(step.policy_version)
        sampled.update(step.span_policy_version)
    used += [("policy", str(version)) for version in sorted(sampled)]
    for kind, version in used:
        if known.lacks(kind, version):
            return (
                f"{kind} version {version!r} is not explained in the run's table versions; record what it is before, or "
                "with, what was made with it"
            )
    return None


def _step_numbers(trajectory: Trajectory, limits: Limits) -> str | None:
    del limits
    numbers = [step.step for step in trajectory.steps]
    if not numbers or numbers != list(range(len(numbers))):
        return f"steps are numbered {numbers[:20]}; they must be 0, 1, 2, ... and at least one"
    turns = [step.turn for step in trajectory.steps]
    if turns[0] != 0 or any(b - a not in (0, 1) for a, b in itertools.pairwise(turns)):
        return f"turns are {turns[:20]}; they start at 0 and grow by at most one a step"
    return None


def _lengths(trajectory: Trajectory, limits: Limits) -> str | None:
    del limits
    for step in trajectory.steps:
        count = len(step.sampled_tokens)
        if len(step.behaviour_logprobs) != count or len(step.model_logprobs) != count:
            return (
                f"step {step.step}: {count} sampled tokens, {len(step.behaviour_logprobs)} behaviour and "
                f"{len(step.model_logprobs)} model log-probabilities; there is one of each per sampled token"
            )
    return None


def _logprobs(trajectory: Trajectory, limits: Limits) -> str | None:
    del limits
    values = np.concatenate(
        [a for step in trajectory.steps for a in (step.behaviour_logprobs, step.model_logprobs)]
    )
    good = _good_logprobs(values)
    if good.all():
        return None
    return (
        f"log-probability {values[~good][0]} is not finite and <= 0 ({(~good).sum()} of {values.size}); "
        "look at the engine's precision and sampler"
    )


def _good_logprobs(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    # NaN compares false with everything, so this catches it along with both infinities.
    return (values <= LOGPROB_ROUNDING) & (values > -math.inf)


def _tokens(trajectory: Trajectory, limits: Limits) -> str | None:
    values = np.concatenate(
        [a for step in trajectory.steps for a in (step.prompt_tokens, step.sampled_tokens)]
    )
    if _good_tokens(values, limits):
        return None
    wrong = values[(values < 0) | (values >= limits.vocabulary_size)]
    return (
        f"token id {wrong[0]} is outside the vocabulary [0, {limits.vocabulary_size}); "
        "model and tokenizer do not belong together"
    )


def _good_tokens(values: NDArray[np.int32], limits: Limits) -> bool:
    return not values.size or bool(values.min() >= 0 and values.max() < limits.vocabulary_size)


def _spans(trajectory: Trajectory, limits: Limits) -> str | None:
    del limits
    # A fork opens with what its parent's model said: its first step is a rewritten history too.
    segment = 0 if trajectory.row.parent_trajectory_id is None else -1
    for step in trajectory.steps:
        given, sampled = len(step.prompt_tokens), len(step.sampled_tokens)
        words = _span_words(step, given, sampled, rewritten=step.segment > segment)
        if words:
            return f"step {step.step}: {words}"
        segment = step.segment
    return None


def _span_words(step: StepRow, given: int, sampled: int, *, rewritten: bool) -> str | None:
    if len(step.span_stage) != len(step.span_length):
        return f"{len(step.span_stage)} span stages but {len(step.span_length)} span lengths"
    if step.span_length and min(step.span_length) <= 0:
        return f"span lengths {step.span_length} must all be positive"
    if sum(step.span_length) != given + sampled:
        return (
            f"spans cover {sum(step.span_length)} tokens, but there are {given} given and {sampled} sampled"
        )
    end = 0
    for stage, length in zip(step.span_stage, step.span_length, strict=True):
        begin, end = end, end + length
        if stage not in _STAGES:
            return f"unknown stage {stage!r}; stages are {sorted(_STAGES)}"
        if begin < given < end:
            return f"the {stage} span crosses from given to sampled tokens; split it there"
        # A prompt that rewrites history repeats what the model once said: given now, whatever its stage.
        if begin < given and stage in _MODEL_STAGES and not rewritten:
            return f"stage {stage} on tokens the model did not sample"
        if begin >= given and stage not in _MODEL_STAGES:
            return f"stage {stage} on tokens the model sampled"
    return None


def _policy_spans(trajectory: Trajectory, limits: Limits) -> str | None:
    del limits
    for step in trajectory.steps:
        versions, lengths = step.span_policy_version, step.span_policy_length
        if len(versions) != len(lengths) or sum(lengths) != len(step.sampled_tokens):
            return (
                f"step {step.step}: policy spans {versions} of lengths {lengths} do not cover the "
                f"{len(step.sampled_tokens)} sampled tokens"
            )
        if lengths and min(lengths) <= 0:
            return f"step {step.step}: policy span lengths {lengths} must all be positive"
        falls = len(versions) > 1 and list(versions) != sorted(versions)
        if falls or (versions and versions[0] != step.policy_version):
            return (
                f"step {step.step}: policy versions {versions} must start at the step's {step.policy_version} "
                "and never fall"
            )
    return None


def _context(trajectory: Trajectory, limits: Limits) -> str | None:
    del limits
    chain, context, segment = "", 0, 0
    for step in trajectory.steps:
        if step.segment not in (segment, segment + 1) or (step.step == 0 and step.segment != 0):
            return (
                f"step {step.step}: segment {step.segment} after {segment}; it starts at 0 and grows by one"
            )
        if step.segment != segment:
            chain, context, segment = "", 0, step.segment
        context += len(step.prompt_tokens)
        chain = prefix_hash(step.prompt_tokens, extends=chain)
        if step.context_tokens != context:
            return f"step {step.step}: context_tokens = {step.context_tokens}, but the recorded tokens are {context}"
        if step.prefix_hash != chain:
            return (
                f"step {step.step}: prefix_hash {step.prefix_hash!r} is not that of the recorded tokens "
                f"({chain!r}); the prompt did not extend them: start a new segment"
            )
        context += len(step.sampled_tokens)
        chain = prefix_hash(step.sampled_tokens, extends=chain)
    return None


def _context_change(trajectory: Trajectory, limits: Limits) -> str | None:
    del limits
    segment = 0
    for step in trajectory.steps:
        change, dropped = step.context_change, step.context_dropped_tokens
        if change not in _CHANGES:
            return f"step {step.step}: context_change {change!r} is none of {sorted(_CHANGES)}"
        shortened = change in _SHORTENED
        if shortened != (dropped > 0) or dropped < 0:
            return (
                f"step {step.step}: context_change {change!r} with context_dropped_tokens = {dropped}; tokens are left out "
                f"exactly where it is one of {sorted(_SHORTENED)}"
            )
        if shortened and step.segment == segment:
            return f"step {step.step}: context_change {change!r} inside segment {segment}; a shorter prompt begins a new one"
        segment = step.segment
    return None


def _close(a: float, b: float) -> bool:
    return math.isfinite(a) and math.isclose(a, b, rel_tol=REWARD_ROUNDING, abs_tol=REWARD_ROUNDING)


def _rewards(trajectory: Trajectory, limits: Limits) -> str | None:
    del limits
    row = trajectory.row
    sums: dict[str, float] = {}
    for step in trajectory.steps:
        if len(step.reward_names) != len(step.reward_values):
            return (
                f"step {step.step}: {len(step.reward_names)} reward names, {len(step.reward_values)} values"
            )
        if not _close(step.reward, math.fsum(step.reward_values)):
            return (
                f"step {step.step}: reward {step.reward} is not the finite sum of its components "
                f"{step.reward_values}"
            )
        for name, value in zip(step.reward_names, step.reward_values, strict=True):
            sums[name] = sums.get(name, 0.0) + value
    if not _close(row.reward, math.fsum(sums.values())):
        return f"reward {row.reward} is not the finite sum over the steps, {math.fsum(sums.values())}"
    if row.reward_names != tuple(sums) or len(row.reward_values) != len(sums):
        return f"reward_names {row.reward_names} are not the steps' components in order, {tuple(sums)}"
    if not all(map(_close, row.reward_values, sums.values())):
        return f"reward_values {row.reward_values} are not the sums over the steps, {tuple(sums.values())}"
    return None


def _times(trajectory: Trajectory, limits: Limits) -> str | None:
    del limits
    row = trajectory.row
    clock = [row.started_us]
    for step in trajectory.steps:
        clock += (step.started_us, step.generated_us, step.finished_us)
        spent = (step.queue_s, step.generate_s, step.environment_s)
        if not all(0 <= seconds < math.inf for seconds in spent):
            return f"step {step.step}: durations {spent} must be finite and >= 0"
    clock.append(row.finished_us)
    if clock != sorted(clock):
        place = next(i for i, (a, b) in enumerate(itertools.pairwise(clock)) if a > b)
        return (
            f"time runs backwards by {clock[place] - clock[place + 1]} us at step {max(0, place - 1) // 3}; "
            "take times from one clock that never goes back"
        )
    return None


def _purpose(trajectory: Trajectory, limits: Limits) -> str | None:
    del limits
    row = trajectory.row
    if row.split not in _SPLITS or row.purpose not in _PURPOSES:
        return f"split {row.split!r} or purpose {row.purpose!r} is unknown"
    training = row.purpose == Purpose.TRAINING
    if training and row.split != Split.TRAIN:
        return f"a {row.split} task was run for training; holdout tasks never touch an update"
    if training == (row.evaluation is not None):
        return f"evaluation = {row.evaluation} with purpose {row.purpose}: set exactly for evaluations"
    return None


def _endings(trajectory: Trajectory, limits: Limits) -> str | None:
    del limits
    row = trajectory.row
    for step in trajectory.steps:
        if step.finish not in _FINISHES:
            return f"step {step.step}: finish {step.finish!r} is none of {sorted(_FINISHES)}"
    if row.end_reason not in _END_REASONS:
        return f"end_reason {row.end_reason!r} is none of {sorted(_END_REASONS)}"
    if row.success and row.end_reason != EndReason.ANSWERED:
        return f"success with end_reason {row.end_reason!r}; an episode cut by a limit did not succeed"
    return None


def _sums(trajectory: Trajectory, limits: Limits) -> str | None:
    del limits
    row, steps = trajectory.row, trajectory.steps
    expected = {
        "num_steps": len(steps),
        "num_turns": steps[-1].turn + 1,
        "num_segments": steps[-1].segment + 1,
        "num_prompt_tokens": sum(len(step.prompt_tokens) for step in steps),
        "num_sampled_tokens": sum(len(step.sampled_tokens) for step in steps),
        "tool_errors": sum(step.tool_error for step in steps),
    }
    for name, value in expected.items():
        if getattr(row, name) != value:
            return f"{name} = {getattr(row, name)}, but the steps add up to {value}"
    return None


def _sampling(trajectory: Trajectory, limits: Limits) -> str | None:
    del limits
    for step in trajectory.steps:
        good = 0 <= step.temperature < math.inf and 0 < step.top_p <= 1 and step.top_k >= 0
        if not (good and 0 < step.repetition_penalty < math.inf):
            return (
                f"step {step.step}: temperature {step.temperature}, top_p {step.top_p}, top_k {step.top_k}, "
                f"repetition_penalty {step.repetition_penalty} are no distribution"
            )
    return None


Rule = Callable[[Trajectory, Limits], str | None]

RULES: dict[str, Rule] = {
    "wrong_type": _wrong_type,
    "schema_version": _schema_version,
    "missing_version": _missing_version,
    "step_numbers": _step_numbers,
    "identity": _identity,
    "unknown_version": _unknown_version,
    "purpose": _purpose,
    "lengths": _lengths,
    "logprobs": _logprobs,
    "tokens": _tokens,
    "spans": _spans,
    "policy_spans": _policy_spans,
    "context": _context,
    "context_change": _context_change,
    "rewards": _rewards,
    "times": _times,
    "endings": _endings,
    "sums": _sums,
    "sampling": _sampling,
}
"""Every rule of one trajectory by its machine-readable name, in the order they are tried."""

OTHER_REASONS: dict[str, str] = {
    "not_storable": "a value that Arrow can't hold in its column, such as text that is no Unicode",
    "duplicate_id": "the same trajectory_id twice in one call",
    "fork": "a parent that is not on record, or that the fork does not continue",
    "parent_unreadable": "a fork whose parent was looked for in a record that can't be read now; it can be requeued",
    "malformed": "a record of another program that can't be read: keys, columns, or values of the wrong type",
    "attempt": "an attempt id that was closed, belongs to the run's own sampler, or is not the trajectory's",
    "breaker_open": "not judged: its producer's records were mostly refused; it can be requeued",
}
"""Reasons of a refusal that are no rule of a single trajectory, and what each means."""


def proven(steps: pa.Table, limits: Limits) -> frozenset[str]:
    """Return the rules that a whole batch of steps, already in Arrow, is seen to keep at once.

    ``steps`` is what :func:`hotpot.experience.records.schema.to_table` made of :func:`well_formed` trajectories; it lets no wrong
    type pass. A rule that is not
    proven may still hold for each trajectory; one that is proven holds for all of them.
    """
    names = {"wrong_type"}
    if all(_good_logprobs(_flat(steps, name)).all() for name in ("behaviour_logprobs", "model_logprobs")):
        names.add("logprobs")
    if all(_good_tokens(_flat(steps, name), limits) for name in ("prompt_tokens", "sampled_tokens")):
        names.add("tokens")
    return frozenset(names)


def _flat(steps: pa.Table, name: str) -> Any:
    lists: Any = steps.column(name).combine_chunks()
    return lists.values.to_numpy()
