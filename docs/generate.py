"""Write the reference pages in docs/ from the code: tables, configuration, metrics, commands.

Run by ``make docs``; ``--check`` writes nothing and fails where a page is not what this would write. Every page is a pure
function of the code, the same on every machine.
"""

import argparse
import dataclasses
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hotpot.cli.main import app
from hotpot.config import Recipe
from hotpot.config.complaints import variants
from hotpot.metrics import METRICS, Metric
from hotpot.types import SCHEMA_VERSION, TABLES

FOLDER = Path(__file__).parent
NOTE = "<!-- Written by docs/generate.py from the code; change it there, then run `make docs`. -->\n\n"


def pages() -> dict[str, str]:
    """Return every generated page by file name."""
    return {
        "tables.md": _tables(),
        "configuration.md": _configuration(),
        "metrics.md": _metrics(),
        "commands.md": _commands(),
    }


def main(arguments: Sequence[str], *, folder: Path = FOLDER) -> int:
    """Write the pages of ``folder`` that are stale and return 0; with ``--check`` only name them, and return 1 if any is."""
    parser = argparse.ArgumentParser(description="Write the reference pages in docs/ from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is stale")
    check = parser.parse_args(arguments).check
    current = True
    for name, text in pages().items():
        path = folder / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        current = False
        if check:
            sys.stdout.write(f"{path} is stale; run `make docs`\n")
        else:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"wrote {path}\n")
    return 0 if current or not check else 1


