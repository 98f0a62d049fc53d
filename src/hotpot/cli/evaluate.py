"""``hotpot eval``: measure a policy on the hold-out tasks."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotpot.cli.output import print_json, print_rows
from hotpot.cli.runs_folder import DEFAULT_RUNS, JsonOption, RunArgument, RunsOption, find_run

if TYPE_CHECKING:
    from hotpot.types import EvaluationRow

_SHOWN = ("environment", "sampling", "tasks", "failed", "success", "reward", "steps", "seconds")


def evaluate(
    run: RunArgument,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint", metavar="NAME", help="first, last (the default), or an update's number."
        ),
    ] = None,
    tasks: Annotated[
        int | None,
        typer.Option(
            "--tasks", metavar="N", min=1, help="Hold-out tasks; by default evaluation.num_tasks_final."
        ),
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy/--no-greedy", help="Measure greedily too.")] = True,
    runs: RunsOption = DEFAULT_RUNS,
    json_output: JsonOption = False,
) -> None:
    """Measure a run's checkpoint on hold-out tasks and record it under the label manual."""
    folder = find_run(run, runs)
    from hotpot import topology

    found = topology.evaluate_run(folder, checkpoint=checkpoint, num_tasks=tasks, greedy=greedy)
    rows = [{field.name: getattr(row, field.name) for field in dataclasses.fields(row)} for row in found]
    if json_output:
        print_json(rows)
    else:
        print_rows([_line(row) for row in found], columns=_SHOWN)
        first = found[0]
        typer.echo(
            f"checkpoint of update {first.update}, served as policy version {first.policy_version}, "
            f"checksum {first.policy_checksum}"
        )


def _line(row: "EvaluationRow") -> dict[str, Any]:
    return {
        "environment": row.env_version,
        "sampling": "sampled" if row.temperature else "greedy",
        "tasks": row.num_tasks,
        "failed": row.num_failed,
        "success": f"{row.success_rate:.3f} [{row.success_low:.3f}, {row.success_high:.3f}]",
        "reward": row.reward_mean,
        "steps": row.steps_mean,
        "seconds": row.seconds,
    }
