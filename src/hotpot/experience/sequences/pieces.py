"""Pieces and windows: cutting a segment of a trajectory that is longer than what is trained on at once.

Owns where a cut may fall and which piece an action (sampled) token belongs to. Knows no batch, model or advantage.

A *piece* is a :class:`TrainingSequence` of at most ``segment_tokens`` tokens with ``begin``, its place in the segment.
With ``overlap`` 0 pieces stand end to end; above 0 they are *windows*, each of which begins at least that many tokens
before the end of the one before it.

Ownership: a token's loss falls in the earliest piece that holds it, which is the one with the most context on its left.
What a later piece repeats is context there: its mask is false. A piece whose first own token is an action token repeats
at least the token before it, since nothing would predict the first token of a sequence.

Where a cut may fall
--------------------
Token ids alone tell little of a template, so the rule is a distance. A cut is not allowed

* within :data:`HEADER_TOKENS` tokens behind a token of the template's markup: header text (``assistant\\n``), a second
  token of the same header, or closing text (the newline behind an end of turn) may stand there;
* within :data:`HEADER_TOKENS` tokens before the first of a run of action tokens, or right before it: that is the
  generation header, which tells the model to speak;

except right before a message: a markup token that is no end of turn where the markup token before it is one and at most
:data:`HEADER_TOKENS` away. Action tokens may be cut from each other: one answer can be longer than a piece.

The last allowed place is taken that leaves a piece at least three quarters full; windows also begin at an allowed place,
up to a quarter of a piece earlier than asked. Where there is none (markup every few tokens), the length counts for more
than the rule: the cut falls at the full length (a window begins exactly ``overlap`` tokens back), and
:attr:`Piece.forced` says so.

Invariants: every action token of the segment is a loss token of exactly one piece; pieces in order cover the segment; no
piece is longer than ``segment_tokens``.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotpot.experience.sequences.segments import TrainingSequence

HEADER_TOKENS = 8
"""Tokens around markup that stay with it. The longest header among common templates is a tool's message in the harmony
format, with up to eight tokens between two of its markup tokens; ``<|im_start|>assistant`` and a newline are three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Markup:
    """Token ids a chat template is written with: all of them, and those that end a turn (a subset)."""

    ids: frozenset[int] = frozenset()
    ends: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """How sequences are cut. ``segment_tokens`` 0 is off; ``overlap`` is at most half of it."""

    segment_tokens: int = 0
    overlap: int = 0
    markup: Markup = Markup()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens ``begin .. end`` of a segment, of which ``own .. end`` belong to this piece. ``forced`` says that the rule
    allowed no place within reach of its beginning or its end."""

    begin: int
    own: int
    end: int
    forced: bool


def cut_sequence(sequence: TrainingSequence, cutting: Cutting) -> list[TrainingSequence]:
    """Return the pieces of ``sequence`` in order; the sequence itself where it is not too long."""
    if not cutting.segment_tokens or len(sequence.tokens) <= cutting.segment_tokens:
        return [sequence]
    allowed = allowed_cuts(sequence.tokens, sequence.loss_mask, cutting.markup)
    return [
        _take(sequence, piece)
        for piece in cut_places(
            allowed,
            sequence.loss_mask,
            segment_tokens=cutting.segment_tokens,
            overlap=cutting.overlap,
        )
    ]


def allowed_cuts(
    tokens: NDArray[np.int32], loss_mask: NDArray[np.bool_], markup: Markup
) -> NDArray[np.bool_]:
    """Return bool ``[n]``: whether a cut right before each token is allowed. ``tokens`` int32, ``loss_mask`` bool, ``[n]``."""
    places = np.arange(len(tokens))
    special = np.isin(tokens, list(markup.ids | markup.ends))
    ends = np.isin(tokens, list(markup.ends))
    # The nearest markup token strictly before each place, -1 where there is none.
    nearest = np.maximum.accumulate(np.where(special, places, -1))
    before = np.concatenate([[-1], nearest[:-1]])
    near = (before >= 0) & (places - before <= HEADER_TOKENS)
    speaks = loss_mask & ~np.concatenate([[False], loss_mask[:-1]])
    header = np.zeros(len(tokens), np.bool_)
    for begin in np.flatnonzero(speaks):
        header[max(begin - HEADER_TOKENS, 0) : begin + 1] = True
    message = special & ~ends & near & ends[before]
    allowed: NDArray[np.bool_] = message | ~(near | header)
    return allowed


def cut_places(
    allowed: NDArray[np.bool_], loss_mask: NDArray[np.bool_], *, segment_tokens: int, overlap: int
) -> list[Piece]:
    """Return the pieces of a segment of ``n`` tokens, in order. ``allowed`` and ``loss_mask`` bool ``[n]``."""
    size, reach = len(allowed), segment_tokens // 4
    pieces: list[Piece] = []
    begin = own = 0
    forced = False
    while size - begin > segment_tokens:
        full = begin + segment_tokens
        end = _last_allowed(allowed, full - reach + 1, full)
        at_end = end is None
        end = full if end is None else end
        pieces.append(Piece(begin=begin, own=own, end=end, forced=forced or at_end))
        own, forced = end, False
        if overlap:
            start = _last_allowed(allowed, end - overlap - reach, end - overlap)
            forced = start is None
            begin = end - overlap if start is None else start
        else:
            begin = end - int(loss_mask[end])
            forced = at_end
    pieces.append(Piece(begin=begin, own=own, end=size, forced=forced))
    return pieces


def _last_allowed(allowed: NDArray[np.bool_], first: int, last: int) -> int | None:
    """Return the last allowed place in ``first .. last`` (both counted), if there is one."""
    found = np.flatnonzero(allowed[first : last + 1])
    return first + int(found[-1]) if len(found) else None


def _take(sequence: TrainingSequence, piece: Piece) -> TrainingSequence:
    part = slice(piece.begin, piece.end)
    mask = sequence.loss_mask[part].copy()
    mask[: piece.own - piece.begin] = False
    return dataclasses.replace(
        sequence,
        begin=sequence.begin + piece.begin,
        tokens=sequence.tokens[part],
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, sequence.behaviour_logprobs[part], np.float32(0)),
        model_logprobs=np.where(mask, sequence.model_logprobs[part], np.float32(0)),
        token_policy_version=np.where(mask, sequence.token_policy_version[part], np.int32(-1)),
        rewards=None if sequence.rewards is None else np.where(mask, sequence.rewards[part], 0.0),
    )
