"""From trajectories to batches, minibatches and micro-batches: what is computed together, and in which order.

Owns the batch's fixed order and its hash, the deal of trajectories to optimiser steps, and the cut of a step into
passes that fit. Knows no model and no loss.

A batch holds every *loss token* (a sampled token of a group with signal) once, in one flat numbering 0..N-1: sequences
in the order of (group, trajectory, segment, begin), tokens by position. Whatever is computed for loss tokens is an array
``[N]`` in that numbering.

Invariants: order of arrival changes nothing; a trajectory's segments stay in one minibatch; the deal depends on
(seed, update, epoch, trajectory ids and lengths) alone; a pass never exceeds its padded-token budget.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hotpot.errors import LearnerError
from hotpot.experience.segments import TrainingSequence
from hotpot.ids import batch_hash
from hotpot.learner.advantages import Advantages
from hotpot.learner.order import natural_key

Scalar = TypeVar("Scalar", np.int64, np.float64)

PADDING_MULTIPLE = 8
"""Rows are padded to a multiple of this many tokens: matrix kernels work in blocks of eight."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchSequence:
    """One sequence of a batch. ``loss_positions`` int64 ``[k]`` ascending; its loss tokens are ``start .. start + k``
    of the batch's flat numbering. ``owner`` numbers its trajectory within the batch."""

    sequence: TrainingSequence
    advantage: float
    owner: int
    start: int
    loss_positions: NDArray[np.int64]

    @property
    def stop(self) -> int:
        """One past its last loss token in the flat numbering."""
        return self.start + len(self.loss_positions)

    @property
    def num_inputs(self) -> int:
        """Tokens the model must read: all before the last loss token, which itself is only predicted."""
        return int(self.loss_positions[-1])

    def per_token(self, loss_values: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return ``loss_values`` ``[N]`` of the batch as float32 ``[n]`` over the sequence's tokens, 0 under the mask."""
        out = np.zeros(len(self.sequence.tokens), dtype=np.float32)
        out[self.loss_positions] = loss_values[self.start : self.stop]
        return out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """What one update learns from, in its fixed order.

    ``behaviour_logprobs``, ``model_logprobs``, ``advantages`` float64 ``[N]``, ``policy_versions`` int64 ``[N]``: over
    loss tokens. ``owners`` are the trajectories, in order of first appearance.
    """

    sequences: tuple[BatchSequence, ...]
    owners: tuple[str, ...]
    behaviour_logprobs: NDArray[np.float64]
    model_logprobs: NDArray[np.float64]
    advantages: NDArray[np.float64]
    policy_versions: NDArray[np.int64]
    hash: str

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, given and sampled."""
        return sum(len(member.sequence.tokens) for member in self.sequences)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens the loss falls on."""
        return len(self.advantages)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One forward (and backward) pass: right-padded rows behind a prefix they share.

    ``prefix`` int64 ``[P]`` (may be empty) is computed once; ``tokens`` int64 ``[B, L]`` follow it in each row, padded
    with 0. For each of the pass's loss tokens, int64 ``[k]``: ``rows`` and ``columns`` of the *preceding* token, whose
    hidden state predicts it, ``targets`` its id, ``flat`` its number in the batch. ``num_padding`` tokens of padding.
    """

    prefix: NDArray[np.int64]
    tokens: NDArray[np.int64]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    targets: NDArray[np.int64]
    flat: NDArray[np.int64]
    num_padding: int

    @property
    def num_shared(self) -> int:
        """Tokens that are not computed again because the rows share them."""
        return len(self.prefix) * (len(self.tokens) - 1)


def order_sequences(sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """Return ``sequences`` in the batch's order: by group, trajectory, segment and begin; numbers inside ids as numbers."""
    return sorted(
        sequences, key=lambda s: (natural_key(s.group_id), natural_key(s.trajectory_id), s.segment, s.begin)
    )


def build_batch(sequences: Sequence[TrainingSequence], advantages: Advantages) -> Batch:
    """Return the batch of those ``sequences`` that have loss tokens and whose group was kept.

    The hash covers, per sequence in order, the columns of ``learned_tokens``: tokens int32, mask int32, behaviour
    log-probabilities float32 and advantages float32, the last two 0 under the mask; then its weight, float32 ``[1]``.
    """
    members: list[BatchSequence] = []
    owners: dict[str, int] = {}
    start = 0
    for sequence in order_sequences(sequences):
        positions = np.flatnonzero(sequence.loss_mask).astype(np.int64)
        if sequence.group_id not in advantages.kept or not len(positions):
            continue
        owner = owners.setdefault(sequence.trajectory_id, len(owners))
        member = BatchSequence(
            sequence=sequence,
            advantage=advantages.by_trajectory[sequence.trajectory_id],
            owner=owner,
            start=start,
            loss_positions=positions,
        )
        members.append(member)
        start = member.stop
    behaviour = _gather([(m.sequence.behaviour_logprobs, m.loss_positions) for m in members], np.float64)
    model = _gather([(m.sequence.model_logprobs, m.loss_positions) for m in members], np.float64)
    versions = _gather([(m.sequence.token_policy_version, m.loss_positions) for m in members], np.int64)
    advantage = np.repeat(
        np.array([m.advantage for m in members], dtype=np.float64), [len(m.loss_positions) for m in members]
    )
    parts: list[NDArray[np.int32] | NDArray[np.float32]] = []
    for m in members:
        mask = np.zeros(len(m.sequence.tokens), dtype=np.int32)
        mask[m.loss_positions] = 1
        parts += [m.sequence.tokens.astype(np.int32), mask, m.per_token(behaviour), m.per_token(advantage)]
        parts.append(np.array([m.sequence.weight], dtype=np.float32))
    return Batch(
        sequences=tuple(members),
        owners=tuple(owners),
        behaviour_logprobs=behaviour,
        model_logprobs=model,
        advantages=advantage,
        policy_versions=versions,
        hash=batch_hash(parts),
    )


def deal(batch: Batch, *, minibatches: int, seed: int, update: int, epoch: int) -> list[list[BatchSequence]]:
    """Deal the batch's trajectories to at most ``minibatches`` optimiser steps, evenly by token count.

    Trajectories are taken from the longest down in rounds of ``minibatches``, one to each step at random; a last
    incomplete round goes to the lightest steps. So the steps' trajectory counts differ by at most 1 and their token
    counts by at most the longest trajectory. Randomness is a hash of (seed, update, epoch, trajectory id).
    """
    lengths = [0] * len(batch.owners)
    for member in batch.sequences:
        lengths[member.owner] += len(member.sequence.tokens)

    def draw(owner: int) -> bytes:
        text = f"minibatch\n{seed}\n{update}\n{epoch}\n{batch.owners[owner]}"
        return hashlib.sha256(text.encode()).digest()

    draws = [draw(owner) for owner in range(len(batch.owners))]
    order = sorted(range(len(batch.owners)), key=lambda owner: (-lengths[owner], draws[owner]))
    hands: list[set[int]] = [set() for _ in range(min(minibatches, len(order)))]
    loads = [0] * len(hands)
    for begin in range(0, len(order), max(len(hands), 1)):
        dealt = sorted(order[begin : begin + len(hands)], key=lambda owner: draws[owner])
        seats = list(range(len(hands)))
        if len(dealt) < len(hands):
            seats.sort(key=lambda seat: loads[seat])
        for owner, seat in zip(dealt, seats, strict=False):
            hands[seat].add(owner)
            loads[seat] += lengths[owner]
    return [[member for member in batch.sequences if member.owner in hand] for hand in hands]


def cut(members: Sequence[BatchSequence], *, max_tokens: int) -> list[MicroBatch]:
    """Cut ``members`` into passes of at most ``max_tokens`` padded tokens, rows of like length together.

    Raises :class:`LearnerError` where a single sequence is longer than that.
    """
    passes: list[list[BatchSequence]] = []
    for member in sorted(members, key=lambda m: (m.num_inputs, m.start)):
        if member.num_inputs > max_tokens:
            raise LearnerError(
                f"trajectory {member.sequence.trajectory_id!r} needs {member.num_inputs} tokens in one pass, more than "
                f"learner.micro_batch_tokens = {max_tokens}; raise that, or lower rollout.max_context_tokens"
            )
        width = min(padded(member.num_inputs), max_tokens)
        if not passes or (len(passes[-1]) + 1) * width > max_tokens:
            passes.append([])
        passes[-1].append(member)
    return [lay_out(rows, max_width=max_tokens) for rows in passes]


def lay_out(members: Sequence[BatchSequence], *, max_width: int | None = None) -> MicroBatch:
    """Return the pass over ``members``: their longest common prefix once, the rest as right-padded rows.

    ``max_width`` bounds the padding, not the tokens: rows are never padded beyond it.
    """
    shared = shared_prefix(members)
    longest = max(member.num_inputs for member in members) - shared
    width = padded(longest) if max_width is None else max(longest, min(padded(longest), max_width))
    tokens = np.zeros((len(members), width), dtype=np.int64)
    for row, member in enumerate(members):
        inputs = member.sequence.tokens[shared : member.num_inputs]
        tokens[row, : len(inputs)] = inputs
    positions = [member.loss_positions for member in members]
    return MicroBatch(
        prefix=members[0].sequence.tokens[:shared].astype(np.int64),
        tokens=tokens,
        rows=np.repeat(np.arange(len(members)), [len(p) for p in positions]),
        columns=np.concatenate(positions) - 1 - shared,
        targets=_gather([(m.sequence.tokens, m.loss_positions) for m in members], np.int64),
        flat=np.concatenate([np.arange(m.start, m.stop) for m in members]),
        num_padding=int(tokens.size - sum(member.num_inputs - shared for member in members)),
    )


def shared_prefix(members: Sequence[BatchSequence]) -> int:
    """Return how many leading tokens all ``members`` share, stopping before the first that predicts a loss token.

    0 for a single row: nothing would be saved.
    """
    if len(members) < 2:
        return 0
    limit = min(int(member.loss_positions[0]) - 1 for member in members)
    first = members[0].sequence.tokens[:limit]
    for member in members[1:]:
        differs = np.flatnonzero(first != member.sequence.tokens[: len(first)])
        if len(differs):
            first = first[: differs[0]]
    return len(first)


def padded(length: int) -> int:
    """Return ``length`` rounded up to a multiple of :data:`PADDING_MULTIPLE`."""
    return -(-length // PADDING_MULTIPLE) * PADDING_MULTIPLE


def check_sequences(
    sequences: Sequence[TrainingSequence], *, vocab_size: int, max_context_tokens: int
) -> None:
    """Raise :class:`LearnerError` where a sequence cannot be learned from, naming it and the rule."""
    ordered = order_sequences(sequences)
    for key, same in groupby(ordered, key=lambda s: (s.trajectory_id, s.segment)):
        if len(list(same)) > 1:
            raise LearnerError(
                f"segment {key[1]} of trajectory {key[0]!r} stands twice in one batch; give each segment once"
            )
    for trajectory, same in groupby(ordered, key=lambda s: s.trajectory_id):
        if len({(s.group_id, s.reward) for s in same if s.reward == s.reward}) > 1:
            raise LearnerError(
                f"the segments of trajectory {trajectory!r} differ in group or reward; both belong to the whole "
                "trajectory, so give every segment the same"
            )
    for s in ordered:
        _check_arrays(s, vocab_size=vocab_size, max_context_tokens=max_context_tokens)


def _check_arrays(s: TrainingSequence, *, vocab_size: int, max_context_tokens: int) -> None:
    arrays = (s.tokens, s.loss_mask, s.behaviour_logprobs, s.model_logprobs, s.token_policy_version)
    problem = ""
    if s.loss_mask.dtype != np.bool_:
        problem = f"has a loss mask of type {s.loss_mask.dtype}; it must be bool"
    elif len({array.shape for array in arrays}) > 1 or s.tokens.ndim != 1:
        problem = f"has arrays of shapes {[array.shape for array in arrays]}; all must be [n]"
    elif len(s.tokens) and s.loss_mask[0]:
        problem = "has a loss on its first token, which nothing predicts; mask it"
    elif len(s.tokens) > max_context_tokens:
        problem = f"has {len(s.tokens)} tokens, more than the model's context of {max_context_tokens}; cut it"
    elif len(s.tokens) and not 0 <= int(s.tokens.min()) <= int(s.tokens.max()) < vocab_size:
        problem = f"has token ids outside 0..{vocab_size - 1}; it was made with another tokenizer"
    if problem:
        raise LearnerError(f"segment {s.segment} of trajectory {s.trajectory_id!r} {problem}")


def _gather(parts: Sequence[tuple[NDArray[Any], NDArray[np.int64]]], dtype: type[Scalar]) -> NDArray[Scalar]:
    """Return the picked entries of all ``parts`` (values, positions) one after the other, as ``dtype``."""
    return (
        np.concatenate([values[positions].astype(dtype) for values, positions in parts], axis=0, dtype=dtype)
        if parts
        else np.zeros(0, dtype=dtype)
    )
