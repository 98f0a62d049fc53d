"""``hotpot sql``: ask a run's tables, or one of its registered metrics."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hotpot.cli.output import csv_text, print_json, print_rows
from hotpot.cli.runs_folder import DEFAULT_RUNS, JsonOption, RunsOption, find_run, open_reader
from hotpot.errors import UsageError


def sql(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Run: its folder, or its id under --runs.")
    ] = None,
    query: Annotated[
        str | None, typer.Argument(metavar="QUERY", help="SQL (DuckDB); docs/tables.md has the tables.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", metavar="NAME", help="Ask a registered metric instead.")
    ] = None,
    by: Annotated[str, typer.Option("--by", metavar="A,B", help="With --metric: columns to cut by.")] = "",
    where: Annotated[
        str, typer.Option("--where", metavar="SQL", help="With --metric: a further condition.")
    ] = "",
    metrics: Annotated[bool, typer.Option("--metrics", help="List the registered metrics.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    runs: RunsOption = DEFAULT_RUNS,
    json_output: JsonOption = False,
) -> None:
    """Query a run's tables with SQL, or one of its metrics in any cut."""
    if csv and json_output:
        raise UsageError("--csv and --json exclude each other; give one of them")
    if metrics:
        _print_metrics(csv, json_output)
        return
    text = _query(query, metric, by, where)
    if run is None:
        raise UsageError("no run is given; `hotpot runs` lists them")
    columns, rows = ask(run, text, runs)
    _print(rows, columns, csv, json_output)


def ask(run: str, query: str, runs: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the columns and rows of a query over a run.

    Raises
    ------
    UsageError: the query is wrong, or more than reading; with the database's reason.
    RunFolderError: there is no such run.
    """
    table = open_reader(find_run(run, runs)).sql(query)
    return list(table.column_names), table.to_pylist()


def _query(query: str | None, metric: str | None, by: str, where: str) -> str:
    if (query is None) == (metric is None):
        raise UsageError("give either a query or --metric NAME (--metrics lists the metrics)")
    if metric is None:
        if by or where:
            raise UsageError("--by and --where belong to --metric; write them into the query")
        return query or ""
    from hotpot import metrics as registry

    cuts = [column.strip() for column in by.split(",") if column.strip()]
    return registry.sql(registry.metric(metric), by=cuts, where=where)


def _print_metrics(csv: bool, json_output: bool) -> None:
    from hotpot.metrics import METRICS

    columns = ("name", "unit", "meaning", "cuts")
    rows = [{name: getattr(found, name) for name in columns} for found in METRICS.values()]
    if csv or json_output:
        _print(rows, columns, csv, json_output)
    else:
        print_rows(rows, columns=("name", "unit", "meaning"), wrapped=("meaning",))


def _print(rows: list[dict[str, Any]], columns: Any, csv: bool, json_output: bool) -> None:
    if json_output:
        print_json(rows)
    elif csv:
        typer.echo(csv_text(rows, columns), nl=False)
    else:
        print_rows(rows, columns=columns)
