"""The layout of a prompt: template text as tokens, with the places its contents go to and the stage of everything.

Owns the cutting of rendered text into pieces and the assignment of stages (rules in :mod:`hotpot.rollout.dialect`).
A layout belongs to a shape of conversation; filling it with contents gives a prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotpot.models.tokenizer import PolicyTokenizer
from hotpot.rollout.bridge import Payload, holds_note
from hotpot.rollout.syntax import UNTHINK, Spans
from hotpot.rollout.template import SLOTS, Rendered, Shape, escape
from hotpot.types import Role, Stage

Tokens = NDArray[np.int32]
Payloads = Sequence[Payload]
"""What fills the slots of each message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of rendered text: template text, or content. Content is constant text, or a part of a message."""

    stage: Stage
    template: str | None = None
    content: str | None = None
    message: int = -1
    part: int = -1
    level: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Pieces with their tokens where these are constant (else None).

    ``end_token`` is the first stop token of the leading template text, ``end_length`` the number of tokens up to and
    with it: what is left out where the model sampled that token.
    """

    pieces: tuple[tuple[Piece, Tokens | None], ...]
    end_token: int | None
    end_length: int

    def fill(
        self, payloads: Payloads, encode: Callable[[str], Tokens], sampled_end: int | None
    ) -> tuple[Tokens, Spans]:
        """Return tokens int32 ``[n]`` and the spans that cover them."""
        skip = self.end_length if sampled_end is not None and sampled_end == self.end_token else 0
        arrays: list[Tokens] = []
        spans: list[tuple[Stage, int]] = []
        for piece, constant in self.pieces:
            if constant is not None:
                tokens = constant[skip:] if skip else constant
                skip = 0
            else:
                payload = payloads[piece.message][piece.part]
                if isinstance(payload, str):
                    tokens = encode(escape(payload, piece.level) if piece.level else payload)
                else:
                    tokens = payload
            count = len(tokens)
            if not count:
                continue
            arrays.append(tokens)
            if spans and spans[-1][0] is piece.stage:
                spans[-1] = (piece.stage, spans[-1][1] + count)
            else:
                spans.append((piece.stage, count))
        filled = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
        filled.flags.writeable = False
        return filled, tuple(spans)


def lay_out(
    rendered: Rendered,
    cuts: Sequence[tuple[int, int]],
    shapes: Sequence[Shape],
    stages: Sequence[Stage],
    *,
    after: int,
    done: int,
) -> list[Piece]:
    """Cut ``rendered.text[after:]`` into pieces with stages.

    ``cuts`` are (end of text, message) in rising order: where each message is known to end. ``done`` messages are on
    record; what is left of the last of them belongs to the one that follows.
    """
    pieces: list[Piece] = []
    begin, first = after, max(done - 1, 0)
    for end, message in (*cuts, (len(rendered.text), len(shapes) - 1)):
        if end > begin:
            owners = range(first, max(message, first) + 1)
            pieces += _cut_at_slots(rendered, rendered.text[begin:end], owners, shapes, stages, done)
            begin = end
        first = min(message + 1, len(shapes) - 1)
    if after == 0 and shapes and shapes[0].role is not Role.SYSTEM:
        _give_head_to_system(pieces)
    return pieces


def _cut_at_slots(
    rendered: Rendered,
    text: str,
    owners: range,
    shapes: Sequence[Shape],
    stages: Sequence[Stage],
    done: int,
) -> list[Piece]:
    """Cut text of the messages ``owners``; where it is more than one, template text belongs to the content before."""
    last = len(shapes) - 1
    pieces: list[Piece] = []
    owner = owners[0]
    for run in SLOTS.split(text):
        if not run:
            continue
        if not SLOTS.fullmatch(run):
            place = owner if owner >= done or not done else min(owner + 1, last)
            pieces.append(Piece(stage=stages[place], template=run))
            continue
        slot, level = rendered.slot(run)
        if slot.text is not None:
            pieces.append(Piece(stage=stages[owner], content=escape(slot.text, level)))
            continue
        owner = slot.message if slot.message in owners else owner
        stage = _slot_stage(shapes[slot.message], slot.part, stages[slot.message])
        pieces.append(Piece(stage=stage, message=slot.message, part=slot.part, level=level))
    return pieces


def _slot_stage(shape: Shape, part: int, stage: Stage) -> Stage:
    """Return the stage of a slot: what stands before the end of a thought is thought, a bridge's note is handover."""
    if holds_note(shape, part):
        return Stage.HANDOVER
    seen = -1
    for place, literal in enumerate(shape.body):
        seen += literal is None
        if seen == part and literal is None:
            thinks = any(text is not None and UNTHINK in text for text in shape.body[place:])
            return Stage.THOUGHT if thinks else stage
    return stage


def _give_head_to_system(pieces: list[Piece]) -> None:
    for place, piece in enumerate(pieces):
        if piece.message >= 0:
            break
        pieces[place] = Piece(stage=Stage.SYSTEM, template=piece.template, content=piece.content)


def encode_layout(pieces: Sequence[Piece], tokenizer: PolicyTokenizer, stop_tokens: Sequence[int]) -> Layout:
    """Return the layout of ``pieces``, with template text and constant content as tokens."""
    encoded: list[tuple[Piece, Tokens | None]] = []
    for piece in pieces:
        tokens: Tokens | None = None
        if piece.template is not None:
            tokens = tokenizer.encode_template(piece.template)
        elif piece.content is not None:
            tokens = tokenizer.encode_text(piece.content)
        encoded.append((piece, tokens))
    end_token, end_length = None, 0
    if pieces and pieces[0].template is not None and encoded[0][1] is not None:
        ids = encoded[0][1].tolist()
        place = next((place for place, index in enumerate(ids) if index in stop_tokens), None)
        if place is not None:
            end_token, end_length = ids[place], place + 1
    return Layout(pieces=tuple(encoded), end_token=end_token, end_length=end_length)
