"""How a model writes thoughts, tool calls and answers: reading sampled tokens, and writing demonstrations.

Owns the two syntaxes and what counts as malformed. Knows no template and no engine. A syntax is given the sampled ids
without their end token.

Compact (tokenizers whose special tokens hold ``<|call|>``)::

    [thought]<|call|>name(key=value, key=value)      or      answer

A value runs to the next ``, key=`` or to the closing parenthesis, so it may hold commas and parentheses. Where the
tool's schema says string it is text as written (but ``null`` where it says string or null); elsewhere it is JSON if it
reads as JSON, else text. A value that begins with a double quote and is a JSON string is that string.

Hermes (all others; the format of the Hermes and Qwen model families)::

    [<think>thought</think>] <tool_call>{"name": ..., "arguments": {...}}</tool_call>      or      answer

Invariants: spans are cut at token positions (a token that crosses a boundary belongs to the span it starts in) and
cover all ids; nothing is tokenised again; whatever the ids, reading returns an action and never raises; what
``encode`` returns reads as the same action.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hotpot.models.tokenizer import CALL, PolicyTokenizer
from hotpot.rollout.arguments import (
    Unreadable,
    read_compact_call,
    read_json_call,
    write_compact_call,
    write_json_call,
)
from hotpot.types import Action, Stage, ToolCall, ToolSpec

Spans = tuple[tuple[Stage, int], ...]
"""Consecutive (stage, number of tokens)."""

THINK, UNTHINK = "<think>", "</think>"
OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
_MARKERS = (THINK, UNTHINK, OPEN_CALL, CLOSE_CALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What ids say: the action, spans over all ids, and the message's content as literals and ranges of ids."""

    action: Action
    spans: Spans
    body: tuple[str | tuple[int, int], ...]


class Syntax(Protocol):
    """Reads and writes one way of writing actions."""

    def read(self, ids: Sequence[int], tools: Sequence[ToolSpec]) -> Reading:
        """Return what ``ids`` (without an end token) say."""

    def encode(self, action: Action, thought: str, tools: Sequence[ToolSpec]) -> NDArray[np.int32]:
        """Return ids int32 ``[n]`` (without an end token) that read as ``action``; ValueError where none do."""


def choose_syntax(tokenizer: PolicyTokenizer) -> Syntax:
    """Return the syntax a tokenizer's special tokens ask for."""
    return CompactSyntax(tokenizer) if CALL in tokenizer.special_ids else HermesSyntax(tokenizer)


class CompactSyntax:
    """``[thought]<|call|>name(key=value, ...)`` or an answer."""

    def __init__(self, tokenizer: PolicyTokenizer) -> None:
        self._tokenizer = tokenizer
        self._call = tokenizer.special_ids[CALL]
        self._special = {index: text for text, index in tokenizer.special_ids.items()}

    def read(self, ids: Sequence[int], tools: Sequence[ToolSpec]) -> Reading:
        """Return what ``ids`` say; see :class:`Syntax`."""
        count = len(ids)
        foreign = [index for index in ids if index in self._special and index != self._call]
        start = next((place for place, index in enumerate(ids) if index == self._call), None)
        if start is None:
            spans: Spans = ((Stage.ANSWER, count),)
        else:
            spans = ((Stage.THOUGHT, start), (Stage.TOOL_CALL, count - start))
        if foreign:
            action = Action(malformed=f"special token {self._special[foreign[0]]} inside the text")
        elif start is None:
            action = Action(answer=self._tokenizer.decode(ids))
        elif self._call in ids[start + 1 :]:
            action = Action(malformed="more than one call in a step")
        else:
            action = _read_call(read_compact_call, self._tokenizer.decode(ids[start + 1 :]), tools)
        return Reading(action=action, spans=_drop_empty(spans), body=((0, count),) if count else ())

    def encode(self, action: Action, thought: str, tools: Sequence[ToolSpec]) -> NDArray[np.int32]:
        """Return ids that read as ``action``; see :class:`Syntax`. An answer can't carry a thought."""
        if action.tool_call is not None:
            parts = [
                self._tokenizer.encode_text(thought),
                self._tokenizer.encode_template(CALL),
                self._tokenizer.encode_text(write_compact_call(action.tool_call, tools)),
            ]
        elif action.answer is not None and not thought:
            parts = [self._tokenizer.encode_text(action.answer)]
        else:
            raise ValueError(f"the compact syntax has no words for {action!r} with thought {thought!r}")
        return _verified(self, np.concatenate(parts), action, tools)


