"""From an optimiser step's sequences to passes: what one forward and backward pass computes, and where.

Owns the layout: a prefix that a pass's sequences share, computed once, and behind it a grid of rows. ``padded`` gives
each sequence a row of its own, ``packed`` puts several into one row, end to end. Knows token ids and lengths, no model.

Invariants: each loss token is in exactly one pass; a pass computes at most ``max_tokens`` tokens, padding included;
prefix, packing and the company a sequence is in change what is computed, never the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from hotpot.errors import LearnerError
from hotpot.experience import TrainingSequence
from hotpot.ids import sha256_hex
from hotpot.learner.batches.arrangement import Packing, arrange, padded
from hotpot.learner.batches.batches import BatchSequence, gather
from hotpot.learner.batches.families import Family, common_prefix, families

PASS_TOKENS = 2048
"""Padded tokens of one pass where the recipe allows as many: what a layer computes then stays in the processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One forward (and backward) pass: a shared prefix, and rows that go on from it.

    ``prefix`` int64 ``[P]`` (may be empty) is computed once; ``tokens`` int64 ``[B, L]`` follow it in each row, padded
    with 0. ``starts`` int64 ``[B, L]``: the column where each token's own sequence begins (a padding token is a sequence
    of its own), None where every row holds one sequence from column 0. A token sees the prefix, then its own sequence up
    to itself; its position is P plus its distance from its start.

    The pass's k loss tokens: the first j are predicted by tokens of the prefix, at ``prefix_columns`` int64 ``[j]``, the
    others by those at ``rows`` and ``columns`` int64 ``[k - j]`` of the grid: always the *preceding* token. ``targets``
    int64 ``[k]`` are their ids, ``flat`` int64 ``[k]`` their numbers in the batch. ``num_padding`` tokens are padding;
    ``num_shared`` are not computed again because they stand in the prefix.
    """

    prefix: NDArray[np.int64]
    tokens: NDArray[np.int64]
    starts: NDArray[np.int64] | None
    prefix_columns: NDArray[np.int64]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    targets: NDArray[np.int64]
    flat: NDArray[np.int64]
    num_padding: int
    num_shared: int

    @property
    def num_positions(self) -> int:
        """Positions the model must know: one more than the last that predicts a loss token."""
        last = -1 if not len(self.columns) else int((self.columns - self._starts_of_loss()).max())
        return len(self.prefix) + last + 1

    def _starts_of_loss(self) -> NDArray[np.int64] | int:
        return 0 if self.starts is None else self.starts[self.rows, self.columns]


def cut(
    members: Sequence[BatchSequence], *, max_tokens: int, packing: Packing = "padded", share: bool = True
) -> list[MicroBatch]:
    """Cut ``members`` into passes of at most ``max_tokens`` tokens each, padding included.

    Members with a prefix in common come together where that saves work (:mod:`hotpot.learner.batches.families`), and among them
    those of like length; without ``share`` no pass has a prefix. Raises :class:`LearnerError` where a single sequence is longer than ``max_tokens``.
    """
    for member in members:
        if member.num_inputs > max_tokens:
            raise LearnerError(
                f"trajectory {member.sequence.trajectory_id!r} needs {member.num_inputs} tokens in one pass, more than "
                f"learner.micro_batch_tokens = {max_tokens}; raise that, or lower rollout.max_context_tokens"
            )
    passes = []
    for family in families(members, max_tokens=max_tokens, packing=packing) if share else _unshared(members):
        room = max_tokens - family.prefix
        lengths = [member.num_inputs - family.prefix for member in family.members]
        for rows in arrange(lengths, max_tokens=room, packing=packing):
            found = [[family.members[index] for index in row] for row in rows]
            # The sequences of one pass may share more than the whole family does, never less.
            shared = common_prefix([member for row in found for member in row]) if family.prefix else 0
            passes.append(lay_out(found, prefix=shared, max_width=max_tokens - shared))
    return passes


def _unshared(members: Sequence[BatchSequence]) -> list[Family]:
    return [Family(members=members, prefix=0)] if members else []


def pass_tokens(sequences: Sequence[TrainingSequence], *, most: int) -> int:
    """Return the largest padded size of a pass over ``sequences``, in tokens; ``most`` is what the recipe allows."""
    longest = max((len(sequence.tokens) + 7 for sequence in sequences), default=0)
    return min(most, max(PASS_TOKENS, longest))


def lay_out(
    rows: Sequence[Sequence[BatchSequence]], *, prefix: int | None = None, max_width: int | None = None
) -> MicroBatch:
    """Return the pass over ``rows``, each the sequences that stand in it end to end.

    ``prefix`` is how many leading tokens of all of them are computed once (by default all they share); each keeps at
    least one token behind it. ``max_width`` bounds the padding: rows are never padded beyond it.
    """
    members = [member for row in rows for member in row]
    shared = common_prefix(members) if prefix is None else prefix
    sizes = [[member.num_inputs - shared for member in row] for row in rows]
    longest = max(map(sum, sizes))
    width = padded(longest) if max_width is None else max(longest, min(padded(longest), max_width))
    tokens = np.zeros((len(rows), width), dtype=np.int64)
    starts = np.tile(np.arange(width), (len(rows), 1))
    at = [(row, column) for row, own in enumerate(sizes) for column in accumulate([0, *own[:-1]])]
    for member, (row, column) in zip(members, at, strict=True):
        part = slice(column, column + member.num_inputs - shared)
        tokens[row, part] = member.sequence.tokens[shared : member.num_inputs]
        starts[row, part] = column
    # Which of each member's loss tokens the prefix predicts, and which the grid.
    inside = [member.loss_positions <= shared for member in members]
    early = [(member, np.flatnonzero(which)) for member, which in zip(members, inside, strict=True)]
    late = [(member, np.flatnonzero(~which)) for member, which in zip(members, inside, strict=True)]
    chosen = [*early, *late]
    return MicroBatch(
        prefix=members[0].sequence.tokens[:shared].astype(np.int64),
        tokens=tokens,
        starts=starts if any(len(row) > 1 for row in rows) else None,
        prefix_columns=np.concatenate([m.loss_positions[which] - 1 for m, which in early]),
        rows=np.repeat([row for row, _ in at], [len(which) for _, which in late]),
        columns=np.concatenate(
            [
                m.loss_positions[which] - 1 - shared + column
                for (m, which), (_, column) in zip(late, at, strict=True)
            ]
        ),
        targets=gather([(m.sequence.tokens, m.loss_positions[which]) for m, which in chosen], np.int64),
        flat=np.concatenate([m.start + which for m, which in chosen]),
        num_padding=int(tokens.size - sum(map(sum, sizes))),
        num_shared=shared * (len(members) - 1),
    )


def layout_hash(members: Sequence[BatchSequence], micros: Sequence[MicroBatch]) -> str:
    """Return a hash over which pieces an optimiser step learns from, in order, and how they are laid out in passes."""
    pieces = [f"{m.sequence.trajectory_id} {m.sequence.segment} {m.sequence.begin}" for m in members]
    passes = [
        f"{len(micro.prefix)} {micro.tokens.shape} {micro.prefix_columns.tolist()} {micro.rows.tolist()} "
        f"{micro.columns.tolist()} {micro.flat.tolist()}"
        for micro in micros
    ]
    return sha256_hex("\n".join([*pieces, "", *passes]))[:16]
