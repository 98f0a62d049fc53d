"""Tool calls as text: the compact ``name(key=value, ...)`` and the JSON object, read and written.

Knows text and JSON schemas, no tokens. Invariants: reading raises :class:`Unreadable` with a few words and nothing
else, whatever the text; the arguments it returns are canonical JSON that UTF-8 can carry, without NaN, infinities or
repeated keys.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from hotpot.ids import canonical_json
from hotpot.types import ToolCall, ToolSpec

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_CALL = re.compile(r"\s*([^\s()]*)\((.*)\)\s*", re.DOTALL)
_PAIR = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_NEXT_PAIR = re.compile(r", (?=[A-Za-z_][A-Za-z0-9_]*=)")
_ANY: frozenset[str] = frozenset()
"""Types of a value whose schema names none."""


class Unreadable(ValueError):
    """A call that can't be read; its text says why, in a few words for the model."""


def read_compact_call(text: str, tools: Sequence[ToolSpec]) -> ToolCall:
    """Return the call ``name(key=value, ...)``; values are typed by the schema of the tool of that name."""
    match = _CALL.fullmatch(text)
    if match is None:
        raise Unreadable("a call is name(key=value, ...)")
    name, inside = match.groups()
    kinds = _kinds(name, tools)
    arguments: dict[str, Any] = {}
    for pair in _NEXT_PAIR.split(inside) if inside.strip() else ():
        parts = _PAIR.fullmatch(pair)
        if parts is None:
            raise Unreadable("arguments are key=value, key=value")
        key, value = parts.groups()
        if key in arguments:
            raise Unreadable(f"argument {key} is given twice")
        arguments[key] = _read_value(value, kinds.get(key, _ANY))
    return _call(name, arguments)


def write_compact_call(call: ToolCall, tools: Sequence[ToolSpec]) -> str:
    """Return ``call`` as ``name(key=value, ...)``. ValueError where a key is no identifier."""
    kinds = _kinds(call.name, tools)
    pairs = [
        f"{key}={_write_value(value, kinds.get(key, _ANY))}"
        for key, value in json.loads(call.arguments).items()
    ]
    return f"{call.name}({', '.join(pairs)})"


def read_json_call(text: str, tools: Sequence[ToolSpec]) -> ToolCall:
    """Return the call ``{"name": ..., "arguments": {...}}``. Schemas are not needed: JSON values have types."""
    del tools
    value = _load(text)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise Unreadable('a call is {"name": ..., "arguments": {...}}')
    if not isinstance(value.get("arguments"), dict):
        raise Unreadable("arguments must be a json object")
    return _call(value["name"], value["arguments"])


def write_json_call(call: ToolCall) -> str:
    """Return ``call`` as ``{"name": ..., "arguments": {...}}``; ``<`` is escaped, so that no marker can occur in it."""
    text = json.dumps({"name": call.name, "arguments": json.loads(call.arguments)}, ensure_ascii=False)
    return text.replace("<", "\\u003c")


def _call(name: str, arguments: dict[str, Any]) -> ToolCall:
    if not _NAME.fullmatch(name):
        raise Unreadable("a tool name is letters, digits, _ . -")
    try:
        text = canonical_json(arguments)
        text.encode()
    except (ValueError, RecursionError):  # infinities that JSON can spell (1e999), lone surrogates
        raise Unreadable("arguments hold a value that is no json") from None
    return ToolCall(name=name, arguments=text)


def _read_value(text: str, kinds: frozenset[str]) -> Any:
    if text == "null" and "null" in kinds:
        return None
    is_text = kinds - {"null"} == {"string"}
    if is_text and not text.startswith('"'):
        return text
    try:
        value = _load(text)
    except Unreadable:
        return text
    if isinstance(value, str) or not is_text:
        return value
    return text


def _write_value(value: Any, kinds: frozenset[str]) -> str:
    if isinstance(value, str) and not _NEXT_PAIR.search(value):
        read = _read_value(value, kinds)
        if isinstance(read, str) and read == value:
            return value
    # In JSON without spaces between its parts, ", " occurs inside strings only, where the comma may be escaped.
    return canonical_json(value).replace(", ", "\\u002c ")


def _load(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except Unreadable:
        raise
    except (ValueError, RecursionError):
        raise Unreadable("the call is not valid json") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise Unreadable("a key is given twice")
    return values


def _refuse_constant(name: str) -> Any:
    raise Unreadable(f"{name} is no json value")


def _kinds(name: str, tools: Sequence[ToolSpec]) -> dict[str, frozenset[str]]:
    return next((_property_kinds(tool.parameters) for tool in tools if tool.name == name), {})


@lru_cache(maxsize=1024)
def _property_kinds(parameters: str) -> dict[str, frozenset[str]]:
    """Return the JSON types each property of a schema may have."""
    schema = json.loads(parameters)
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {key: _types(value) for key, value in properties.items()}


def _types(schema: Any) -> frozenset[str]:
    """Return the types of a schema, of all its alternatives together; none where one of them does not say."""
    if not isinstance(schema, dict):
        return _ANY
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(alternatives, list):
        found = [_types(alternative) for alternative in alternatives]
        return frozenset().union(*found) if all(found) else _ANY
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    named = frozenset(one for one in kinds if isinstance(one, str))
    return named if len(named) == len(kinds) else _ANY


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
