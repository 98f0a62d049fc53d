"""Printing results: aligned tables for people, JSON and CSV for programs. Floats that are not finite are null in JSON."""

import csv
import io
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 240
_LONGEST_CELL = 80
_NARROWEST = 24


def make_console(*, err: bool = False) -> "Console":
    """Return a console; one that is no terminal is wide, so that nothing is cut for a width nobody has."""
    from rich.console import Console

    console = Console(stderr=err)
    return console if console.is_terminal else Console(stderr=err, width=_WIDE)


def print_json(value: Any) -> None:
    """Print ``value`` as JSON on standard output."""
    typer.echo(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def print_lines(lines: Iterable[tuple[str, str]]) -> None:
    """Print (text, style) line by line, as it stands: nothing in it is markup, nothing is cut."""
    console = make_console()
    for text, style in lines:
        console.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)


def print_rows(
    rows: Sequence[Mapping[str, Any]],
    *,
    columns: Sequence[str] | None = None,
    title: str = "",
    wrapped: Collection[str] = (),
) -> None:
    """Print rows as a table with ``columns`` (by default those of the first row).

    Where the table is wider than the console, each row is printed as a list of its columns instead, unless it fits with
    the columns ``wrapped``, whose text is printed whole, broken over several lines.
    """
    from rich.table import Table
    from rich.text import Text

    names = list(columns) if columns is not None else list(rows[0]) if rows else []
    cells = [[str(row[name]) if name in wrapped else cell(row[name]) for name in names] for row in rows]
    console = make_console()
    if rows and _width(names, cells, wrapped) > console.width:
        _print_lists(cells, names, title, console)
        return
    table = Table(title=title or None, title_justify="left")
    for name in names:
        numeric = all(isinstance(row[name], int | float | None) for row in rows)
        table.add_column(name, justify="right" if numeric and rows else "left", no_wrap=name not in wrapped)
    for texts in cells:
        table.add_row(*map(Text, texts))
    console.print(table)


def _width(names: Sequence[str], cells: Sequence[Sequence[str]], wrapped: Collection[str]) -> int:
    """Return the characters a table is wide, borders too, with the columns ``wrapped`` as narrow as can be read."""
    from rich.cells import cell_len

    widths = [
        _NARROWEST if name in wrapped else max(cell_len(text) for text in (name, *(row[at] for row in cells)))
        for at, name in enumerate(names)
    ]
    return sum(widths) + 3 * len(widths) + 1


def _print_lists(
    cells: Sequence[Sequence[str]], names: Sequence[str], title: str, console: "Console"
) -> None:
    width = max(map(len, names))
    for number, row in enumerate(cells, start=1):
        heading = f"{title + ', ' if title else ''}row {number} of {len(cells)}"
        console.print(heading, style="bold", markup=False, highlight=False)
        for name, text in zip(names, row, strict=True):
            console.print(f"  {name:{width}}  {text}", markup=False, highlight=False, soft_wrap=True)


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
        if value.is_integer() and abs(value) < 1e15:
            return f"{value:.0f}"
        return f"{value:.4g}" if abs(value) < 1e3 else f"{value:.1f}"
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
