"""Builders of valid records with jitter, for tests of whatever reads or writes trajectories.

Everything is a pure function of its arguments: one seed, one record. What :func:`make_trajectory` returns passes the
store's gate. It knows no model and no environment: its tokens are random numbers below ``vocabulary``.
"""

import dataclasses
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hotpot.experience import Lease
from hotpot.ids import attempt_id, episode_id, group_id, prefix_hash, task_id
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
    TrajectoryRow,
)

EPOCH_US = 1_750_000_000_000_000
"""Where the builders' clocks start: microseconds since the Unix epoch."""

ENV_VERSION = "fake@1+0123456789ab"
REWARD_VERSION = "fake-reward@1+0123456789ab"
PROMPT_VERSION = "fake-prompt@1+0123456789ab"

Row = TypeVar("Row")


def make_row(cls: type[Row], **values: Any) -> Row:
    """Return a row of any class of ``hotpot.types.TABLES`` with plain values of the right types; ``values`` override.

    Text is ``"x"``, numbers are 0, lists are empty, nullable columns are None, versions are the builders' own.
    """
    known: dict[str, Any] = {
        "run_id": "run",
        "schema_version": SCHEMA_VERSION,
        "env_version": ENV_VERSION,
        "reward_version": REWARD_VERSION,
        "prompt_version": PROMPT_VERSION,
        "policy_version": 1,
    }
    hints = typing.get_type_hints(cls)
    filled = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in values:
            filled[field.name] = values[field.name]
        elif field.name in known:
            filled[field.name] = known[field.name]
        else:
            filled[field.name] = _plain_value(hints[field.name])
    unknown = set(values) - set(filled)
    if unknown:
        raise TypeError(f"{cls.__name__} has no columns {sorted(unknown)}")
    return cls(**filled)


def make_trajectory(
    *,
    run_id: str = "run",
    issue: int = 0,
    sample: int = 0,
    attempt: int = 0,
    num_steps: int = 2,
    reward: float = 1.0,
    success: bool | None = None,
    purpose: Purpose = Purpose.TRAINING,
    split: Split | None = None,
    evaluation: int | None = None,
    policy_version: int = 1,
    seed: int = 0,
    vocabulary: int = 64,
    prompt_tokens: int = 12,
    sampled_tokens: int = 8,
    new_segment_at: int | None = None,
    actor_id: str = "actor-0",
) -> Trajectory:
    """Return a finished trajectory that passes the gate, the same one for the same arguments.

    ``prompt_tokens``/``sampled_tokens`` are mean lengths per step (each varies by up to a half); token ids lie in
    ``[0, vocabulary)``. ``reward`` falls on the last step as component ``total``. The split follows the purpose, and an
    evaluation purpose belongs to evaluation 0, unless given. ``new_segment_at`` names a step whose prompt rewrites
    history. ``success`` defaults to ``reward > 0``.
    """
    random = np.random.default_rng(
        (seed, issue, sample, attempt, 0 if evaluation is None else evaluation + 1)
    )
    if split is None:
        split = Split.TRAIN if purpose == Purpose.TRAINING else Split.HOLDOUT
    if evaluation is None and purpose != Purpose.TRAINING:
        evaluation = 0
    content = f'{{"issue":{issue},"split":"{split.value}"}}'
    shared = {
        **_identity(issue, sample, attempt, evaluation),
        "run_id": run_id,
        "task_id": task_id("fake", content),
        "split": split.value,
        "purpose": purpose.value,
        "actor_id": actor_id,
        "policy_version": policy_version,
    }
    steps: list[StepRow] = []
    for number in range(num_steps):
        last = number == num_steps - 1
        steps.append(
            _make_step(
                shared, steps, random, (prompt_tokens, sampled_tokens), vocabulary,
                rewards=(reward,) if last else (),
                last=last,
                rewrites=number == new_segment_at,
                seed=seed, issue=issue, sample=sample,
            )
        )  # fmt: skip
    row = _summary(
        shared, steps, content, evaluation, reward, success=reward > 0 if success is None else success
    )
    return Trajectory(row=row, steps=tuple(steps))


