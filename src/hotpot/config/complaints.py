"""Pydantic's validation errors as lines an operator can act on: where, which value, which rule, what to do.

Owns the wording only. One error gives one line; the order is pydantic's, with repeats dropped.
"""

import json
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from hotpot.config.recipe import Recipe

_RULES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": 'must be text (in TOML: "...")',
    "path_type": 'must be a path as text (in TOML: "...")',
    "tuple_type": "must be a list (in TOML: [..., ...])",
    "list_type": "must be a list (in TOML: [..., ...])",
    "dict_type": "must be a table (in TOML: [section] or {{key = value}})",
    "model_type": "must be a section (in TOML: [section])",
    "model_attributes_type": "must be a section (in TOML: [section])",
    "greater_than": "must be > {gt}",
    "greater_than_equal": "must be >= {ge}",
    "less_than": "must be < {lt}",
    "less_than_equal": "must be <= {le}",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "string_pattern_mismatch": "must match {pattern}",
    "missing": "must be given",
}


def complaints(
    error: ValidationError, origin: str, from_command_line: Collection[tuple[str, ...]] = ()
) -> list[str]:
    """Return one line for each mistake in a recipe.

    ``origin`` names the file; paths in ``from_command_line`` are blamed on the command line instead.
    """
    lines: dict[str, None] = {}
    for detail in error.errors():
        path = tuple(str(part) for part in detail["loc"])
        text = _complaint(detail, path)
        where = "command line" if _blamed(_shown_path(path), text, from_command_line) else origin
        lines.setdefault(f"{where}: {text}")
    return list(lines)


def _blamed(path: tuple[str, ...], text: str, from_command_line: Collection[tuple[str, ...]]) -> bool:
    """Say whether the command line is to blame; a rule over several settings names them in its text."""
    if not path:
        return any(f"{'.'.join(given)} " in text for given in from_command_line)
    return any(path[: len(given)] == given or given[: len(path)] == path for given in from_command_line)


def _complaint(detail: ErrorDetails, path: tuple[str, ...]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    dotted = ".".join(_shown_path(path))
    if kind == "extra_forbidden":
        return _unknown(path)
    if kind == "value_error":
        message = str(context.get("error", detail["msg"]))
        return message if dotted in message or not path else f"{dotted}: {message}"
    if kind in {"union_tag_invalid", "union_tag_not_found"}:
        tag = context.get("tag", _shown(detail["input"]))
        return f"{dotted}.kind = {_shown(tag)} must be {_choices(path)}; change it, or leave it out for the default"
    rule = _RULES.get(kind)
    words = rule.format_map(context) if rule is not None else f"is refused: {detail['msg']}"
    if kind == "missing":
        return f"{dotted} {words}"
    return f"{dotted} = {_shown(detail['input'])} {words}; {_remedy(path)}"


def _remedy(path: tuple[str, ...]) -> str:
    info = _field(path)
    if info is None:
        return "change the value"
    meaning = " ".join((info.description or "").split())
    default = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(default, BaseModel):
        return "see docs/configuration.md for what it holds"
    leave_out = "leave it out" if default is None else f"leave it out for {_shown(default)}"
    return f"change it, or {leave_out}" + (f" ({meaning})" if meaning else "")


def _unknown(path: tuple[str, ...]) -> str:
    shown = _shown_path(path)
    name, dotted = path[-1], ".".join(shown)
    what = "section or setting" if len(path) == 1 else "setting"
    parent = _model(path[:-1])
    beside = list(parent.model_fields) if parent is not None else []
    prefix = ".".join(shown[:-1])
    near = get_close_matches(name, beside, n=1, cutoff=0.6) or [
        known for known in beside if name == "".join(word[0] for word in known.split("_"))
    ]
    if near:
        found = " or ".join(f"{prefix}.{known}" if prefix else known for known in near)
        return f"unknown {what} {dotted}; nearest: {found}"
    everywhere = {known: known.rsplit(".", 1)[-1] for known in _leaves(Recipe)}
    close = get_close_matches(name, list(everywhere.values()), n=1, cutoff=0.75)
    elsewhere = [known for known, last in everywhere.items() if last in close]
    if dotted in elsewhere:
        return f"{dotted} is no setting of {path[0]}.kind = {json.dumps(path[1])}; known there: {', '.join(beside)}"
    if elsewhere:
        return f"unknown {what} {dotted}; nearest: {' or '.join(elsewhere)}"
    return f"unknown {what} {dotted}; known here: {', '.join(beside) or 'nothing'}"


def variants(info: FieldInfo) -> dict[str, type[BaseModel]]:
    """Return the sections that a tagged field may be, by ``kind``; none where it is not tagged."""
    if info.discriminator is None:
        return {}
    kinds = [one for one in get_args(info.annotation) if isinstance(one, type) and issubclass(one, BaseModel)]
    return {str(one.model_fields["kind"].default): one for one in kinds}


def _shown_path(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``path`` without the tags that pydantic puts into it: what stands in the recipe."""
    if len(path) > 1 and path[0] in Recipe.model_fields and path[1] in variants(Recipe.model_fields[path[0]]):
        return path[:1] + path[2:]
    return path


def _choices(path: tuple[str, ...]) -> str:
    return " or ".join(json.dumps(kind) for kind in variants(Recipe.model_fields[path[0]]))


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        inner = _section(info)
        within = [inner] if inner is not None else list(variants(info).values())
        if not within:
            yield prefix + name
        for section in within:
            yield from _leaves(section, f"{prefix}{name}.")


def _section(info: FieldInfo) -> type[BaseModel] | None:
    annotation = info.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _model(path: tuple[str, ...]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = Recipe
    tagged: dict[str, type[BaseModel]] = {}
    for part in path:
        if part.isdigit():
            continue  # a place in a list of sections
        if part in tagged:
            model, tagged = tagged[part], {}
            continue
        info = model.model_fields.get(part) if model is not None else None
        tagged = {} if info is None else variants(info)
        model = None if info is None else _section(info) or _entry(info)
    return model


def _entry(info: FieldInfo) -> type[BaseModel] | None:
    """Return the section that each entry of a list is, if it is one of sections."""
    found = [inner for inner in get_args(info.annotation) if isinstance(inner, type)]
    return next((inner for inner in found if issubclass(inner, BaseModel)), None)


def _field(path: tuple[str, ...]) -> FieldInfo | None:
    """Return the field at ``path``, or of the setting that holds it (a list entry's list)."""
    for end in range(len(path), 0, -1):
        parent = _model(path[: end - 1])
        if parent is not None and path[end - 1] in parent.model_fields:
            return parent.model_fields[path[end - 1]]
    return None


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=str)
    except ValueError:
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
