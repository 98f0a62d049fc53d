"""Printing results: aligned tables for people, JSON and CSV for programs. Floats that are not finite are null in JSON."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 240
_LONGEST_CELL = 80


def make_console(*, err: bool = False) -> "Console":
    """Return a console; one that is no terminal is wide, so that nothing is cut for a width nobody has."""
    from rich.console import Console

    console = Console(stderr=err)
    return console if console.is_terminal else Console(stderr=err, width=_WIDE)


def print_json(value: Any) -> None:
    """Print ``value`` as JSON on standard output."""
    typer.echo(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def print_rows(
    rows: Sequence[Mapping[str, Any]], *, columns: Sequence[str] | None = None, title: str = ""
) -> None:
    """Print rows as a table with ``columns`` (by default those of the first row)."""
    from rich.table import Table
    from rich.text import Text

    names = list(columns) if columns is not None else list(rows[0]) if rows else []
    table = Table(title=title or None, title_justify="left")
    for name in names:
        numeric = all(isinstance(row[name], int | float | None) for row in rows)
        table.add_column(name, justify="right" if numeric and rows else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell(row[name])) for name in names))
    make_console().print(table)


def csv_text(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return rows as CSV with a heading; lists as JSON, null as nothing."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_csv_cell(row[name]) for name in columns])
    return file.getvalue()


def cell(value: Any) -> str:
    """Return ``value`` as a table cell: rounded, cut where long."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)
    return text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 1] + "…"


def plain(value: Any) -> Any:
    """Return ``value`` as what JSON can hold; paths, dates and bytes as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, Path | datetime | date):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    return value


def _csv_cell(value: Any) -> Any:
    if value is None:
        return ""
    value = plain(value)
    return json.dumps(value) if isinstance(value, list | dict) else value
