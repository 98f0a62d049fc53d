"""From trajectories to batches and minibatches: what an update learns from, in which order, in which steps.

Owns the batch's fixed order and its hash, and the deal of trajectories to optimiser steps. Knows no model, no loss and
no forward pass (see :mod:`hotpot.learner.batches.passes`).

A batch holds every *loss token* (a sampled token of a group with signal) once, in one flat numbering 0..N-1: sequences
in the order of (group, trajectory, segment, begin), tokens by position. Whatever is computed for loss tokens is an array
``[N]`` in that numbering.

Invariants: order of arrival changes nothing; a trajectory's segments and pieces stay in one minibatch, and so do a
trajectory and its forks (else the prefix they share is computed in each of their minibatches); the deal depends on
(seed, update, epoch, trajectory ids, their parents and lengths) alone, and not on which try at an episode succeeded.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hotpot.experience.sequences.segments import TrainingSequence
from hotpot.ids import batch_hash, first_try
from hotpot.learner.batches.states import PieceEstimates, PieceKey, piece_key
from hotpot.learner.estimators.advantages import Advantages
from hotpot.learner.estimators.merging import Estimate, Merge, action_places, own_advantages, places_within
from hotpot.learner.order import natural_key

Scalar = TypeVar("Scalar", np.int64, np.float64)


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

    ``behaviour_logprobs``, ``model_logprobs``, ``advantages``, ``returns`` float64 ``[N]``, ``policy_versions`` int64
    ``[N]``: over loss tokens. ``values`` float64 ``[N]``: those of the critic the advantages were estimated with, None
    without one; the returns are then what it is to learn, else the trajectory's reward. ``owners`` are the trajectories, in
    order of first appearance.
    """

    sequences: tuple[BatchSequence, ...]
    owners: tuple[str, ...]
    behaviour_logprobs: NDArray[np.float64]
    model_logprobs: NDArray[np.float64]
    advantages: NDArray[np.float64]
    returns: NDArray[np.float64]
    values: NDArray[np.float64] | None
    policy_versions: NDArray[np.int64]
    hash: str

    @property
    def whole_context(self) -> NDArray[np.bool_]:
        """Whether each loss token's sequence has the context it was sampled with, bool ``[N]``: not behind a cut."""
        begins = [member.sequence.begin == 0 for member in self.sequences]
        return np.repeat(np.array(begins, dtype=bool), [len(m.loss_positions) for m in self.sequences])

    @property
    def one_sampler(self) -> NDArray[np.bool_]:
        """Whether each loss token was sampled by the version that began its run of sampled tokens, bool ``[N]``.

        Behind new weights in the midst of a run an engine goes on with the keys and values that the old ones computed: what
        it recorded there is true of the token, and no single version says it of the whole context.
        """
        flags = [np.zeros(0, dtype=np.bool_)]
        for member in self.sequences:
            places = member.loss_positions
            begins = np.flatnonzero(np.diff(places, prepend=-2) > 1)
            versions = self.policy_versions[member.start : member.stop]
            runs = np.diff(np.append(begins, len(places)))
            flags.append(versions == np.repeat(versions[begins], runs))
        return np.concatenate(flags)

    @property
    def sequence_numbers(self) -> NDArray[np.int64]:
        """Number of the sequence each loss token stands in, int64 ``[N]``."""
        return np.repeat(np.arange(len(self.sequences)), [len(m.loss_positions) for m in self.sequences])

    def with_advantages(self, advantages: NDArray[np.float64]) -> "Batch":
        """Return the same batch with other advantages, float64 ``[N]``, and the hash that belongs to them."""
        digest = _hash(self.sequences, self.behaviour_logprobs, advantages)
        return replace(self, advantages=advantages, hash=digest)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences, given and sampled; what windows repeat counts in each."""
        return sum(len(member.sequence.tokens) for member in self.sequences)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens the loss falls on."""
        return len(self.advantages)