class HermesSyntax:
    """``<think>thought</think><tool_call>{json}</tool_call>`` or an answer."""

    def __init__(self, tokenizer: PolicyTokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces = TokenPieces(tokenizer)
        self._special = {index: text for text, index in tokenizer.special_ids.items() if text not in _MARKERS}

    def read(self, ids: Sequence[int], tools: Sequence[ToolSpec]) -> Reading:
        """Return what ``ids`` say; see :class:`Syntax`."""
        text, starts = self._pieces.align(ids)
        opening = text.find(OPEN_CALL)
        begins = len(text) - len(text.lstrip())
        opened = text.startswith(THINK, begins)
        unthink = text.find(UNTHINK, 0, opening if opening >= 0 else len(text))
        thought_end = unthink + len(UNTHINK) if unthink >= 0 else 0
        foreign = next((index for index in ids if index in self._special), None)
        if opened and unthink < 0:
            action, cut, stage = Action(malformed=f"{THINK} without {UNTHINK}"), len(text), Stage.THOUGHT
        elif opening >= 0:
            action, cut, stage = self._read_marked(text[opening:], tools), opening, Stage.TOOL_CALL
        else:
            action, cut, stage = self._read_answer(text, thought_end), thought_end, Stage.ANSWER
        if foreign is not None:
            action = Action(malformed=f"special token {self._special[foreign]} inside the text")
        place = bisect_left(starts, cut) if cut < len(text) else len(ids)
        spans: Spans = ((Stage.THOUGHT, place), (stage, len(ids) - place))
        if unthink < 0:
            body: tuple[str | tuple[int, int], ...] = ((0, len(ids)),) if ids else ()
        else:
            first = begins + len(THINK) if opened else 0
            within = self._trim(ids, bisect_left(starts, first), bisect_left(starts, unthink))
            after = self._trim(ids, bisect_left(starts, thought_end), len(ids))
            head = (f"{THINK}\n",) if opened else ()
            body = (*head, *_ranges(within), f"\n{UNTHINK}\n\n", *_ranges(after))
        return Reading(action=action, spans=_drop_empty(spans), body=body)

    def encode(self, action: Action, thought: str, tools: Sequence[ToolSpec]) -> NDArray[np.int32]:
        """Return ids that read as ``action``; see :class:`Syntax`."""
        template, text = self._tokenizer.encode_template, self._tokenizer.encode_text
        parts = []
        if thought:
            parts += [template(f"{THINK}\n"), text(thought), template(f"\n{UNTHINK}\n\n")]
        if action.tool_call is not None:
            parts += [
                template(f"{OPEN_CALL}\n"),
                text(write_json_call(action.tool_call)),
                template(f"\n{CLOSE_CALL}"),
            ]
        elif action.answer is not None:
            parts.append(text(action.answer))
        else:
            raise ValueError(f"a malformed action has no spelling: {action!r}")
        return _verified(self, np.concatenate(parts), action, tools)

    @staticmethod
    def _read_marked(text: str, tools: Sequence[ToolSpec]) -> Action:
        inside, closed, after = text.removeprefix(OPEN_CALL).partition(CLOSE_CALL)
        if not closed:
            return Action(malformed=f"{OPEN_CALL} without {CLOSE_CALL}")
        if after.strip():
            more = OPEN_CALL in after
            return Action(malformed="more than one call in a step" if more else "text after the call")
        return _read_call(read_json_call, inside, tools)

    @staticmethod
    def _read_answer(text: str, thought_end: int) -> Action:
        answer = text[thought_end:]
        if thought_end:
            # The blank line between thought and answer is the template's, at most that much is taken away.
            answer = answer.removeprefix("\n").removeprefix("\n")
        if CLOSE_CALL in answer:
            return Action(malformed=f"{CLOSE_CALL} without {OPEN_CALL}")
        return Action(answer=answer)

    def _trim(self, ids: Sequence[int], start: int, stop: int) -> tuple[int, int]:
        while start < stop and self._pieces.piece(ids[start]).isspace():
            start += 1
        while stop > start and self._pieces.piece(ids[stop - 1]).isspace():
            stop -= 1
        return start, stop


class TokenPieces:
    """The text of single tokens, and where each token starts in the text of many.

    Bytes of one character may be spread over several tokens; such a run gets its text at its first token.
    """

    def __init__(self, tokenizer: PolicyTokenizer) -> None:
        self._tokenizer = tokenizer
        # Some decoders drop the space before the first token, so every token is decoded behind another.
        self._anchor = tokenizer.end_id
        self._skip = len(tokenizer.decode([self._anchor]))
        self._known: dict[int, str] = {}

    def piece(self, index: int) -> str:
        """Return the text of one token; U+FFFD stands for bytes that are no whole character."""
        text = self._known.get(index)
        if text is None:
            text = self._known[index] = self._tokenizer.decode([self._anchor, index])[self._skip :]
        return text

    def align(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text of ``ids`` and the character at which each id starts."""
        texts: list[str] = []
        starts: list[int] = []
        length, place = 0, 0
        while place < len(ids):
            stop = place + 1
            text = self.piece(ids[place])
            if "\ufffd" in text:
                while stop < len(ids) and "\ufffd" in self.piece(ids[stop]):
                    stop += 1
                text = self._tokenizer.decode([self._anchor, *ids[place:stop]])[self._skip :]
            texts.append(text)
            starts.append(length)
            length += len(text)
            starts.extend([length] * (stop - place - 1))
            place = stop
        return "".join(texts), starts


class _CallReader(Protocol):
    def __call__(self, text: str, tools: Sequence[ToolSpec]) -> ToolCall: ...


def _read_call(reader: _CallReader, text: str, tools: Sequence[ToolSpec]) -> Action:
    try:
        return Action(tool_call=reader(text, tools))
    except Unreadable as reason:
        return Action(malformed=str(reason))


def _verified(
    syntax: Syntax, ids: NDArray[np.int32], action: Action, tools: Sequence[ToolSpec]
) -> NDArray[np.int32]:
    read = syntax.read(ids.tolist(), tools).action
    if read != action:
        raise ValueError(f"{action!r} has no spelling in this syntax: it would read as {read!r}")
    return ids.astype(np.int32)


def _ranges(place: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return (place,) if place[0] < place[1] else ()


def _drop_empty(spans: Spans) -> Spans:
    return tuple(span for span in spans if span[1])
