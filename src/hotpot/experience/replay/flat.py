"""Many trajectories as a few flat arrays: the fast way from blocks to a learner.

Owns :class:`FlatBatch`, and :class:`FlatBlock`, the form of a block that makes it cheap: given and sampled tokens of a
step in one list, log-probabilities beside them (0 at given tokens). Then each column of each trajectory is one slice, one
concatenation joins them, and no Python loop goes over tokens or steps.

Invariants: the sequences of a flat batch equal those of :func:`hotpot.experience.sequences` bit for bit; a flat block
gives back the trajectories it was made of.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotpot.experience.records.schema import SCHEMAS
from hotpot.experience.replay.block import Block
from hotpot.experience.sequences.segments import TrainingSequence
from hotpot.types import Trajectory

_GIVEN, _SAMPLED = "prompt_tokens", "sampled_tokens"
_LOGPROBS = ("behaviour_logprobs", "model_logprobs")


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
        """Return one training sequence per segment of each trajectory, in order: views into the batch.

        Rewards by token and whether a limit cut the episode are not among the arrays, and left out.
        """
        if not len(self.tokens):
            return []
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


class FlatBlock:
    """A block whose table ``steps`` has all tokens of a step in ``prompt_tokens``, and log-probabilities over all of them.

    ``sampled_tokens`` is empty in it, and a column ``num_prompt`` more says how many tokens were given. Made by
    :meth:`of`, or from tables in this form.
    """

    def __init__(self, block: Block) -> None:
        self.block = block

    @classmethod
    def of(cls, block: Block) -> "FlatBlock":
        """Return the flat form of a block."""
        steps = block.steps
        given, given_edges = _ragged(steps, _GIVEN)
        sampled, sampled_edges = _ragged(steps, _SAMPLED)
        edges = given_edges + sampled_edges
        mask = _mask(np.diff(given_edges), np.diff(sampled_edges))
        tokens = np.empty(len(mask), np.int32)
        tokens[mask], tokens[~mask] = sampled, given
        steps = _with_list(steps, _GIVEN, edges, tokens)
        steps = _with_list(steps, _SAMPLED, np.zeros_like(edges), tokens[:0])
        for name in _LOGPROBS:
            values = np.zeros(len(mask), np.float32)
            values[mask] = _ragged(block.steps, name)[0]
            steps = _with_list(steps, name, edges, values)
        return cls(Block(block.rows, steps.append_column("num_prompt", pa.array(np.diff(given_edges)))))

    def trajectories(self, places: NDArray[np.int64]) -> list[Trajectory]:
        """Return the trajectories at ``places``, in their order."""
        part = self.block.take(places)
        steps = part.steps
        tokens, edges = _ragged(steps, _GIVEN)
        num_prompt = _chunk(steps, "num_prompt").to_numpy()
        num_sampled = np.diff(edges) - num_prompt
        mask = _mask(num_prompt, num_sampled)
        sampled_edges = _edges(num_sampled)
        steps = _with_list(steps, _GIVEN, _edges(num_prompt), tokens[~mask])
        steps = _with_list(steps, _SAMPLED, sampled_edges, tokens[mask])
        for name in _LOGPROBS:
            steps = _with_list(steps, name, sampled_edges, _ragged(part.steps, name)[0][mask])
        restored = Block(part.rows, steps.drop_columns(["num_prompt"]))
        return restored.trajectories(np.arange(len(places)))

    @cached_property
    def columns(self) -> dict[str, NDArray[Any]]:
        """Values of tokens, log-probabilities and what :meth:`_runs` made, of the whole block."""
        return {name: values for name, (values, _) in self._lists.items()}

    @cached_property
    def bounds(self) -> dict[str, NDArray[np.int64]]:
        """Where the values of each trajectory begin, by kind of column (:data:`_KINDS`), int64 ``[n + 1]``."""
        return {name: self._lists[name][1] for name in _KINDS}

    @cached_property
    def _lists(self) -> dict[str, tuple[NDArray[Any], NDArray[np.int64]]]:
        bounds = self.block.step_bounds
        lists = {name: _ragged(self.block.steps, name) for name in (_GIVEN, *_LOGPROBS)}
        found = {name: (values, edges[bounds]) for name, (values, edges) in lists.items()}
        steps = np.diff(lists[_GIVEN][1])
        segments = _chunk(self.block.steps, "segment").to_numpy().astype(np.int32)
        return {**found, "segment": (segments, bounds), "length": (steps, bounds), **self._runs(steps)}

    def _runs(self, lengths: NDArray[np.int64]) -> dict[str, tuple[NDArray[Any], NDArray[np.int64]]]:
        """Return runs of tokens with one policy version: per step a run of -1 over given tokens, then its spans."""
        steps = self.block.steps
        versions, edges = _ragged(steps, "span_policy_version")
        spans, _ = _ragged(steps, "span_policy_length")
        firsts = edges[:-1] + np.arange(len(lengths))
        values = np.full(len(versions) + len(lengths), -1, np.int32)
        sizes = np.zeros(len(values), np.int64)
        sizes[firsts] = _chunk(steps, "num_prompt").to_numpy()
        rest = np.ones(len(values), np.bool_)
        rest[firsts] = False
        values[rest], sizes[rest] = versions, spans
        bounds = np.append(firsts, len(values))[self.block.step_bounds]
        return {"run": (values, bounds), "run_length": (sizes, bounds)}


Part = tuple[FlatBlock, NDArray[np.int64], NDArray[np.int64]]
"""A block, places in it, and as many places in the batch."""

Columns = dict[str, NDArray[Any]]

_KINDS = {_GIVEN: (_GIVEN, *_LOGPROBS), "segment": ("segment", "length"), "run": ("run", "run_length")}
"""Columns by what they have one value for (token, step, run of tokens): those of one kind are cut at the same places."""


def flatten(
    parts: Sequence[Part], *, ids: Sequence[str], groups: Sequence[str], rewards: NDArray[np.float64]
) -> FlatBatch:
    """Return the flat batch of ``parts``, whose places in the batch fill it; the rest describes the trajectories ``[k]``."""
    joined, lengths = _joined(parts, len(ids))
    versions = np.repeat(joined["run"], joined["run_length"])
    return FlatBatch(
        trajectory_ids=tuple(ids),
        group_ids=tuple(groups),
        offsets=_edges(lengths),
        rewards=rewards,
        tokens=joined[_GIVEN],
        loss_mask=versions >= 0,
        behaviour_logprobs=joined["behaviour_logprobs"].astype(np.float32, copy=False),
        model_logprobs=joined["model_logprobs"].astype(np.float32, copy=False),
        token_policy_version=versions.astype(np.int32, copy=False),
        segments=np.repeat(joined["segment"], joined["length"]),
    )


def _joined(parts: Sequence[Part], size: int) -> tuple[Columns, NDArray[np.int64]]:
    """Return each column of the ``size`` trajectories, one after the other, and their lengths in tokens."""
    owners: list[Columns] = [{}] * size
    begins = {kind: np.zeros(size, np.int64) for kind in _KINDS}
    ends = {kind: np.zeros(size, np.int64) for kind in _KINDS}
    for block, places, at in parts:
        for place in at.tolist():
            owners[place] = block.columns
        for kind, bounds in block.bounds.items():
            begins[kind][at], ends[kind][at] = bounds[places], bounds[places + 1]
    joined: Columns = {}
    for kind, names in _KINDS.items():
        cuts = [slice(*pair) for pair in zip(begins[kind].tolist(), ends[kind].tolist(), strict=True)]
        for name in names:
            pieces = [columns[name][cut] for columns, cut in zip(owners, cuts, strict=True)]
            joined[name] = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
    return joined, ends[_GIVEN] - begins[_GIVEN]


def _mask(given: NDArray[np.int64], sampled: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return false and true by turns: over a step's given tokens, then its sampled ones."""
    lengths = np.stack([given, sampled], axis=1).ravel()
    return np.repeat(np.tile(np.array([False, True]), len(given)), lengths)


def _edges(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _with_list(steps: Any, name: str, edges: NDArray[np.int64], values: NDArray[Any]) -> Any:
    kind = SCHEMAS["steps"].field(name).type
    lists: Any = pa.ListArray
    column = lists.from_arrays(pa.array(edges.astype(np.int32)), pa.array(values), type=kind)
    return steps.set_column(steps.schema.get_field_index(name), name, column)


def _ragged(steps: Any, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the values of a list column and where each list begins in them, from 0."""
    array = _chunk(steps, name)
    edges = array.offsets.to_numpy().astype(np.int64)
    return array.values.to_numpy(zero_copy_only=True)[edges[0] : edges[-1]], edges - edges[0]


def _chunk(steps: Any, name: str) -> Any:
    column = steps.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
