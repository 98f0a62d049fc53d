"""From a TOML file and command-line overrides to a :class:`Recipe`, or to one clear line per mistake.

Owns reading and the wording of every complaint about a recipe. Knows no default (they live in ``recipe``) and nothing
of models, environments or runs: what needs a file besides the recipe is checked by whoever reads that file.
Values are checked strictly: ``"16"`` and ``true`` are no whole numbers.
"""

import datetime
import json
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hotpot.config.complaints import complaints, variants
from hotpot.config.recipe import Recipe
from hotpot.errors import RecipeError

Override = tuple[tuple[str, ...], Any]
"""A dotted path as its parts, and the value to put there."""


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe in the TOML file ``path`` with ``overrides`` (``section.key=value``) laid over it.

    Raises
    ------
    RecipeError: the file is missing or no TOML, or a key or value cannot work; one line per mistake.
    """
    return build_recipe(read_toml(path), overrides, origin=str(path))


def build_recipe(data: Mapping[str, Any], overrides: Sequence[str] = (), *, origin: str) -> Recipe:
    """Return the recipe for parsed settings, for instance those a run's manifest keeps.

    ``origin`` is the name that messages give to where ``data`` came from.

    Raises
    ------
    RecipeError: a key or value cannot work; one line per mistake.
    """
    settings = _plain(data)
    parsed = [parse_override(text) for text in overrides]
    for parts, value in parsed:
        _put(settings, parts, value)
    try:
        # The defaults go in as JSON too: strict checking would refuse them as they stand in the classes (paths).
        complete = _laid_over(_defaults(settings), settings)
        return Recipe.model_validate_json(json.dumps(complete), strict=True)
    except ValidationError as error:
        from_command_line = frozenset(parts for parts, _ in parsed)
        raise RecipeError("\n".join(complaints(error, origin, from_command_line))) from error


def read_toml(path: Path) -> dict[str, Any]:
    """Return the TOML file ``path`` as a dictionary.

    Raises
    ------
    RecipeError: the file is missing, a folder, unreadable, not UTF-8 or no TOML (with the line).
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise RecipeError(_missing(path)) from None
    except IsADirectoryError:
        raise RecipeError(f"{path} is a folder; give a recipe: a TOML file") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: byte {error.start} is not UTF-8; a recipe is UTF-8 text") from error
    except OSError as error:
        raise RecipeError(f"{path} cannot be read ({error.strerror}); make it readable") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        last = f"at line {max(1, len(text.splitlines()))}, the end of the file"
        reason = str(error).replace("at end of document", last)
        raise RecipeError(f"{path} is not valid TOML: {reason}; correct that line") from error


def parse_override(text: str) -> Override:
    """Return the path and the value of one ``section.key=value``.

    The value is read as TOML; what is no TOML value and does not begin like one is a string, so that
    ``model.path=models/small`` needs no quotes.

    Raises
    ------
    RecipeError: there is no ``=``, a part of the path is empty, or the value begins like TOML and is none.
    """
    key, equals, raw = text.partition("=")
    parts = tuple(part.strip() for part in key.split("."))
    if not equals or not all(parts):
        raise RecipeError(f"override {text!r} is not of the form section.key=value; write it so")
    raw = raw.strip()
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError as error:
        if raw[:1] in {'"', "'", "[", "{"}:
            raise RecipeError(
                f"override {text!r}: the value is not valid TOML ({error}); mind the shell's quotes"
            ) from error
        return parts, raw
    value = parsed["value"]
    if len(parsed) > 1 or isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return parts, raw
    return parts, value


def build_mapping(overrides: Sequence[str]) -> dict[str, Any]:
    """Return ``key=value`` texts as one nested dictionary, for parameters that another model checks.

    Raises
    ------
    RecipeError: one of them is not of that form.
    """
    settings: dict[str, Any] = {}
    for text in overrides:
        _put(settings, *parse_override(text))
    return settings


def _nearest(word: str, known: Sequence[str]) -> str | None:
    """Return the name in ``known`` that ``word`` was most likely meant to be, if any is near."""
    found = get_close_matches(word, known, n=1, cutoff=0.5)
    return found[0] if found else None


def _missing(path: Path) -> str:
    message = f"recipe file {path} does not exist"
    folder = path.parent
    beside = sorted(entry.name for entry in folder.glob("*.toml")) if folder.is_dir() else []
    near = _nearest(path.name, beside) or _nearest(path.name + ".toml", beside)
    if near is not None:
        return f"{message}; nearest: {folder / near}"
    return f"{message}; " + (
        f"in {folder}: {', '.join(beside)}" if beside else "give the path of a TOML file"
    )


def _defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default of every setting; of a section with variants those of the kind that ``settings`` asks for."""
    found = Recipe().model_dump(mode="json")
    for name, info in Recipe.model_fields.items():
        told = settings.get(name)
        kind = told.get("kind") if isinstance(told, Mapping) else None
        if isinstance(kind, str) and kind in (known := variants(info)):
            found[name] = known[kind]().model_dump(mode="json")
    return found


def _laid_over(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            merged[key] = _laid_over(below, value)
        else:
            merged[key] = value
    return merged


def _plain(value: Any) -> Any:
    """Return ``value`` with fresh containers and with dates as text, so that it is JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    return value


def _put(settings: dict[str, Any], parts: tuple[str, ...], value: Any) -> None:
    inner = settings
    for depth, part in enumerate(parts[:-1]):
        step = inner.setdefault(part, {})
        if not isinstance(step, dict):
            name = ".".join(parts[: depth + 1])
            raise RecipeError(
                f"override {'.'.join(parts)}: {name} = {step!r} is a setting, not a section; nothing lies under it"
            )
        inner = step
    inner[parts[-1]] = value
