"""Many trajectories as a few flat arrays: the fast way from blocks to a learner.

Owns :class:`FlatBatch` and its making. No Python loop goes over tokens or steps: each list column of each trajectory is
one slice, one concatenation per column joins them, and the mask puts given and sampled tokens in their places.

Invariant: the sequences of a flat batch equal those of :func:`hotpot.experience.sequences` bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotpot.experience.replay.block import Block
from hotpot.experience.segments import TrainingSequence

_VALUES = ("prompt_tokens", "sampled_tokens", "behaviour_logprobs", "model_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatBatch:
    """``k`` trajectories with ``T`` tokens in all; trajectory i has the tokens ``offsets[i]:offsets[i + 1]``.

    ``offsets`` int64 ``[k + 1]``; ``rewards`` float64 ``[k]``; over tokens ``[T]``: ``tokens`` int32, ``loss_mask`` bool
    (true where sampled), ``behaviour_logprobs`` and ``model_logprobs`` float32 (0 under the mask),
    ``token_policy_version`` int32 (-1 under the mask), ``segments`` int32.
    """

    trajectory_ids: tuple[str, ...]
    group_ids: tuple[str, ...]
    offsets: NDArray[np.int64]
    rewards: NDArray[np.float64]
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    behaviour_logprobs: NDArray[np.float32]
    model_logprobs: NDArray[np.float32]
    token_policy_version: NDArray[np.int32]
    segments: NDArray[np.int32]

    def sequences(self) -> list[TrainingSequence]:
        """Return one training sequence per segment of each trajectory, in order: views into the batch."""
        begins = np.concatenate([[True], self.segments[1:] != self.segments[:-1]])
        begins[self.offsets[:-1]] = True
        edges = np.append(np.flatnonzero(begins), len(self.tokens))
        owners = np.searchsorted(self.offsets, edges[:-1], side="right") - 1
        return [
            self._sequence(int(owner), slice(int(begin), int(end)))
            for owner, begin, end in zip(owners, edges[:-1], edges[1:], strict=True)
        ]

    def _sequence(self, owner: int, part: slice) -> TrainingSequence:
        return TrainingSequence(
            trajectory_id=self.trajectory_ids[owner],
            group_id=self.group_ids[owner],
            segment=int(self.segments[part.start]),
            tokens=self.tokens[part],
            loss_mask=self.loss_mask[part],
            behaviour_logprobs=self.behaviour_logprobs[part],
            model_logprobs=self.model_logprobs[part],
            token_policy_version=self.token_policy_version[part],
            reward=float(self.rewards[owner]),
        )


class FlatColumns:
    """The columns of one block that a learner reads, as NumPy views. Made once per block, then reused."""

    def __init__(self, block: Block) -> None:
        steps = block.steps
        lists = {
            name: _ragged(steps, name) for name in (*_VALUES, "span_policy_version", "span_policy_length")
        }
        bounds = block.step_bounds
        self._values = {name: lists[name][0] for name in lists}
        self._edges = {name: lists[name][1][bounds] for name in lists}
        self._lengths = np.empty((steps.num_rows, 2), np.int64)
        self._lengths[:, 0] = np.diff(lists["prompt_tokens"][1])
        self._lengths[:, 1] = np.diff(lists["sampled_tokens"][1])
        self._segments = _numbers(steps, "segment")
        self._bounds = bounds
        self.block = block

    def slices(self, name: str, places: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Return the values of a list column, one view per trajectory of ``places``."""
        values, edges = self._values[name], self._edges[name]
        pairs = zip(edges[places].tolist(), edges[places + 1].tolist(), strict=True)
        return [values[begin:end] for begin, end in pairs]

    def step_slices(self, places: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return per trajectory of ``places``: its steps' numbers of given and sampled tokens ``[s, 2]``, and segments."""
        pairs = zip(self._bounds[places].tolist(), self._bounds[places + 1].tolist(), strict=True)
        return [(self._lengths[begin:end], self._segments[begin:end]) for begin, end in pairs]


def flatten(parts: Sequence[tuple[FlatColumns, NDArray[np.int64], NDArray[np.int64]]]) -> FlatBatch:
    """Return the flat batch of ``parts``: columns, places in their block, and places in the batch, which all fill it."""
    size = sum(len(places) for _, places, _ in parts)
    joined = {
        name: _joined([(columns.slices(name, places), at) for columns, places, at in parts], size)
        for name in (*_VALUES, "span_policy_version", "span_policy_length")
    }
    steps = _placed([(columns.step_slices(places), at) for columns, places, at in parts], size)
    lengths = np.concatenate([length for length, _ in steps]) if size else np.zeros((0, 2), np.int64)
    step_segments = np.concatenate([segment for _, segment in steps]) if size else np.zeros(0, np.int64)
    step_tokens = lengths.sum(axis=1)
    ends = np.cumsum(step_tokens)
    step_ends = np.cumsum([len(segment) for _, segment in steps], dtype=np.int64)
    mask = np.repeat(np.tile([False, True], len(lengths)), lengths.ravel())
    sampled = np.flatnonzero(mask)
    tokens = np.empty(len(mask), np.int32)
    tokens[np.flatnonzero(~mask)] = joined["prompt_tokens"]
    tokens[sampled] = joined["sampled_tokens"]
    versions = np.repeat(joined["span_policy_version"], joined["span_policy_length"]).astype(np.int32)
    trajectory_ids, group_ids, rewards = _described(parts, size)
    return FlatBatch(
        trajectory_ids=trajectory_ids,
        group_ids=group_ids,
        offsets=np.concatenate([[0], ends[step_ends - 1]]) if size else np.zeros(1, np.int64),
        rewards=rewards,
        tokens=tokens,
        loss_mask=mask,
        behaviour_logprobs=_spread(joined["behaviour_logprobs"], sampled, len(mask), 0, np.float32),
        model_logprobs=_spread(joined["model_logprobs"], sampled, len(mask), 0, np.float32),
        token_policy_version=_spread(versions, sampled, len(mask), -1, np.int32),
        segments=np.repeat(step_segments.astype(np.int32), step_tokens),
    )


def _described(
    parts: Sequence[tuple[FlatColumns, NDArray[np.int64], NDArray[np.int64]]], size: int
) -> tuple[tuple[str, ...], tuple[str, ...], NDArray[np.float64]]:
    ids, groups = [""] * size, [""] * size
    rewards = np.zeros(size)
    for columns, places, at in parts:
        rows: Any = columns.block.rows.select(["trajectory_id", "group_id", "reward"]).take(places)
        found = zip(rows.column(0).to_pylist(), rows.column(1).to_pylist(), at, strict=True)
        for trajectory_id, group_id, place in found:
            ids[place], groups[place] = trajectory_id, group_id
        rewards[at] = rows.column(2).to_numpy()
    return tuple(ids), tuple(groups), rewards


def _spread(values: NDArray[Any], at: NDArray[np.int64], size: int, rest: int, kind: type) -> NDArray[Any]:
    out: NDArray[Any] = np.full(size, rest, kind)
    out[at] = values
    return out


def _placed(parts: Sequence[tuple[list[Any], NDArray[np.int64]]], size: int) -> list[Any]:
    out: list[Any] = [None] * size
    for values, at in parts:
        for value, place in zip(values, at.tolist(), strict=True):
            out[place] = value
    return out


def _joined(parts: Sequence[tuple[list[NDArray[Any]], NDArray[np.int64]]], size: int) -> NDArray[Any]:
    return np.concatenate(_placed(parts, size)) if size else np.zeros(0)


def _ragged(steps: Any, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    array = _chunk(steps, name)
    return array.values.to_numpy(zero_copy_only=True), array.offsets.to_numpy().astype(np.int64)


def _numbers(steps: Any, name: str) -> NDArray[np.int64]:
    found: NDArray[np.int64] = _chunk(steps, name).to_numpy(zero_copy_only=True)
    return found


def _chunk(steps: Any, name: str) -> Any:
    column = steps.column(name)
    return column.chunk(0) if column.num_chunks else column.combine_chunks()