def order_sequences(sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """Return ``sequences`` in the batch's order: by group, trajectory, segment and begin; numbers inside ids as numbers."""
    return sorted(
        sequences, key=lambda s: (natural_key(s.group_id), natural_key(s.trajectory_id), s.segment, s.begin)
    )


def build_batch(
    sequences: Sequence[TrainingSequence],
    advantages: Advantages,
    *,
    merge: Merge = "nearest_centre",
    estimates: Mapping[PieceKey, PieceEstimates] | None = None,
) -> Batch:
    """Return the batch of those ``sequences`` that have loss tokens and whose group was kept.

    Every piece of a segment estimates the advantage of all action tokens in it; ``merge`` says which estimate a token
    that several windows hold is learned with. The group's baseline gives all tokens of a trajectory the same; a critic
    gives each piece ``estimates`` of its own, and its returns are merged as the advantages are.

    The hash covers, per sequence in order, the columns of ``learned_tokens``: tokens int32, mask int32, behaviour
    log-probabilities float32 and advantages float32, the last two 0 under the mask; then its weight, float32 ``[1]``.
    """
    members: list[BatchSequence] = []
    gains: list[NDArray[np.float64]] = []
    returns: list[NDArray[np.float64]] = []
    values: list[NDArray[np.float64]] = []
    owners: dict[str, int] = {}
    kept = [s for s in order_sequences(sequences) if s.group_id in advantages.kept and s.loss_mask.any()]
    for (trajectory, segment), pieces in groupby(kept, key=lambda s: (s.trajectory_id, s.segment)):
        owner = owners.setdefault(trajectory, len(owners))
        advantage = advantages.by_trajectory[trajectory]
        same = list(pieces)
        if estimates is None:
            to_go = advantages.to_go.get((trajectory, segment))
            gains += own_advantages(same, _estimate(advantage, to_go), merge)
            returns += [np.full(int(piece.loss_mask.sum()), piece.reward) for piece in same]
        else:
            gains += own_advantages(same, lambda piece, _: estimates[piece_key(piece)].advantages, merge)
            returns += own_advantages(same, lambda piece, _: estimates[piece_key(piece)].returns, merge)
            # What the clip of the value loss compares with is what this very piece said, not a merger.
            values += [_own_values(piece, same, estimates) for piece in same]
        for piece in same:
            start = members[-1].stop if members else 0
            members.append(make_member(piece, advantage=advantage, owner=owner, start=start))
    behaviour = gather([(m.sequence.behaviour_logprobs, m.loss_positions) for m in members], np.float64)
    model = gather([(m.sequence.model_logprobs, m.loss_positions) for m in members], np.float64)
    versions = gather([(m.sequence.token_policy_version, m.loss_positions) for m in members], np.int64)
    advantage_of = np.concatenate(gains) if gains else np.zeros(0)
    return Batch(
        sequences=tuple(members),
        owners=tuple(owners),
        behaviour_logprobs=behaviour,
        model_logprobs=model,
        advantages=advantage_of,
        returns=np.concatenate(returns) if returns else np.zeros(0),
        values=None if estimates is None else np.concatenate(values) if values else np.zeros(0),
        policy_versions=versions,
        hash=_hash(members, behaviour, advantage_of),
    )


def make_member(sequence: TrainingSequence, *, advantage: float, owner: int, start: int) -> BatchSequence:
    """Return ``sequence`` as part of a batch whose flat numbering has come to ``start``."""
    positions = np.flatnonzero(sequence.loss_mask).astype(np.int64)
    return BatchSequence(
        sequence=sequence, advantage=advantage, owner=owner, start=start, loss_positions=positions
    )


def _estimate(advantage: float, to_go: NDArray[np.float64] | None) -> Estimate:
    """Return the estimate that gives every action token ``advantage``, or that plus its own term of a whole segment."""
    if to_go is None:
        return lambda _, places: np.full(len(places), advantage)
    return lambda _, places: np.full(len(places), advantage) + to_go


def _own_values(
    piece: TrainingSequence, pieces: Sequence[TrainingSequence], estimates: Mapping[PieceKey, PieceEstimates]
) -> NDArray[np.float64]:
    """Return the values ``piece`` gives its own loss tokens, float64 ``[k]``."""
    places = action_places(pieces)
    held = places[places_within(piece, places)] - piece.begin
    return estimates[piece_key(piece)].values[piece.loss_mask[held]]


def _hash(
    members: Sequence[BatchSequence], behaviour: NDArray[np.float64], advantages: NDArray[np.float64]
) -> str:
    parts: list[NDArray[np.int32] | NDArray[np.float32]] = []
    for m in members:
        mask = m.sequence.loss_mask.astype(np.int32)
        parts += [m.sequence.tokens.astype(np.int32), mask, m.per_token(behaviour), m.per_token(advantages)]
        parts.append(np.array([m.sequence.weight], dtype=np.float32))
    return batch_hash(parts)


def deal(batch: Batch, *, minibatches: int, seed: int, update: int, epoch: int) -> list[list[BatchSequence]]:
    """Deal the batch's trajectories, each with its forks, to at most ``minibatches`` optimiser steps, evenly by tokens.

    They are taken from the longest down in rounds of ``minibatches``, one to each step at random; a last incomplete
    round goes to the lightest steps. So the steps' counts differ by at most 1 (by the largest family, where there are
    forks) and their token counts by at most the longest. Randomness is a hash of (seed, update, epoch, id of the first
    of the family), whichever try at its episode that was.
    """
    families = _families(batch)
    lengths = dict.fromkeys(families, 0)
    for member in batch.sequences:
        lengths[families[member.owner]] += len(member.sequence.tokens)

    def draw(first: int) -> bytes:
        text = f"minibatch\n{seed}\n{update}\n{epoch}\n{first_try(batch.owners[first])}"
        return hashlib.sha256(text.encode()).digest()

    units = sorted(set(families))
    draws = {unit: draw(unit) for unit in units}
    order = sorted(units, key=lambda unit: (-lengths[unit], draws[unit]))
    hands: list[set[int]] = [set() for _ in range(min(minibatches, len(order)))]
    loads = [0] * len(hands)
    for begin in range(0, len(order), max(len(hands), 1)):
        dealt = sorted(order[begin : begin + len(hands)], key=lambda unit: draws[unit])
        seats = list(range(len(hands)))
        if len(dealt) < len(hands):
            seats.sort(key=lambda seat: loads[seat])
        for unit, seat in zip(dealt, seats, strict=False):
            hands[seat].add(unit)
            loads[seat] += lengths[unit]
    return [[member for member in batch.sequences if families[member.owner] in hand] for hand in hands]


def _families(batch: Batch) -> list[int]:
    """Return, per owner, the first owner (in batch order) of those it is joined to by forking, itself where by none.

    Forks of one parent are a family, whether the parent is in the batch or not.
    """
    number = {trajectory: owner for owner, trajectory in enumerate(batch.owners)}
    forks = {m.owner: m.sequence.parent for m in batch.sequences if m.sequence.parent is not None}
    for parent in forks.values():
        number.setdefault(parent, len(number))
    first = list(range(len(number)))

    def root(node: int) -> int:
        while first[node] != node:
            node = first[node]
        return node

    for owner, parent in forks.items():
        low, high = sorted((root(number[parent]), root(owner)))
        first[high] = low
    return [root(owner) for owner in range(len(batch.owners))]


def gather(parts: Sequence[tuple[NDArray[Any], NDArray[np.int64]]], dtype: type[Scalar]) -> NDArray[Scalar]:
    """Return the picked entries of all ``parts`` (values, positions) one after the other, as ``dtype``."""
    return (
        np.concatenate([values[positions].astype(dtype) for values, positions in parts], axis=0, dtype=dtype)
        if parts
        else np.zeros(0, dtype=dtype)
    )