def _rows(heading: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [heading, tuple("---" for _ in heading), *rows]
    return "".join("| " + " | ".join(_cell(cell) for cell in line) + " |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


# Tables ---------------------------------------------------------------------------------------------------------------


def _tables() -> str:
    parts = [
        NOTE,
        "# Tables of the lake\n\n",
        (
            f"Schema version {SCHEMA_VERSION}. Every column's meaning and unit also stand in the metadata of the files "
            'themselves. Ask them with `hotpot sql RUN "select ..."`.\n'
        ),
    ]
    for name, cls in TABLES.items():
        parts.append(f"\n## {name}\n\n{_table_text(cls)}\n\n")
        parts.append(_rows(("column", "type", "unit", "meaning"), _columns(cls)))
    return "".join(parts)


def _table_text(cls: type) -> str:
    text = " ".join((cls.__doc__ or "").split()).replace("``", "`")
    rest = text.split(": ", 1)[-1]
    return rest[:1].upper() + rest[1:]


def _columns(cls: type) -> Iterator[tuple[str, ...]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        yield (
            f"`{field.name}`",
            _type_text(hints[field.name]),
            field.metadata["unit"],
            field.metadata["meaning"],
        )


def _type_text(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return f"{_type_text(next(one for one in arguments if one is not type(None)))}, may be null"
    if origin is np.ndarray:
        return f"list of {typing.get_args(arguments[1])[0].__name__}"
    if origin is tuple:
        return f"list of {_type_text(arguments[0])}"
    return {int: "int64", float: "float64", str: "string", bool: "bool"}[hint]


# Configuration --------------------------------------------------------------------------------------------------------


def _configuration() -> str:
    parts = [
        NOTE,
        "# Configuration\n\n",
        (
            "A recipe is a TOML file; each section below is a table of it. On the command line a setting is written "
            "`section.key=value`. An unknown key is an error that names the nearest one. `hotpot train RECIPE --plan` prints "
            "the sizes that a recipe comes to.\n\n"
        ),
        "## At the top\n\n",
        _rows(("setting", "type", "default", "meaning"), _settings(Recipe, "")),
    ]
    for name, info in Recipe.model_fields.items():
        section = _section(info)
        if section is not None:
            parts += _section_text(section, name)
        for kind, variant in variants(info).items():
            parts += _section_text(variant, name, f'[{name}] kind = "{kind}"')
    return "".join(parts)


def _section_text(section: type[BaseModel], name: str, heading: str = "") -> list[str]:
    parts = [
        f"\n## {heading or f'[{name}]'}\n\n{' '.join((section.__doc__ or '').split()).replace('``', '`')}\n\n"
    ]
    rows = list(_settings(section, f"{name}."))
    if rows:
        parts.append(_rows(("setting", "type", "default", "meaning"), iter(rows)))
    for inner_name, info in section.model_fields.items():
        inner = _section(info)
        if inner is not None:
            parts += _section_text(inner, f"{name}.{inner_name}")
            meaning = " ".join((info.description or "").split())
            parts[-2] = parts[-2].rstrip("\n") + (f" {meaning}" if meaning else "") + "\n\n"
    return parts


def _settings(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, ...]]:
    for name, info in model.model_fields.items():
        if _section(info) is None and not variants(info):
            meaning = (info.description or "").replace("``", "`")
            yield (f"`{prefix}{name}`", _setting_type(info), _default(info), meaning)
            entry = _entry(info)
            if entry is not None:
                yield from _settings(entry, f"{prefix}{name}[].")


def _entry(info: FieldInfo) -> type[BaseModel] | None:
    """Return the section that each entry of a list is, if it is one of sections."""
    found = [one for one in typing.get_args(info.annotation) if isinstance(one, type)]
    return next((one for one in found if issubclass(one, BaseModel)), None)


def _section(info: FieldInfo) -> type[BaseModel] | None:
    annotation = info.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _setting_type(info: FieldInfo) -> str:
    text = _annotation(info.annotation)
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounds = [
        f"{sign} {getattr(found, name):g}"
        for found in _constraints(info)
        for name, sign in signs.items()
        if getattr(found, name, None) is not None
    ]
    return " ".join([text, ", ".join(bounds)]).strip()


def _constraints(info: FieldInfo) -> list[Any]:
    """Return the bounds of a field, also of one that may be left out (where they stand inside the union)."""
    inner = [
        found for part in typing.get_args(info.annotation) for found in getattr(part, "__metadata__", ())
    ]
    flat = [found for one in inner for found in (one.metadata if isinstance(one, FieldInfo) else [one])]
    return [*info.metadata, *flat]


def _annotation(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _annotation(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f'"{value}"' for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return _annotation(next(one for one in arguments if one is not type(None)))
    if origin is tuple:
        return f"list of {_annotation(arguments[0])}"
    if origin is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "tables"
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path"}
    return names[annotation]


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "none: must be given"
    default = info.get_default(call_default_factory=True, validated_data={})
    if default is None:
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, str | Path):
        return f'`"{default}"`'
    return f"`{list(default)}`" if isinstance(default, tuple) else f"`{default}`"


# Metrics --------------------------------------------------------------------------------------------------------------


def _metrics() -> str:
    parts = [
        NOTE,
        "# Metrics\n\n",
        (
            "A metric is a query over the lake: `numerator / denominator` over the rows of a table that pass the mask. "
            "`hotpot sql RUN --metric NAME --by policy_version,env_version` asks it in any of its cuts; "
            "`hotpot sql --metrics` lists them. Where the denominator is 0 or there are no rows, the value is null. "
            "Gauges are recorded in table `metrics` under their name.\n"
        ),
    ]
    titles = {
        "rollout": "Rollout",
        "engine": "Engine",
        "gate": "Gate",
        "learn": "Learning",
        "replay": "Replay",
        "queue": "Queue",
        "evaluation": "Evaluation",
        "system": "System",
    }
    for prefix, title in titles.items():
        chosen = [found for found in METRICS.values() if found.name.startswith(f"{prefix}/")]
        parts.append(f"\n## {title}\n")
        parts += [_metric(found) for found in chosen]
    return "".join(parts)


def _metric(found: Metric) -> str:
    rows = "trajectories of `steps`" if found.source != found.table else f"`{found.table}`"
    return (
        f"\n### {found.name}\n\n"
        f"{found.meaning}\n\n"
        f"- unit: {found.unit}\n"
        f"- healthy: {found.healthy}\n"
        f"- what to do: {found.remedy}\n"
        f"- over {rows}{f' where `{found.mask}`' if found.mask else ''}: "
        f"`({found.numerator}) / ({found.denominator})`\n"
        f"- cuts: {', '.join(found.cuts)}\n"
    )


# Commands -------------------------------------------------------------------------------------------------------------


def _commands() -> str:
    parts = [
        NOTE,
        "# Commands\n\n",
        (
            "Exit codes: 0 good, 1 the work failed or a check says no, 2 wrong use (one message on standard error), "
            "130 ended by Ctrl-C. A run is named by its folder, or by its id under `--runs`.\n"
        ),
    ]
    return "".join([*parts, *_commands_of("hotpot", typer.main.get_command(app))])


def _commands_of(path: str, command: Any) -> list[str]:
    if not hasattr(command, "commands"):
        return [_command(path, command)]
    return [
        part for name, inner in command.commands.items() for part in _commands_of(f"{path} {name}", inner)
    ]


def _command(path: str, command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and "--help" not in one.opts]
    usage = " ".join([path, *(_argument(one) for one in arguments), *(["[OPTIONS]"] if options else [])])
    parts = [f"\n## {path}\n\n```\n{usage}\n```\n\n{' '.join((command.help or '').split())}\n\n"]
    rows = [(f"`{one.metavar}`", one.help or "") for one in arguments]
    rows += [(f"`{_option(one)}`", _with_default(one)) for one in options]
    parts.append(_rows(("argument", "meaning"), iter(rows)))
    return "".join(parts)


def _argument(argument: Any) -> str:
    text = argument.metavar + ("..." if argument.nargs == -1 else "")
    return text if argument.required else f"[{text}]"


def _option(option: Any) -> str:
    names = "/".join([*option.opts, *option.secondary_opts])
    if option.is_flag:
        return names
    return f"{names} {option.metavar}"


def _with_default(option: Any) -> str:
    text = option.help or ""
    default = option.default
    if default is None or default == "" or (option.is_flag and not option.secondary_opts):
        return text
    shown = (option.opts if default else option.secondary_opts)[0] if option.is_flag else default
    return f"{text} Default: `{shown}`."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
