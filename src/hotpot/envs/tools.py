"""Tools as typed Python functions: the schema the model is told, and the check of what it calls.

A tool is a function or method with annotated parameters, a docstring and the return type ``str``. Supported
annotations: str, int, float, bool, ``Literal`` of texts, ``list`` of these, and ``X | None`` with a default. The first
docstring line is the tool's description; a later line ``parameter: text`` describes that parameter.

Owns the derivation of the JSON schema, the coercion of arguments (which may arrive as JSON values or as plain text)
and the short error texts. Invariant: nothing a model writes makes :meth:`Toolbox.run` raise; only a broken tool does,
with EnvironmentFailure.
"""

import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

from hotpot.errors import EnvironmentFailure, EnvironmentSpecError, ToolError
from hotpot.ids import canonical_json
from hotpot.types import ToolCall, ToolSpec

MAX_ECHO_CHARS = 24
"""What the model wrote is repeated to it up to this length."""
MAX_ARGUMENT_CHARS = 4096
"""Longer argument objects are refused unread."""
MAX_INTEGER = 10**18 - 1
"""Largest magnitude of an integer argument: 18 digits, so that it fits SQLite and every JSON reader."""

_KINDS: dict[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_NUMBER = re.compile(r"[+-]?(\d{1,18}(\.\d{0,18})?|\.\d{1,18})([eE][+-]?\d{1,3})?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReply:
    """What a tool answered. ``error`` is true where the call was refused; the text says why."""

    text: str
    error: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool: what the model is told, and the function behind it. ``is_method``: it takes the object it acts on."""

    spec: ToolSpec
    function: Callable[..., str]
    hints: Mapping[str, Any]
    required: tuple[str, ...]
    is_method: bool


class Toolbox:
    """The tools of an environment; immutable, shared by all its episodes."""

    def __init__(self, *functions: Callable[..., str]) -> None:
        """Derive a tool from each function. Raises EnvironmentSpecError for one that can't be a tool."""
        tools = [define_tool(function) for function in functions]
        self._tools = {tool.spec.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = [tool.spec.name for tool in tools]
            raise EnvironmentSpecError(f"tool names {names} repeat; each tool needs its own name")
        self.specs: tuple[ToolSpec, ...] = tuple(tool.spec for tool in tools)

    def run(self, call: ToolCall, *, on: object = None) -> ToolReply:
        """Check and carry out a call; a method acts on the object ``on``.

        A wrong name, a missing, extra or ill-typed argument and a ToolError come back as an error reply. Any other
        exception of a tool is a broken environment: EnvironmentFailure.
        """
        try:
            tool = self._tools.get(call.name)
            if tool is None:
                raise ToolError(f"no tool {clip(call.name)}")
            arguments = _arguments(tool, call.arguments)
        except ToolError as error:
            return error_reply(str(error))
        try:
            text = tool.function(on, **arguments) if tool.is_method else tool.function(**arguments)
        except ToolError as error:
            return error_reply(str(error))
        except EnvironmentFailure:
            raise
        except Exception as error:
            raise EnvironmentFailure(f"tool {call.name} broke: {type(error).__name__}: {error}") from error
        return ToolReply(text=text)


def define_tool(function: Callable[..., str]) -> Tool:
    """Derive a tool from a function, or from a method taken from its class (``Desk.find``).

    Raises EnvironmentSpecError where the docstring, an annotation or the return type ``str`` is missing, or an
    annotation is not supported.
    """
    name = function.__name__
    lines = [line.strip() for line in (inspect.getdoc(function) or "").splitlines()]
    if not lines or not lines[0]:
        raise EnvironmentSpecError(f"tool {name} has no docstring; its first line is what the model is told")
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise EnvironmentSpecError(f"annotations of tool {name} can't be resolved: {error}") from error
    if hints.get("return") is not str:
        raise EnvironmentSpecError(f"tool {name} must be annotated to return str, the text the model reads")
    parameters = dict(inspect.signature(function).parameters)
    is_method = next(iter(parameters), None) == "self"
    if is_method:
        del parameters["self"]
    properties = {}
    for parameter in parameters.values():
        properties[parameter.name] = _property(name, parameter, hints, lines[1:])
    required = tuple(key for key, parameter in parameters.items() if parameter.default is parameter.empty)
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    try:
        text = canonical_json(schema)
    except (TypeError, ValueError) as error:
        raise EnvironmentSpecError(f"a default of tool {name} is no plain JSON value: {error}") from error
    return Tool(
        spec=ToolSpec(name=name, description=lines[0], parameters=text),
        function=function,
        hints={key: hints[key] for key in parameters},
        required=required,
        is_method=is_method,
    )


def error_reply(reason: str) -> ToolReply:
    """Return the reply that refuses a call: ``error: <reason>``."""
    return ToolReply(text=f"error: {reason}", error=True)


def clip(text: str, limit: int = MAX_ECHO_CHARS) -> str:
    """Return text fit for repeating to the model: one line of printable characters, at most ``limit`` long."""
    line = " ".join("".join(sign if sign.isprintable() else " " for sign in text[: 4 * limit]).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _property(
    tool: str, parameter: inspect.Parameter, hints: Mapping[str, Any], lines: list[str]
) -> dict[str, Any]:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise EnvironmentSpecError(f"parameter {parameter} of tool {tool} must be a plain named parameter")
    if parameter.name not in hints:
        raise EnvironmentSpecError(
            f"parameter {parameter.name} of tool {tool} has no annotation; give it a type"
        )
    schema = _schema(tool, parameter.name, hints[parameter.name])
    for line in lines:
        if line.startswith(f"{parameter.name}: "):
            schema["description"] = line.removeprefix(f"{parameter.name}: ").strip()
    if parameter.default is not parameter.empty:
        schema["default"] = parameter.default
    return schema


def _schema(tool: str, parameter: str, hint: Any) -> dict[str, Any]:
    if hint in _KINDS:
        return {"type": _KINDS[hint]}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal and all(isinstance(choice, str) for choice in arguments):
        return {"type": "string", "enum": list(arguments)}
    if origin is list and len(arguments) == 1:
        return {"type": "array", "items": _schema(tool, parameter, arguments[0])}
    if origin in (Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        inner = next(argument for argument in arguments if argument is not type(None))
        return {"anyOf": [_schema(tool, parameter, inner), {"type": "null"}]}
    raise EnvironmentSpecError(
        f"parameter {parameter} of tool {tool} is annotated {hint!r}, which no JSON schema is derived from; "
        "use str, int, float, bool, Literal of texts, list of these, or one of them with | None"
    )


def _arguments(tool: Tool, text: str) -> dict[str, Any]:
    """Return checked and coerced arguments; raises ToolError with a short reason."""
    name = tool.spec.name
    given = _object(name, text)
    for key in given:
        if key not in tool.hints:
            raise ToolError(f"{name} takes no {clip(key)}")
    missing = [key for key in tool.required if key not in given]
    if missing:
        raise ToolError(f"{name} needs {' '.join(missing)}")
    return {key: _coerce(key, value, tool.hints[key]) for key, value in given.items()}


def _object(name: str, text: str) -> dict[str, Any]:
    if len(text) > MAX_ARGUMENT_CHARS:
        raise ToolError(f"arguments of {name} are too long")
    try:
        given = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"arguments of {name} are no json object") from error
    if not isinstance(given, dict):
        raise ToolError(f"arguments of {name} are no json object")
    return given


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ToolError(f"{clip(next(key for key in keys if keys.count(key) > 1))} is given twice")
    return values


def _coerce(key: str, value: Any, hint: Any) -> Any:
    """Return ``value`` as the annotated type, read from text where it arrived as text; raises ToolError."""
    arguments = typing.get_args(hint)
    if hint is str:
        return _text(key, value)
    if hint is int:
        return _integer(key, value)
    if hint is float:
        return _float(key, value)
    if hint is bool:
        return _boolean(key, value)
    if typing.get_origin(hint) is Literal:
        if value in arguments:
            return value
        raise ToolError(f"{key} must be one of {' '.join(arguments)}")
    if typing.get_origin(hint) is list:
        return [_coerce(key, item, arguments[0]) for item in _list(key, value)]
    inner = next(argument for argument in arguments if argument is not type(None))
    return None if value in (None, "null") else _coerce(key, value, inner)


def _text(key: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(_integer(key, value))
    if not isinstance(value, str):
        raise ToolError(f"{key} must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can spell and no database can hold
        raise ToolError(f"{key} must be text") from error
    return value


def _integer(key: str, value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,18}", value.strip(), re.ASCII):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INTEGER:
        return value
    raise ToolError(f"{key} must be a whole number")


def _float(key: str, value: Any) -> float:
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf:
        try:
            return float(value)
        except OverflowError:
            pass
    raise ToolError(f"{key} must be a number")


def _boolean(key: str, value: Any) -> bool:
    words = {"true": True, "false": False}
    if isinstance(value, str) and value.strip().lower() in words:
        return words[value.strip().lower()]
    if isinstance(value, bool):
        return value
    raise ToolError(f"{key} must be true or false")


def _list(key: str, value: Any) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ToolError(f"{key} must be a list") from error
    if not isinstance(value, list):
        raise ToolError(f"{key} must be a list")
    return value