def make_fork(
    parent: Trajectory,
    step: int,
    *,
    number: int = 1,
    num_steps: int = 1,
    reward: float = 1.0,
    success: bool | None = None,
    policy_version: int | None = None,
    seed: int = 0,
    vocabulary: int = 64,
    prompt_tokens: int = 6,
    sampled_tokens: int = 8,
) -> Trajectory:
    """Return fork ``number`` (from 1) of ``parent`` at its step ``step``; parent and fork pass the gate.

    The prompt of its step 0 repeats what the model saw before it sampled the parent's step ``step`` (given tokens now, with
    the stages they had), then about ``prompt_tokens`` tokens of its own (0: none). It belongs to the parent's attempt, so
    the store takes both in one call. ``policy_version`` defaults to that of the parent's step. Raises IndexError where
    the parent has no such step.
    """
    origin = parent.steps[step]
    columns = (
        "run_id", "episode_id", "group_id", "attempt_id", "task_id", "split", "purpose", "actor_id", "actor_group",
        "env_version", "reward_version", "prompt_version", "schema_version",
    )  # fmt: skip
    shared = {
        **{name: getattr(parent.row, name) for name in columns},
        "trajectory_id": f"{parent.row.trajectory_id}/{number}",
        "policy_version": origin.policy_version if policy_version is None else policy_version,
    }
    random = np.random.default_rng((seed, origin.issue, origin.sample, step, number))
    steps: list[StepRow] = []
    for place in range(num_steps):
        last = place == num_steps - 1
        made = _make_step(
            shared, steps, random, (prompt_tokens, sampled_tokens), vocabulary,
            rewards=(reward,) if last else (),
            last=last,
            rewrites=False,
            seed=origin.seed, issue=origin.issue, sample=origin.sample,
        )  # fmt: skip
        steps.append(made if place else _taken_over(made, parent, origin, own=prompt_tokens > 0))
    row = _summary(
        shared, steps, parent.row.task_content, parent.row.evaluation, reward,
        success=reward > 0 if success is None else success,
    )  # fmt: skip
    row = dataclasses.replace(row, parent_trajectory_id=parent.row.trajectory_id, fork_step=step)
    return Trajectory(row=row, steps=tuple(steps))


def _taken_over(made: StepRow, parent: Trajectory, origin: StepRow, *, own: bool) -> StepRow:
    """Return the first step of a fork: ``made`` behind the context of ``origin``, from where on its time counts."""
    before = [s for s in parent.steps[: origin.step] if s.segment == origin.segment]
    chunks = [tokens for s in before for tokens in (s.prompt_tokens, s.sampled_tokens)]
    spans = [pair for s in before for pair in zip(s.span_stage, s.span_length, strict=True)]
    spans += _first_tokens(origin, len(origin.prompt_tokens))
    if own:
        spans += [(Stage.INSTRUCTION.value, len(made.prompt_tokens))]
    spans += _split(len(made.sampled_tokens), (Stage.THOUGHT, Stage.ANSWER))
    prompt = np.concatenate([*chunks, origin.prompt_tokens, *([made.prompt_tokens] if own else [])])
    late = origin.started_us - made.started_us
    return dataclasses.replace(
        made,
        prompt_tokens=prompt,
        span_stage=tuple(str(stage) for stage, _ in spans),
        span_length=tuple(length for _, length in spans),
        context_tokens=len(prompt),
        prefix_hash=prefix_hash(prompt),
        reused_tokens=origin.context_tokens,
        started_us=made.started_us + late,
        generated_us=made.generated_us + late,
        finished_us=made.finished_us + late,
    )


def _first_tokens(step: StepRow, count: int) -> list[tuple[str, int]]:
    """Return the spans that cover the first ``count`` tokens of a step."""
    ends = np.cumsum(step.span_length)
    return [
        (stage, length)
        for stage, length, end in zip(step.span_stage, step.span_length, ends, strict=True)
        if end <= count
    ]


def make_leases(trajectories: Iterable[Trajectory]) -> list[Lease]:
    """Return the lease each trajectory's attempt needs on the ledger before the store takes it."""
    rows = {trajectory.row.attempt_id: trajectory.row for trajectory in trajectories}
    return [Lease.of(row) for row in rows.values()]


def make_group(
    *, issue: int = 0, size: int = 8, rewards: tuple[float, ...] = (0.0, 1.0), seed: int = 0, **keywords: Any
) -> list[Trajectory]:
    """Return ``size`` trajectories of one issued task; their rewards cycle through ``rewards``."""
    return [
        make_trajectory(
            issue=issue, sample=sample, reward=rewards[sample % len(rewards)], seed=seed, **keywords
        )
        for sample in range(size)
    ]


def _identity(issue: int, sample: int, attempt: int, evaluation: int | None) -> dict[str, Any]:
    """Return the columns that every step and the summary share, as far as no argument of the builder changes them."""
    return {
        "trajectory_id": attempt_id(issue, sample, attempt, evaluation=evaluation),
        "episode_id": episode_id(issue, sample, evaluation=evaluation),
        "group_id": group_id(issue, evaluation=evaluation),
        "attempt_id": attempt_id(issue, sample, attempt, evaluation=evaluation),
        "actor_group": "group-0",
        "env_version": ENV_VERSION,
        "reward_version": REWARD_VERSION,
        "prompt_version": PROMPT_VERSION,
        "schema_version": SCHEMA_VERSION,
    }


