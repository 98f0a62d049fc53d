"""Chat templates as pure functions of a conversation's *shape*: Jinja, with everything from outside left blank.

Owns rendering of a transformers chat template with the same conventions as transformers (tools in the chat-completion
schema, ``add_generation_prompt``, ``raise_exception``, ``tojson``, ``{% generation %}``). Every content is replaced by
one private-use character, a *slot*; what the template makes of the rest is text the template's author wrote. It knows
neither tokens nor what fills the slots.

Invariants
----------
- Text from outside never passes through Jinja, so it can neither change the template's course nor be read as markup.
- Equal shapes and tools render equal text: no clock, no randomness is in reach (``strftime_now`` is undefined, so a
  template that asks ``is defined`` takes its fixed date and any other is refused; ``random`` and ``lipsum`` are gone).
- A template that trims or case-folds content has no effect on it: content is passed on as it is.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hotpot.errors import EnvironmentSpecError, ModelFilesError
from hotpot.types import Role, ToolCall, ToolSpec

_LEVELS = (0xF0000, 0xF8000, 0x100000)
"""First code point of the slots that are unescaped, JSON-escaped once, and twice."""
_CAPACITY = 0x8000
SLOTS = re.compile("([\U000f0000-\U0010ffff])")
"""Matches one slot character."""
_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a template can see of one message: its role, where its content has slots, and the calls it states.

    ``body`` is literal text and, where None, a slot; ``named`` adds a slot for the name of the tool. Slots are
    numbered through the body, then the name.
    """

    role: Role
    body: tuple[str | None, ...]
    named: bool = False
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What stands at one slot: part ``part`` of message ``message``, or, where ``text`` is set, that constant text."""

    message: int = -1
    part: int = -1
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A rendered conversation: text with slot characters, what each slot stands for, and each message's content."""

    text: str
    slots: tuple[Slot, ...]
    contents: tuple[str, ...]

    def slot(self, character: str) -> tuple[Slot, int]:
        """Return the slot a slot character stands for and how often its content is to be JSON-escaped."""
        code = ord(character)
        level = max(level for level, base in enumerate(_LEVELS) if code >= base)
        return self.slots[code - _LEVELS[level]], level


def escape(text: str, level: int) -> str:
    """Return ``text`` as it stands inside a JSON string, ``level`` times over."""
    for _ in range(level):
        text = json.dumps(text, ensure_ascii=False)[1:-1]
    return text


