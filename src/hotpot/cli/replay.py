"""``hotpot replay``: do recorded updates over from the record, and say whether the same comes out."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotpot.cli.exits import FAILED
from hotpot.cli.output import print_json, print_lines, print_rows
from hotpot.cli.runs_folder import DEFAULT_RUNS, JsonOption, RunArgument, RunsOption, find_run
from hotpot.errors import UsageError

if TYPE_CHECKING:
    from hotpot.topology.redo import Figure, Redone, RewardFindings

_MOST_SHOWN = 24


def replay(
    run: RunArgument,
    update: Annotated[
        int | None, typer.Option("--update", metavar="N", min=1, help="The update to do over.")
    ] = None,
    updates: Annotated[
        str | None, typer.Option("--updates", metavar="A..B", help="Several: A..B, or all.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--with", metavar="SECTION.KEY=VALUE", help="Learn under a changed setting. Repeatable."
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option("--reward", metavar="MODULE:FUNCTION", help="Learn from rewards that it recomputes."),
    ] = None,
    runs: RunsOption = DEFAULT_RUNS,
    json_output: JsonOption = False,
) -> None:
    """Do recorded updates over from the record alone; exits with 1 where something else comes out."""
    if (update is None) == (updates is None):
        raise UsageError("name what to do over: either --update N, or --updates A..B (or all)")
    folder = find_run(run, runs)
    from hotpot.topology import redo

    what_if = redo.Changes(
        settings=tuple(changes or ()), reward=None if reward is None else redo.load_reward(reward)
    )
    done = []
    for one in redo.redo(folder, str(update) if updates is None else updates, what_if):
        done.append(one)
        if not json_output:
            _show(one, what_if=what_if.any)
    good = all(one.findings.verdict != "differs" for one in done)
    if json_output:
        print_json({"run": folder, "updates": [_json(one, what_if=what_if.any) for one in done]})
    elif not what_if.any:
        _sum_up(done)
    if not good and not what_if.any:
        raise typer.Exit(FAILED)


def _show(one: "Redone", *, what_if: bool) -> None:
    findings = one.findings
    from_where = f"from the checkpoint of update {one.way.start}" + (
        f" over {_counted(len(one.way.updates) - 1, 'update')}" if len(one.way.updates) > 1 else ""
    )
    if what_if:
        _show_rewards(one)
        print_rows([_line(figure) for figure in findings.figures], title=f"update {one.update}, {from_where}")
    else:
        word = "identical, bit for bit" if findings.verdict == "identical" else findings.verdict
        style = {"identical": "green", "close": "yellow", "differs": "bold red"}[findings.verdict]
        print_lines([(f"update {one.update}: {word} ({from_where}, {one.seconds:.1f} s)", style)])
        if findings.differences:
            shown = [_line(figure) for figure in findings.differences[:_MOST_SHOWN]]
            print_rows(shown, title=_title(one))
    print_lines([(note, "") for note in _notes(one)])


def _title(one: "Redone") -> str:
    found = one.findings.differences
    more = f", the first {_MOST_SHOWN} of {len(found)}" if len(found) > _MOST_SHOWN else ""
    return f"what differs in update {one.update}, in the order it arises{more}"


def _notes(one: "Redone") -> list[str]:
    notes = [
        f"  {figure.name}: recorded with {figure.recorded}, now {figure.redone}"
        for figure in one.findings.other_kernels
    ]
    if one.off_at is not None:
        notes.append(f"  the weights differ since update {one.off_at}, which was done over on the way here")
    if one.gone:
        names = ", ".join(one.gone[:3]) + (", ..." if len(one.gone) > 3 else "")
        notes.append(f"  no longer in the record: {_counted(len(one.gone), 'trajectory')} of it ({names})")
    if one.findings.verdict == "differs" and one.findings.rounded and not one.findings.other_kernels:
        notes.append(
            "  all differences are as small as rounding, on the same kind of machine as far as is recorded"
        )
    return notes


def _sum_up(done: "list[Redone]") -> None:
    counts = {
        word: sum(one.findings.verdict == verdict for one in done)
        for verdict, word in (
            ("identical", "identical"),
            ("close", "the same up to rounding on another kind of machine"),
            ("differs", "different"),
        )
    }
    words = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    print_lines([(f"{_counted(len(done), 'update')} done over: {words}", "bold")])


def _show_rewards(one: "Redone") -> None:
    found = one.rewards
    if found is None:
        return
    others = [change for change in found.changes if change.reward != change.new_reward]
    rows = [dataclasses.asdict(change) for change in others[:_MOST_SHOWN]]
    if rows:
        print_rows(rows, title=f"rewards by {found.reward_version}, where they differ")
    print_lines([(_reward_words(found), "bold")])


def _reward_words(found: "RewardFindings") -> str:
    old = sum(change.reward for change in found.changes) / max(len(found.changes), 1)
    new = sum(change.new_reward for change in found.changes) / max(len(found.changes), 1)
    return (
        f"{found.num_changed} of {len(found.changes)} rewards differ (mean {old:.4g}, then {new:.4g}), "
        f"{found.num_turned} advantages change sign; groups with signal: {len(found.kept)}, then {len(found.new_kept)}"
    )


def _counted(number: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _line(figure: "Figure") -> dict[str, Any]:
    return {
        "figure": figure.name,
        "recorded": _exact(figure.recorded),
        "replayed": _exact(figure.redone),
        "same": "yes" if figure.same else "no",
    }


def _exact(value: Any) -> str:
    """Return a value so that two that differ look different."""
    return "-" if value is None else repr(value) if isinstance(value, float) else str(value)


def _json(one: "Redone", *, what_if: bool) -> dict[str, Any]:
    findings = one.findings
    figures = findings.figures if what_if else findings.differences
    return {
        "update": one.update,
        "verdict": findings.verdict,
        "from_checkpoint": one.way.start,
        "learned": one.way.updates,
        "figures" if what_if else "differences": [dataclasses.asdict(figure) for figure in figures],
        "num_figures": len(findings.figures),
        "kernels": {figure.name: [figure.recorded, figure.redone] for figure in findings.kernels},
        "off_at": one.off_at,
        "gone": one.gone,
        "rewards": None if one.rewards is None else dataclasses.asdict(one.rewards),
        "seconds": one.seconds,
    }
