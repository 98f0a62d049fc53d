"""Pieces laid out so that a model is asked at each of their states, before anything is learned from them.

Owns that layout: every action token of a piece, context too, stands where a batch's loss tokens do, and the state behind
the last token where that needs a value. Knows no model and no answer.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hotpot.learner.batches.batches import BatchSequence, make_member
from hotpot.learner.batches.states import PieceStates


def asked(states: Sequence[PieceStates]) -> tuple[list[BatchSequence], list[slice], int]:
    """Return the pieces that ask for something, where the answers for each of ``states`` will stand, and how many answers
    there will be."""
    members: list[BatchSequence] = []
    rows: list[slice] = []
    size = 0
    for state in states:
        rows.append(slice(size, size + state.num_values))
        size += state.num_values
        if state.num_values:
            members.append(_asking(state, owner=len(members), start=rows[-1].start))
    return members, rows, size


def _asking(state: PieceStates, *, owner: int, start: int) -> BatchSequence:
    """Return the piece as a member whose "loss tokens" are those whose state is asked for.

    The state behind the last token is that of a token which was never sampled: one is put there, and never read.
    """
    piece = state.piece
    behind = int(state.final)
    mask = np.zeros(len(piece.tokens) + behind, dtype=np.bool_)
    mask[state.places] = True
    mask[len(piece.tokens) :] = True
    tokens = np.append(piece.tokens, np.zeros(behind, piece.tokens.dtype))
    return make_member(replace(piece, tokens=tokens, loss_mask=mask), advantage=0.0, owner=owner, start=start)