class ChatTemplate:
    """A compiled chat template.

    Parameters
    ----------
    source: Jinja text as in ``chat_template.jinja``.
    special_texts: texts of the tokenizer's added tokens; descriptions that contain one become slots, names that do
        are refused.
    variables: what else the template may read, such as ``bos_token``.

    Raises :class:`ModelFilesError` where the source is no Jinja.
    """

    def __init__(
        self, source: str, *, special_texts: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> None:
        if SLOTS.search(source):
            raise ModelFilesError(
                "the chat template contains a character above U+F0000, which stands for content here; remove it"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.filters.pop("random")
        environment.globals.pop("lipsum")
        environment.globals["raise_exception"] = _raise
        environment.globals["dict"] = _make_dict
        self._special = tuple(special_texts)
        self._variables = dict(variables or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelFilesError(f"the chat template is not valid Jinja ({error}); mend its text") from None

    def render(
        self, shapes: Sequence[Shape], tools: Sequence[ToolSpec], *, generation_prompt: bool
    ) -> Rendered:
        """Render a conversation of these shapes. No tools and an empty list of tools are the same thing.

        Raises :class:`ModelFilesError` where the template refuses the conversation and :class:`EnvironmentSpecError`
        where a tool's name or schema holds a control token.
        """
        slots: list[Slot] = []
        functions = [self._function(tool, slots) for tool in tools]
        messages = [self._message(index, shape, slots) for index, shape in enumerate(shapes)]
        try:
            text = self._template.render(
                **self._variables,
                messages=messages,
                tools=functions or None,
                documents=None,
                add_generation_prompt=generation_prompt,
            )
        except _RENDER_ERRORS as error:
            roles = ", ".join(shape.role for shape in shapes)
            raise ModelFilesError(
                f"the chat template refuses a conversation of {roles} ({error}); use a template with system, user, "
                "assistant and tool messages that does not ask for the date"
            ) from None
        contents = tuple(message["content"] for message in messages)
        return Rendered(text=text, slots=tuple(slots), contents=contents)

    def _function(self, tool: ToolSpec, slots: list[Slot]) -> dict[str, Any]:
        try:
            parameters = json.loads(tool.parameters)
        except ValueError as error:
            raise EnvironmentSpecError(
                f"parameters of tool {tool.name!r} are no JSON ({error}); give a JSON schema of an object"
            ) from None
        return {
            "type": "function",
            "function": {
                "name": self._checked(tool.name),
                "description": self._guarded(tool.description, slots),
                "parameters": self._guard_values(parameters, slots, key=""),
            },
        }

    def _message(self, index: int, shape: Shape, slots: list[Slot]) -> dict[str, Any]:
        pieces, part = [], 0
        for literal in shape.body:
            if literal is None:
                pieces.append(_allocate(slots, Slot(message=index, part=part)))
                part += 1
            else:
                pieces.append(literal)
        message: dict[str, Any] = {"role": str(shape.role), "content": "".join(pieces)}
        if shape.named:
            message["name"] = _allocate(slots, Slot(message=index, part=part))
        if shape.calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "function": {
                        "name": self._checked(call.name),
                        "arguments": self._guard_values(_arguments(call), slots, key=None),
                    },
                }
                for call in shape.calls
            ]
        return message

    def _guard_values(self, value: Any, slots: list[Slot], *, key: str | None) -> Any:
        """Guard what is free text (descriptions; with key None any string) and check every other string."""
        if isinstance(value, dict):
            return {
                self._checked(name): self._guard_values(item, slots, key=None if key is None else name)
                for name, item in value.items()
            }
        if isinstance(value, list):
            return [self._guard_values(item, slots, key=key) for item in value]
        if isinstance(value, str):
            free = key is None or key == "description"
            return self._guarded(value, slots) if free else self._checked(value)
        return value

    def _guarded(self, text: str, slots: list[Slot]) -> str:
        return text if self._harmless(text) else _allocate(slots, Slot(text=text))

    def _checked(self, text: str) -> str:
        if not self._harmless(text):
            raise EnvironmentSpecError(
                f"{text!r} in a tool's name or schema contains a control token or a character above U+F0000; rename it"
            )
        return text

    def _harmless(self, text: str) -> bool:
        return not SLOTS.search(text) and not any(special in text for special in self._special)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what the model writes, for masks made elsewhere; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _arguments(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise EnvironmentSpecError(
            f"arguments of a given call of {call.name!r} are {call.arguments!r:.80}; give a JSON object as text"
        )
    return arguments


def _allocate(slots: list[Slot], slot: Slot) -> str:
    if len(slots) >= _CAPACITY:
        raise ModelFilesError(
            f"a conversation holds at most {_CAPACITY} pieces of content; lower rollout.max_steps"
        )
    slots.append(slot)
    return chr(_LEVELS[0] + len(slots) - 1)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _make_dict(**values: Any) -> dict[str, Any]:
    return dict(**values)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 (the filter's signature in transformers)
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Return JSON in which a slot stands for JSON-escaped content: each slot moves up one level."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        text = "".join(c if c.isascii() or SLOTS.fullmatch(c) else json.dumps(c)[1:-1] for c in text)
    return SLOTS.sub(_one_level_up, text)


def _one_level_up(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code >= _LEVELS[-1]:
        raise jinja2.TemplateError("content inside JSON inside JSON inside JSON is not supported")
    return chr(code + _LEVELS[1] - _LEVELS[0])