def _summary(
    shared: dict[str, Any],
    steps: list[StepRow],
    content: str,
    evaluation: int | None,
    reward: float,
    *,
    success: bool,
) -> TrajectoryRow:
    return TrajectoryRow(
        **shared,
        task_content=content,
        env="fake",
        evaluation=evaluation,
        parent_trajectory_id=None,
        fork_step=None,
        num_turns=1,
        num_steps=len(steps),
        num_segments=1 + steps[-1].segment,
        num_prompt_tokens=sum(len(step.prompt_tokens) for step in steps),
        num_sampled_tokens=sum(len(step.sampled_tokens) for step in steps),
        reward=reward,
        reward_names=("total",),
        reward_values=(reward,),
        success=success,
        end_reason=EndReason.ANSWERED.value,
        tool_errors=0,
        started_us=steps[0].started_us,
        finished_us=steps[-1].finished_us,
    )


def _make_step(
    shared: dict[str, Any],
    before: list[StepRow],
    random: np.random.Generator,
    lengths: tuple[int, int],
    vocabulary: int,
    *,
    rewards: tuple[float, ...],
    last: bool,
    rewrites: bool,
    seed: int,
    issue: int,
    sample: int,
) -> StepRow:
    prompt = _tokens(random, max(1, lengths[0]), vocabulary)
    sampled = _tokens(random, lengths[1], vocabulary)
    previous = before[-1] if before else None
    fresh = previous is None or rewrites
    if previous is None or rewrites:
        chain, context = "", 0
    else:
        chain = prefix_hash(previous.sampled_tokens, extends=previous.prefix_hash)
        context = previous.context_tokens + len(previous.sampled_tokens)
    stages, spans = _spans(len(prompt), len(sampled), opening=fresh, last=last)
    begin = EPOCH_US + 1_000_000 * issue if previous is None else previous.finished_us
    greedy = shared["purpose"] == Purpose.EVALUATION_GREEDY
    model_logprobs = -random.exponential(0.7, len(sampled)).astype(np.float32)
    return StepRow(
        **shared,
        turn=0,
        step=len(before),
        segment=0 if previous is None else previous.segment + int(rewrites),
        prompt_tokens=prompt,
        sampled_tokens=sampled,
        behaviour_logprobs=np.zeros_like(model_logprobs) if greedy else model_logprobs.copy(),
        model_logprobs=model_logprobs,
        span_stage=stages,
        span_length=spans,
        context_tokens=context + len(prompt),
        prefix_hash=prefix_hash(prompt, extends=chain),
        context_change=ContextChange.NONE.value,
        context_dropped_tokens=0,
        reward=float(sum(rewards)),
        reward_names=("total",) * len(rewards),
        reward_values=rewards,
        tool_name=None if last else "find",
        tool_error=False,
        finish=FinishReason.STOP.value,
        policy_checksum=f"{shared['policy_version']:032x}",
        span_policy_version=(shared["policy_version"],),
        span_policy_length=(len(sampled),),
        temperature=0.0 if greedy else 1.0,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.0,
        seed=seed,
        issue=issue,
        sample=sample,
        engine="fake",
        precision="float32",
        device="cpu",
        num_threads=1,
        reused_tokens=0 if fresh else context,
        num_preemptions=0,
        started_us=begin,
        generated_us=begin + 1_000 + int(random.integers(1_000)),
        finished_us=begin + 3_000,
        queue_s=0.0001,
        generate_s=0.001,
        environment_s=0.001,
    )


def _tokens(random: np.random.Generator, mean: int, vocabulary: int) -> NDArray[np.int32]:
    count = int(random.integers(max(1, mean // 2), mean + mean // 2 + 1))
    return random.integers(0, vocabulary, count, dtype=np.int32)


def _spans(
    num_prompt: int, num_sampled: int, *, opening: bool, last: bool
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    given = (Stage.SYSTEM, Stage.INSTRUCTION) if opening else (Stage.TOOL_RESULT,)
    made = (Stage.THOUGHT, Stage.ANSWER if last else Stage.TOOL_CALL)
    pairs = [*_split(num_prompt, given), *_split(num_sampled, made)]
    return tuple(stage.value for stage, _ in pairs), tuple(length for _, length in pairs)


def _split(count: int, stages: tuple[Stage, ...]) -> list[tuple[Stage, int]]:
    head = count // 2 if len(stages) > 1 else 0
    pairs = [(stages[0], head), (stages[-1], count - head)]
    return [(stage, length) for stage, length in pairs if length]


def _plain_value(hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return None
    if origin is tuple:
        return ()
    if origin is np.ndarray:
        return np.zeros(0, dtype=typing.get_args(arguments[1])[0])
    return {int: 0, float: 0.0, str: "x", bool: False}[hint]
