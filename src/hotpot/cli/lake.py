"""``hotpot lake``: look after the lake of a run."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotpot.cli import quarantine
from hotpot.cli.exits import FAILED, HotpotGroup
from hotpot.cli.output import print_json, print_rows
from hotpot.cli.runs_folder import (
    DEFAULT_RUNS,
    JsonOption,
    RunArgument,
    RunsOption,
    find_run,
    open_reader,
    read_recipe,
)
from hotpot.errors import UsageError

if TYPE_CHECKING:
    from hotpot.config import StoreSection
    from hotpot.experience.maintenance import SizeReport, Verification

app = typer.Typer(
    cls=HotpotGroup,
    no_args_is_help=True,
    help="The lake: compact, vacuum, verify, export, delete; what was refused.",
)
app.add_typer(quarantine.app, name="quarantine")


@app.command()
def compact(run: RunArgument, runs: RunsOption = DEFAULT_RUNS, json_output: JsonOption = False) -> None:
    """Make few large files of many small ones; safe beside a living run."""
    from hotpot.experience.maintenance import compact as work

    rows = [dataclasses.asdict(report) for report in work(open_reader(find_run(run, runs)))]
    _show(rows, json_output)


@app.command()
def vacuum(
    run: RunArgument,
    retention_hours: Annotated[
        int, typer.Option("--retention-hours", metavar="N", min=0, help="Keep what went out of use later.")
    ] = 168,
    keep_updates: Annotated[
        int,
        typer.Option("--keep-updates", metavar="N", min=0, help="Keep the versions the last updates used."),
    ] = 10,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    runs: RunsOption = DEFAULT_RUNS,
    json_output: JsonOption = False,
) -> None:
    """Remove files that no kept version needs."""
    from hotpot.experience.maintenance import vacuum as work

    reports = work(
        open_reader(find_run(run, runs)),
        retention_hours=retention_hours,
        keep_updates=keep_updates,
        dry_run=dry_run,
    )
    if json_output:
        print_json([dataclasses.asdict(report) for report in reports])
        return
    rows = [
        {
            "table": report.table,
            "would remove" if dry_run else "removed": len(report.files),
            "bytes": report.num_bytes,
            "versions kept for updates": len(report.kept_versions),
        }
        for report in reports
    ]
    print_rows(rows)


@app.command()
def verify(
    run: RunArgument,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every page and recompute hashes of tokens.")
    ] = False,
    runs: RunsOption = DEFAULT_RUNS,
    json_output: JsonOption = False,
) -> None:
    """Check that nothing is lost, doubled or damaged; exits with 1 where something is."""
    from hotpot.experience.maintenance import verify as work

    found = work(open_reader(find_run(run, runs)), deep=deep)
    if json_output:
        print_json({"good": found.good, **dataclasses.asdict(found)})
    else:
        _print_findings(found)
    if not found.good:
        raise typer.Exit(FAILED)


@app.command()
def export(
    run: RunArgument,
    copy: Annotated[
        Path | None,
        typer.Option("--copy", metavar="FOLDER", help="Copy all records as plain Parquet to a new folder."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Where the list of files goes; by default into the run folder."
        ),
    ] = None,
    runs: RunsOption = DEFAULT_RUNS,
    json_output: JsonOption = False,
) -> None:
    """Write the exact list of files, or a copy, for programs that can't read Delta."""
    from hotpot.experience.maintenance import copy_run, write_export

    if copy is not None and out is not None:
        raise UsageError(
            "--copy and --out exclude each other: a copy needs no list of files; give one of them"
        )
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}; make it, or name another")
    reader = open_reader(find_run(run, runs))
    if copy is not None:
        _show([dataclasses.asdict(one) for one in copy_run(reader, copy)], json_output)
        return
    path = write_export(reader, out)
    if json_output:
        print_json({"path": path})
    else:
        typer.echo(f"wrote {path}")


@app.command()
def delete(
    run: RunArgument,
    trajectory: Annotated[
        str, typer.Argument(metavar="TRAJECTORY", help="Trajectory id, for instance 17.3.0.")
    ],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; it stays on the record.")],
    runs: RunsOption = DEFAULT_RUNS,
    json_output: JsonOption = False,
) -> None:
    """Delete one trajectory everywhere, for good; refused while the run is being written."""
    from hotpot.experience.maintenance import delete as work

    folder = find_run(run, runs)
    done = work(open_reader(folder), trajectory, reason=reason, settings=_store_settings(folder))
    if json_output:
        print_json({**dataclasses.asdict(done), "totals": done.deletion.totals()})
        return
    rows = ", ".join(f"{count} of {name}" for name, count in done.deletion.totals().items())
    typer.echo(
        f"deleted {trajectory} ({rows} rows) and {done.removed_files} older files that held it; "
        "its attempt and consumptions stay, and an event says who deleted it, when and why"
    )
    if done.accepted_as:
        typer.echo(
            f"what was accepted of it under another name stays: {', '.join(done.accepted_as)}; delete that too where its "
            "content is to go",
            err=True,
        )


@app.command()
def sizes(
    run: RunArgument,
    table: Annotated[
        str | None, typer.Option("--table", metavar="NAME", help="The columns of one table.")
    ] = None,
    runs: RunsOption = DEFAULT_RUNS,
    json_output: JsonOption = False,
) -> None:
    """Say where the bytes are: by table and by column."""
    from hotpot.experience.maintenance import sizes as work

    report = work(open_reader(find_run(run, runs)))
    known = [one.table for one in report.tables]
    if table is not None and table not in known:
        raise UsageError(f"the lake has no table {table!r}; it has {', '.join(known) or 'none yet'}")
    if json_output:
        print_json(dataclasses.asdict(report))
    else:
        _print_sizes(report, table)


def _show(rows: list[dict[str, Any]], json_output: bool) -> None:
    if json_output:
        print_json(rows)
    else:
        print_rows(rows)


def _print_findings(found: "Verification") -> None:
    for finding in found.findings:
        typer.echo(str(finding))
    for name, why in found.skipped:
        typer.echo(f"not checked: {name} ({why})")
    counts = found.counts
    typer.echo(
        f"{'sound' if found.good else 'NOT sound'}: {counts.rows} rows in {counts.files} files of {counts.tables} tables, "
        f"{counts.num_bytes} bytes; {counts.log_segments} log segments; {counts.unused_files} files out of use "
        f"({counts.half_files} cut by a crash, {counts.unused_bytes} bytes: vacuum takes them); "
        f"{counts.deletions} deletions"
    )


def _print_sizes(report: "SizeReport", table: str | None) -> None:
    if table is not None:
        (chosen,) = (one for one in report.tables if one.table == table)
        print_rows([dataclasses.asdict(column) for column in chosen.columns], title=f"columns of {table}")
        return
    rows = []
    for one in report.tables:
        row = dataclasses.asdict(one)
        del row["columns"]
        rows.append(row)
    print_rows(rows)
    typer.echo(
        f"{report.num_bytes} bytes in the lake, {report.log_bytes} in {report.log_segments} log segments; "
        "--table NAME shows its columns"
    )


def _store_settings(run: Path) -> "StoreSection":
    from hotpot.config import StoreSection

    recipe = read_recipe(run) or {}
    return StoreSection.model_validate(recipe.get("store", {}), strict=False)
