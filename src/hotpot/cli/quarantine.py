"""``hotpot lake quarantine``: what the gate refused, why, and bringing it back once the cause is mended."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotpot.cli.exits import FAILED, HotpotGroup
from hotpot.cli.output import print_json, print_rows
from hotpot.cli.runs_folder import DEFAULT_RUNS, JsonOption, RunArgument, RunsOption, find_run, open_reader
from hotpot.errors import UsageError

if TYPE_CHECKING:
    from hotpot.experience import ExperienceStore, Refused

app = typer.Typer(cls=HotpotGroup, no_args_is_help=True, help="Records that the gate refused.")

ReasonOption = Annotated[
    str, typer.Option("--reason", metavar="R", help="Only those refused for this reason.")
]
ProducerOption = Annotated[str, typer.Option("--producer", metavar="P", help="Only those of this producer.")]

_COLUMNS = ("quarantine_id", "record_id", "producer", "reason", "state", "became")


@app.command("list")
def list_records(
    run: RunArgument,
    reason: ReasonOption = "",
    producer: ProducerOption = "",
    records: Annotated[bool, typer.Option("--records", help="List the records, not their counts.")] = False,
    runs: RunsOption = DEFAULT_RUNS,
    json_output: JsonOption = False,
) -> None:
    """Count what was refused, by reason and producer, with what became of it."""
    from hotpot.experience import list_refused

    found = _chosen(list_refused(open_reader(find_run(run, runs))), reason, producer)
    rows = [dataclasses.asdict(one) for one in found] if records else _counted(found)
    if json_output:
        print_json(rows)
    elif rows:
        print_rows(rows, columns=_COLUMNS if records else None)
    else:
        typer.echo("nothing was refused" + (" for that by that producer" if reason or producer else ""))


@app.command()
def show(
    run: RunArgument,
    quarantine_id: Annotated[str, typer.Argument(metavar="ID", help="Quarantine id, as list shows it.")],
    runs: RunsOption = DEFAULT_RUNS,
    json_output: JsonOption = False,
) -> None:
    """Show one refused record: why it was refused, what became of it, and its payload."""
    from hotpot.experience import list_refused

    reader = open_reader(find_run(run, runs))
    found = reader.table("quarantine", where="quarantine_id = ?", params=[quarantine_id]).to_pylist()
    if not found:
        raise UsageError(
            f"no quarantine record {quarantine_id!r}; `hotpot lake quarantine list {run} --records` shows their ids"
        )
    (one,) = [each for each in list_refused(reader) if each.quarantine_id == quarantine_id][:1]
    row = {**found[0], "state": one.state, "became": one.became}
    row["payload"] = json.loads(row["payload"])
    if json_output:
        print_json(row)
        return
    payload = row.pop("payload")
    width = max(map(len, row))
    for name, value in row.items():
        typer.echo(f"{name:{width}}  {value}")
    typer.echo("payload")
    typer.echo(json.dumps(payload, indent=1, ensure_ascii=False))


@app.command("requeue")
def requeue_records(
    run: RunArgument,
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Quarantine ids, as list shows them.")
    ] = None,
    reason: Annotated[
        str,
        typer.Option("--reason", metavar="R", help="All that were refused for this reason and still wait."),
    ] = "",
    vocabulary: Annotated[
        int,
        typer.Option("--vocabulary", metavar="N", min=0, help="Vocabulary size, where the run does not say."),
    ] = 0,
    runs: RunsOption = DEFAULT_RUNS,
    json_output: JsonOption = False,
) -> None:
    """Bring refused records back through the gate; the run must be at rest. Exits with 1 where one is refused again."""
    from hotpot.experience import list_refused, requeue

    if bool(ids) == bool(reason):
        raise UsageError("give either ids or --reason R; `hotpot lake quarantine list` shows both")
    folder = find_run(run, runs)
    with _open_store(folder, vocabulary) as store:
        found = _chosen(list_refused(open_reader(folder)), reason, "")
        wanted = ids or [one.quarantine_id for one in found if one.state == "waiting"]
        report = requeue(store, wanted)
    if json_output:
        print_json(dataclasses.asdict(report))
    else:
        lines = [f"{each} accepted as {name}" for each, name in report.accepted]
        lines += [f"{each} refused again ({why}), now {new}" for each, new, why in report.refused]
        lines += [f"{each} left alone, {why}" for each, why in report.skipped]
        typer.echo("\n".join(lines) if lines else "nothing waits")
    if report.refused:
        raise typer.Exit(FAILED)


def _chosen(found: "list[Refused]", reason: str, producer: str) -> "list[Refused]":
    for wanted, what, known in (
        (reason, "reason", {one.reason for one in found}),
        (producer, "producer", {one.producer for one in found}),
    ):
        if wanted and wanted not in known:
            raise UsageError(
                f"nothing in quarantine has the {what} {wanted!r}; there is {', '.join(sorted(known)) or 'nothing'}"
            )
    return [one for one in found if reason in ("", one.reason) and producer in ("", one.producer)]


def _counted(found: "list[Refused]") -> list[dict[str, Any]]:
    counts = Counter((one.reason, one.producer) for one in found)
    states = Counter((one.reason, one.producer, one.state) for one in found)
    examples = {(one.reason, one.producer): one.quarantine_id for one in reversed(found)}
    return [
        {
            "reason": reason,
            "producer": producer,
            "records": number,
            **{state: states[reason, producer, state] for state in ("waiting", "requeued", "replaced")},
            "example": examples[reason, producer],
        }
        for (reason, producer), number in counts.most_common()
    ]


def _open_store(folder: Path, vocabulary: int) -> "ExperienceStore":
    """Take the run over, with the settings it was told last. No breaker: who requeues has mended the cause."""
    from hotpot.cli.runs_folder import read_recipe
    from hotpot.config import GateSection, StoreSection
    from hotpot.experience import ExperienceStore, read_manifest

    manifest = read_manifest(folder)
    size = vocabulary or manifest.vocabulary_size or _vocabulary(folder)
    if not size:
        raise UsageError(
            f"{folder} does not say how large the run's vocabulary is and has no checkpoint; give --vocabulary N"
        )
    settings = (read_recipe(folder) or {}).get("store", {})
    return ExperienceStore.open(
        folder,
        run_id=manifest.run_id,
        settings=StoreSection.model_validate(settings),
        vocabulary_size=size,
        resume=True,
        gate=GateSection(breaker_share=1.0),
    )


def _vocabulary(folder: Path) -> int:
    """Return the vocabulary size of the run's newest checkpoint; 0 where there is none."""
    for path in sorted((folder / "checkpoints").glob("*/config.json"), reverse=True):
        return int(json.loads(path.read_text(encoding="utf-8")).get("vocab_size", 0))
    return 0
