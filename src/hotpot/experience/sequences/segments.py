"""Segments of trajectories as the learner trains on them, from memory or from the record.

Owns the way from a recorded trajectory to tokens with a mask. Knows no batch, advantage or loss.

Invariants: the tokens of a segment are its steps' ``prompt_tokens`` then ``sampled_tokens``, in order; the mask is true
exactly on sampled tokens; what :func:`read_trajectories` returns gives the same sequences, bit for bit, as the
trajectories that were appended.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotpot.experience.reading.reader import RunReader
from hotpot.experience.records.schema import from_table
from hotpot.types import EndReason, StepRow, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingSequence:
    """One segment of a trajectory: its tokens, and which of them the model sampled.

    ``tokens`` int32 ``[n]``; ``loss_mask`` bool ``[n]``, true on sampled tokens; ``behaviour_logprobs`` and
    ``model_logprobs`` float32 ``[n]``, 0 where the mask is false; ``token_policy_version`` int32 ``[n]``, -1 where the
    mask is false; ``reward`` is the whole trajectory's total; ``weight`` multiplies the loss of its tokens; ``begin`` is
    the place of its first token in the segment (above 0 where the segment was cut); ``parent`` is the trajectory it
    forked from, if any: the parent's tokens stand in its first prompt, given and not sampled; ``replayed`` says that it
    was learned from before and drawn again. ``rewards`` float64 ``[n]``: what each token earned, a step's reward on its
    last sampled token, 0 elsewhere; None where that is not known or does not sum to ``reward``. ``truncated`` says that
    the episode did not end but was cut by a limit.
    """

    trajectory_id: str
    group_id: str
    segment: int
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    behaviour_logprobs: NDArray[np.float32]
    model_logprobs: NDArray[np.float32]
    token_policy_version: NDArray[np.int32]
    reward: float
    weight: float = 1.0
    begin: int = 0
    parent: str | None = None
    replayed: bool = False
    rewards: NDArray[np.float64] | None = None
    truncated: bool = False


def sequences(trajectory: Trajectory) -> list[TrainingSequence]:
    """Return one training sequence per segment of the trajectory, in order."""
    earned = _step_rewards(trajectory)
    both = zip(trajectory.steps, earned or [0.0] * len(trajectory.steps), strict=True)
    return [
        _sequence(trajectory, segment, list(steps), has_rewards=earned is not None)
        for segment, steps in itertools.groupby(both, key=lambda pair: pair[0].segment)
    ]


def read_trajectories(reader: RunReader, where: str = "true", params: Sequence[Any] = ()) -> list[Trajectory]:
    """Return the recorded trajectories that meet ``where``, in the order they were recorded, with their steps.

    ``where`` is an SQL condition over the columns of table ``trajectories``, such as ``"purpose = 'training'"``, with
    ``params`` for its ``?``. Raises
    :class:`hotpot.errors.UsageError` where the condition fails.
    """
    rows = from_table("trajectories", reader.table("trajectories", where=where, params=list(params)))
    ids = [row.trajectory_id for row in rows]
    steps = reader.table("steps", where="trajectory_id IN (SELECT unnest(?))", params=[ids])
    by_trajectory: dict[str, list[StepRow]] = {}
    for step in from_table("steps", steps):
        by_trajectory.setdefault(step.trajectory_id, []).append(step)
    return [Trajectory(row=row, steps=tuple(by_trajectory[row.trajectory_id])) for row in rows]


def _step_rewards(trajectory: Trajectory) -> list[float] | None:
    """Return what each step earned, that of steps in which nothing was sampled moved to the step before them.

    None where that does not come to the trajectory's reward (rounding apart): a reward that was computed anew has no
    steps, and one earned before anything was sampled belongs to no token.
    """
    earned = [0.0] * len(trajectory.steps)
    holder = None
    for number, step in enumerate(trajectory.steps):
        holder = number if len(step.sampled_tokens) else holder
        if holder is not None:
            earned[holder] += step.reward
    total = trajectory.row.reward
    return earned if math.isclose(math.fsum(earned), total, rel_tol=1e-9, abs_tol=1e-9) else None


def _sequence(
    trajectory: Trajectory, segment: int, steps: Sequence[tuple[StepRow, float]], *, has_rewards: bool
) -> TrainingSequence:
    size = sum(len(step.prompt_tokens) + len(step.sampled_tokens) for step, _ in steps)
    tokens = np.empty(size, np.int32)
    mask = np.zeros(size, np.bool_)
    behaviour, model = np.zeros(size, np.float32), np.zeros(size, np.float32)
    versions = np.full(size, -1, np.int32)
    rewards = np.zeros(size)
    end = 0
    for step, earned in steps:
        begin = end + len(step.prompt_tokens)
        tokens[end:begin] = step.prompt_tokens
        end = begin + len(step.sampled_tokens)
        tokens[begin:end] = step.sampled_tokens
        mask[begin:end] = True
        behaviour[begin:end] = step.behaviour_logprobs
        model[begin:end] = step.model_logprobs
        versions[begin:end] = np.repeat(step.span_policy_version, step.span_policy_length)
        if end > begin:
            rewards[end - 1] = earned
    return TrainingSequence(
        trajectory_id=trajectory.row.trajectory_id,
        group_id=trajectory.row.group_id,
        segment=segment,
        tokens=tokens,
        loss_mask=mask,
        behaviour_logprobs=behaviour,
        model_logprobs=model,
        token_policy_version=versions,
        reward=trajectory.row.reward,
        parent=trajectory.row.parent_trajectory_id,
        rewards=rewards if has_rewards else None,
        truncated=trajectory.row.end_reason != EndReason.ANSWERED,
    )
