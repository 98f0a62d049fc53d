"""One conversation as it grows in a dialect's tokens, and the windows of it.

Owns the order of what was said: the opening, then exchanges (what the model said with all that the environment answered),
and which of them are shown. Knows no engine, no limit and no reason for a window.

Invariants: what the model sampled goes into every prompt as the ids it sampled, never tokenised again; a window shows
whole exchanges, the newest ones, behind the opening.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from hotpot.rollout.bridge import Bridge, Payload
from hotpot.rollout.layout import Layout
from hotpot.rollout.prompt import Output, Prompt, Rewrite
from hotpot.rollout.template import Shape
from hotpot.types import Message, Role, Stage, ToolSpec

if TYPE_CHECKING:
    from hotpot.rollout.dialect import Dialect

_NOTHING = np.zeros(0, np.int32)


class KnownShape:
    """A remembered shape of conversation: its rendered text, and what may follow it."""

    __slots__ = ("follow", "shapes", "stages", "text", "tools")

    def __init__(
        self,
        *,
        tools: tuple[ToolSpec, ...],
        shapes: tuple[Shape, ...],
        stages: tuple[Stage, ...],
        text: str,
    ) -> None:
        self.tools = tools
        self.shapes = shapes
        self.stages = stages
        self.text = text
        self.follow: dict[tuple[Shape, Stage, tuple[Shape, ...]], tuple[KnownShape, Layout, bool]] = {}


class Conversation:
    """One conversation. ``tools`` are those it was opened with, ``bridge`` what stands for exchanges left out."""

    __slots__ = ("_dialect", "_known", "_opening", "_payloads", "_starts", "bridge", "tools")

    def __init__(self, dialect: "Dialect", known: KnownShape, payloads: list[Payload]) -> None:
        self.tools = known.tools
        self.bridge: Bridge | None = None
        self._dialect = dialect
        self._known = known
        self._payloads = payloads
        self._opening = tuple(zip(known.shapes, payloads, strict=True))
        self._starts: list[int] = []

    def extend(self, output: Output, messages: Sequence[Message]) -> Prompt:
        """Add what the model said and the new messages (at least one); return what the next prompt adds.

        The tokens so far, ``output.tokens`` included, are not repeated, unless the template rewrites history: then
        the :class:`Rewrite` is the whole new prompt. Raises :class:`ModelFilesError` where the template refuses.
        """
        if not messages:
            raise ValueError("a conversation goes on with at least one message; got none")
        body = output.body
        said = Shape(
            role=Role.ASSISTANT, body=tuple([part if isinstance(part, str) else None for part in body])
        )
        self._known, layout, rewrites = self._dialect.follow(self._known, said, output.spans[-1][0], messages)
        tokens = output.tokens
        self._starts.append(len(self._payloads))
        self._payloads.append(
            tuple([tokens[part[0] : part[1]] for part in body if not isinstance(part, str)])
        )
        self._payloads.extend([self._dialect.payload(message) for message in messages])
        if rewrites:
            filled = self.fill(layout)
            return Rewrite(tokens=filled.tokens, spans=filled.spans)
        return self.fill(layout, sampled_end=int(tokens[-1]) if output.ended else None)

    def fill(self, layout: Layout, *, sampled_end: int | None = None) -> Prompt:
        """Fill a layout with this conversation's contents; the end token is left out where it was sampled."""
        tokens, spans = layout.fill(self._payloads, self._dialect.encode, sampled_end)
        return Prompt(tokens=tokens, spans=spans)

    def branch(self) -> "Conversation":
        """Return a conversation that says the same so far and goes on apart from this one."""
        return self._with(self._known, list(self._payloads), list(self._starts), self.bridge)

    def window(self, left_out: int, bridge: Bridge | None) -> tuple["Conversation", Rewrite]:
        """Return the conversation without its oldest exchanges, ``bridge`` in their place, and its whole prompt.

        Raises IndexError where there are not more than ``left_out`` exchanges.
        """
        begin, known = self._starts[left_out], self._known
        opening = list(self._opening)
        if bridge is not None:
            opening[-1] = bridge.join(*opening[-1])
        size = len(opening)
        root, layout = self._dialect.show(
            self.tools,
            (*[shape for shape, _ in opening], *known.shapes[begin:]),
            (*known.stages[:size], *known.stages[begin:]),
        )
        payloads = [*[payload for _, payload in opening], *self._payloads[begin:]]
        starts = [start - begin + size for start in self._starts[left_out:]]
        shown = self._with(root, payloads, starts, bridge)
        prompt = shown.fill(layout)
        return shown, Rewrite(tokens=prompt.tokens, spans=prompt.spans)

    def lengths(self) -> tuple[int, tuple[int, ...]]:
        """Return the tokens of all contents in the opening, and of those in each exchange, oldest first."""
        sizes = [sum(map(self._size, payload)) for payload in self._payloads]
        edges = [*self._starts, len(sizes)]
        opening = sum([self._size(part) for _, payload in self._opening for part in payload])
        exchanges = [sum(sizes[begin:end]) for begin, end in pairwise(edges)]
        return opening, tuple(exchanges)

    def cost(self, message: Message) -> int:
        """Return how many tokens ``message`` and what the template adds to it take behind an answer; at the opening only."""
        said = Shape(role=Role.ASSISTANT, body=(None,))
        opened = self._dialect.show(self.tools, self._known.shapes, self._known.stages)[1]
        _, layout, rewrites = self._dialect.follow(self._known, said, Stage.ANSWER, (message,))
        answered = self._with(self._known, [*self._payloads, (_NOTHING,)], [], None)
        answered._payloads.append(self._dialect.payload(message))
        length = len(answered.fill(layout).tokens)
        return length - len(self.fill(opened).tokens) if rewrites else length

    def _with(
        self, known: KnownShape, payloads: list[Payload], starts: list[int], bridge: Bridge | None
    ) -> Self:
        other = object.__new__(type(self))
        other.tools, other.bridge = self.tools, bridge
        other._dialect, other._known, other._opening = self._dialect, known, self._opening
        other._payloads, other._starts = payloads, starts
        return other

    def _size(self, part: str | NDArray[np.int32]) -> int:
        return len(self._dialect.encode(part)) if isinstance(part, str) else len(part)
