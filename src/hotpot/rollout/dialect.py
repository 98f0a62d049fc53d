"""Messages to tokens and back for any chat template of transformers: token in, token out.

Owns the rendering of conversations as tokens with stages, the reading of sampled tokens as actions, and the knowledge
of what the template does to history. Knows no engine, no episode and no environment.

Rendering
---------
Template text is encoded with added tokens parsed, content from outside as plain text, so that what looks like a
control token in a tool's reply (an end of turn, a ``<tool_call>``) stays text. Each is encoded on its own, cut where one message ends and the next begins
(where the template renders a prefix of the messages as a prefix of the text): the whole conversation rendered at once
gives the tokens of the same conversation rendered step by step.

The prompt after a step is *exactly* the tokens so far, sampled ids kept, plus what the template adds behind the
assistant's message. If the model sampled the template's end token it is not given again; if its output was cut, or
ended with another stop token, the end token is given, as part of the next prompt. Where the template shows an
earlier part of the conversation differently now (it drops old thoughts, say), the result is a :class:`Rewrite`: the
whole new prompt, with sampled ids kept wherever their text survives.

What the template renders depends on the *shape* of a conversation only, never on its content (see
:mod:`hotpot.rollout.template`), so each shape is rendered once and remembered: this is exact for every template.

Stages
------
Text of the template belongs to the message it renders; in front of the first content, if that is no system message,
to ``system``. The end of an assistant message that was not sampled belongs to the message that follows. The
generation prompt belongs to the message before it. Assistant messages that a conversation is opened with are
``instruction``; in a rewritten prompt, what the model once said keeps its stage.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hotpot.errors import ModelFilesError
from hotpot.models.tokenizer import PolicyTokenizer
from hotpot.rollout.conversation import Conversation, KnownShape
from hotpot.rollout.layout import Layout, encode_layout, lay_out
from hotpot.rollout.prompt import Output, Prompt
from hotpot.rollout.syntax import choose_syntax
from hotpot.rollout.template import SLOTS, ChatTemplate, Rendered, Shape
from hotpot.types import Action, Message, Role, Stage, ToolSpec

Tokens = NDArray[np.int32]

_MAX_SHAPES = 20_000
"""Remembered shapes after which memory starts anew."""
_MAX_TEXTS = 512
_MAX_TEXT_CHARS = 20_000
_PROBE_PARAMETERS = '{"properties":{"key":{"type":"string"}},"type":"object"}'
_PLAIN = {
    (role, filled, named): Shape(role=role, body=(None,) if filled else (), named=named)
    for role in Role
    for filled in (True, False)
    for named in (True, False)
}
_STAGE_OF = {Role.SYSTEM: Stage.SYSTEM, Role.TOOL: Stage.TOOL_RESULT}


class Dialect:
    """How one tokenizer's conversations look in tokens.

    ``stop_tokens`` end a generation: the tokenizer's end token and, where it is another, the template's.
    ``renders_tools`` says whether the template shows tools at all; where it doesn't, the system prompt must.
    Not to be shared between threads.

    Raises :class:`ModelFilesError` where the template can't render a user's message and an answer, or marks the end of
    an assistant message with no special token.
    """

    def __init__(self, tokenizer: PolicyTokenizer) -> None:
        self.tokenizer = tokenizer
        self.syntax = choose_syntax(tokenizer)
        self.template = ChatTemplate(
            tokenizer.chat_template,
            # Runs of spaces are added tokens of some tokenizers; they are no markup.
            special_texts=tuple(text for text in tokenizer.added_ids if text.strip()),
            variables={
                "eos_token": tokenizer.decode([tokenizer.end_id]),
                "pad_token": tokenizer.decode([tokenizer.pad_id]),
                "bos_token": tokenizer.bos_token,
            },
        )
        self._roots: dict[
            tuple[tuple[ToolSpec, ...], tuple[Shape, ...], tuple[Stage, ...]], tuple[KnownShape, Layout]
        ] = {}
        self._num_known = 0
        self._texts: dict[str, Tokens] = {}
        self.end_token = self._find_end_token()
        self.stop_tokens: tuple[int, ...] = tuple(dict.fromkeys((tokenizer.end_id, self.end_token)))
        self.renders_tools = self._shows_tools()

    def open(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> tuple[Conversation, Prompt]:
        """Begin a conversation; return it with the prompt for its first step.

        Raises :class:`ModelFilesError` where the template refuses these messages.
        """
        shapes = tuple([_shape(message) for message in messages])
        stages = tuple([_stage(message) for message in messages])
        known, layout = self.show(tuple(tools), shapes, stages)
        conversation = Conversation(self, known, [self.payload(message) for message in messages])
        return conversation, conversation.fill(layout)

    def parse(self, tokens: Tokens, tools: Sequence[ToolSpec] = ()) -> Output:
        """Read sampled ``tokens`` (int32 ``[m]``); tokens without a stop token at the end are malformed: cut off."""
        ids = tokens.tolist()
        ended = bool(ids) and ids[-1] in self.stop_tokens
        reading = self.syntax.read(ids[:-1] if ended else ids, tools)
        action, spans = reading.action, reading.spans
        if ended:
            stage, length = spans[-1] if spans else (Stage.ANSWER, 0)
            spans = (*spans[:-1], (stage, length + 1))
        else:
            action = Action(malformed="cut off before its end")
        return Output(tokens=tokens, ended=ended, action=action, spans=spans, body=reading.body)

    def parse_note(self, tokens: Tokens) -> Output:
        """Read sampled ``tokens`` (int32 ``[m]``) as a hand-over note: all of them of that stage.

        ``body`` is the range of the note itself, without a thought before it; empty where there is no note to go on with
        (cut, blank, or a call).
        """
        output = self.parse(tokens)
        ranges = [part for part in output.body if not isinstance(part, str)]
        written = bool(output.ended and output.action.answer and output.action.answer.strip() and ranges)
        return Output(
            tokens=tokens,
            ended=output.ended,
            action=output.action if written else Action(malformed="no note"),
            spans=((Stage.HANDOVER, len(tokens)),),
            body=(ranges[-1],) if written else (),
        )

    def encode_action(self, action: Action, thought: str = "", tools: Sequence[ToolSpec] = ()) -> Tokens:
        """Return the tokens of a demonstration's step, end token included: ``parse`` reads them as ``action``.

        Raises ValueError where the syntax has no spelling for it (a malformed action, text that is itself markup).
        """
        ids = self.syntax.encode(action, thought, tools)
        return np.append(ids, np.int32(self.end_token)).astype(np.int32)

    def encode(self, text: str) -> Tokens:
        """Return plain text as tokens; short texts that come again and again are remembered."""
        known = self._texts.get(text)
        if known is not None:
            return known
        tokens = self.tokenizer.encode_text(text)
        tokens.flags.writeable = False
        if len(text) <= _MAX_TEXT_CHARS:
            if len(self._texts) >= _MAX_TEXTS:
                self._texts.pop(next(iter(self._texts)))
            self._texts[text] = tokens
        return tokens

    def follow(
        self, known: KnownShape, said: Shape, stage: Stage, new: Sequence[Message]
    ) -> tuple[KnownShape, Layout, bool]:
        """Return the shape behind an assistant message and ``new``, the layout of the prompt, and if it rewrites."""
        shapes = tuple([_shape(message) for message in new])
        key = (said, stage, shapes)
        found = known.follow.get(key)
        if found is None:
            self._count()
            stages = (*known.stages, stage, *[_stage(message) for message in new])
            found = known.follow[key] = self._extend(known, (*known.shapes, said), shapes, stages)
        return found

    def show(
        self, tools: tuple[ToolSpec, ...], shapes: tuple[Shape, ...], stages: tuple[Stage, ...]
    ) -> tuple[KnownShape, Layout]:
        """Return the shape of a whole conversation, and the layout of its prompt from the first token on."""
        key = (tools, shapes, stages)
        root = self._roots.get(key)
        if root is None:
            self._count()
            whole = self.template.render(shapes, tools, generation_prompt=True)
            root = self._roots[key] = (
                KnownShape(tools=tools, shapes=shapes, stages=stages, text=whole.text),
                self._layout(whole, shapes, stages, tools),
            )
        return root

    @staticmethod
    def payload(message: Message) -> tuple[str, ...]:
        """Return what fills the slots of a message's shape."""
        return tuple([text for text in (message.content, message.name) if text])

    def _extend(
        self,
        known: KnownShape,
        spoken: tuple[Shape, ...],
        new: tuple[Shape, ...],
        stages: tuple[Stage, ...],
    ) -> tuple[KnownShape, Layout, bool]:
        tools, shapes = known.tools, (*spoken, *new)
        whole = self.template.render(shapes, tools, generation_prompt=True)
        node = KnownShape(tools=tools, shapes=shapes, stages=stages, text=whole.text)
        after = self._recorded(known, spoken, whole)
        if after is None:
            return node, self._layout(whole, shapes, stages, tools), True
        layout = self._layout(whole, shapes, stages, tools, after=after, done=len(spoken))
        return node, layout, False

    def _recorded(self, known: KnownShape, spoken: tuple[Shape, ...], whole: Rendered) -> int | None:
        """Return how much of ``whole`` is on record as prompt and answer; None where the template rewrites that."""
        content = whole.contents[len(spoken) - 1]
        if whole.text.startswith(known.text + content):
            return len(known.text) + len(content)
        # The template may dress the answer itself (a space before it, a trim): its own view of the conversation up
        # to the answer must then extend the prompt and be extended by what follows.
        before = self.template.render(spoken, known.tools, generation_prompt=False).text
        if not (before.startswith(known.text) and whole.text.startswith(before)):
            return None
        ends = [before.rfind(character) + 1 for character in SLOTS.findall(content)]
        return max(ends) if ends and min(ends) > len(known.text) else None

    def _layout(
        self,
        whole: Rendered,
        shapes: tuple[Shape, ...],
        stages: tuple[Stage, ...],
        tools: tuple[ToolSpec, ...],
        *,
        after: int = 0,
        done: int = 0,
    ) -> Layout:
        """Lay out ``whole.text[after:]``, of which ``done`` messages are on record."""
        cuts: list[tuple[int, int]] = []
        for message in range(max(done - 1, 0), len(shapes)):
            try:
                prefix = self.template.render(shapes[: message + 1], tools, generation_prompt=False).text
            except ModelFilesError:
                continue  # a template may refuse half a conversation; it is then not cut there
            if whole.text.startswith(prefix) and len(prefix) >= after:
                cuts.append((len(prefix), message))
        pieces = lay_out(whole, cuts, shapes, stages, after=after, done=done)
        return encode_layout(pieces, self.tokenizer, self.stop_tokens)

    def _count(self) -> None:
        self._num_known += 1
        if self._num_known > _MAX_SHAPES:
            self._roots.clear()
            self._num_known = 0

    def _find_end_token(self) -> int:
        user, answer = (Shape(role=role, body=(None,)) for role in (Role.USER, Role.ASSISTANT))
        rendered = self.template.render((user, answer), (), generation_prompt=False)
        slots, tail = SLOTS.findall(rendered.text), SLOTS.split(rendered.text)[-1]
        found = bool(slots) and rendered.slot(slots[-1])[0].message == 1
        special = set(self.tokenizer.special_ids.values())
        ends = [index for index in self.tokenizer.encode_template(tail).tolist() if index in special]
        if not found or not ends:
            raise ModelFilesError(
                f"the chat template ends an assistant message with {tail!r}, which holds no special token; a model "
                "can't end its turn: use a template that ends messages with a token such as <|im_end|>"
            )
        return int(ends[0])

    def _shows_tools(self) -> bool:
        shapes = tuple(Shape(role=role, body=(None,)) for role in (Role.SYSTEM, Role.USER))
        tool = ToolSpec(name="look_up", description="look it up", parameters=_PROBE_PARAMETERS)
        try:
            return "look_up" in self.template.render(shapes, (tool,), generation_prompt=True).text
        except ModelFilesError:
            return False


def _shape(message: Message) -> Shape:
    if message.tool_calls:
        body: tuple[str | None, ...] = (None,) if message.content else ()
        return Shape(role=message.role, body=body, named=bool(message.name), calls=message.tool_calls)
    return _PLAIN[message.role, bool(message.content), bool(message.name)]


def _stage(message: Message) -> Stage:
    return _STAGE_OF.get(message.role, Stage.INSTRUCTION)
