"""``hotpot lineage``: which versions a run used and what they did, what differs from another run, one trajectory's way."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotpot.cli.output import print_json, print_lines, print_rows
from hotpot.cli.runs_folder import (
    DEFAULT_RUNS,
    JsonOption,
    RunArgument,
    RunsOption,
    find_run,
    open_reader,
    read_manifest,
)
from hotpot.cli.words import chain_lines, change_lines, curve_rows, difference_lines, heading
from hotpot.errors import UsageError

if TYPE_CHECKING:
    from hotpot.observability.lineage import PolicyUse, VersionUse

_COLUMNS = ("version", "trajectories", "updates", "reward")
_MOST_SHOWN = 12
_WINDOW = 5


def lineage(
    run: RunArgument,
    against: Annotated[
        str | None, typer.Option("--against", metavar="RUN", help="Say exactly what changed since that run.")
    ] = None,
    trajectory: Annotated[
        str | None,
        typer.Option("--trajectory", metavar="ID", help="Follow one trajectory from policy to updates."),
    ] = None,
    around_update: Annotated[
        int | None,
        typer.Option(
            "--around-update", metavar="N", help="Show the reward curve and what changed around an update."
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            "--window", metavar="N", min=0, help="With --around-update: updates on each side, by default 5."
        ),
    ] = None,
    runs: RunsOption = DEFAULT_RUNS,
    json_output: JsonOption = False,
) -> None:
    """Show the versions behind a run and what their changes did, or one of the other views."""
    views = {"--against": against, "--trajectory": trajectory, "--around-update": around_update}
    given = [name for name, value in views.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other; give one of them")
    if window is not None and around_update is None:
        raise UsageError(f"--window {window} needs --around-update: which update is to be in the middle?")
    folder = find_run(run, runs)
    if against is not None:
        _show_differences(find_run(against, runs), folder, json_output)
    elif trajectory is not None:
        _show_chain(folder, trajectory, json_output)
    elif around_update is not None:
        _show_around(folder, around_update, _WINDOW if window is None else window, json_output)
    else:
        _show_versions(folder, json_output)


def _show_versions(run: Path, json_output: bool) -> None:
    from hotpot.observability.lineage import version_uses
    from hotpot.observability.run_changes import run_changes

    reader = open_reader(run)
    found, changed = version_uses(reader), run_changes(reader)
    if json_output:
        uses = [dataclasses.asdict(use) for use in found]
        print_json({"versions": uses, **dataclasses.asdict(changed)})
        return
    for kind in dict.fromkeys(use.kind for use in found):
        chosen = [_line(use) for use in found if use.kind == kind]
        left_out = len(chosen) - _MOST_SHOWN
        title = f"{kind} versions of {run.name}" + (
            f" (the first and last of {len(chosen)}; --json has all)" if left_out > 0 else ""
        )
        half = _MOST_SHOWN // 2
        print_rows(
            [*chosen[:half], *chosen[-half:]] if left_out > 0 else chosen, columns=_COLUMNS, title=title
        )
    print_lines(heading(changed))
    for change in changed.changes:
        print_lines(change_lines(change))


def _show_around(run: Path, update: int, window: int, json_output: bool) -> None:
    from hotpot.observability.run_changes import around

    found = around(open_reader(run), update, radius=window)
    if json_output:
        print_json(dataclasses.asdict(found))
        return
    print_rows(curve_rows(found), title=f"{run.name} around update {update}")
    if not found.changes:
        print_lines([("no version but the policy's changed there", "")])
    for change in found.changes:
        print_lines(change_lines(change))


def _line(use: "VersionUse") -> dict[str, Any]:
    """Return one line: the updates that learned from the version, and its reward in training."""
    first, last = use.first_update, use.last_update
    return {
        "version": use.version,
        "trajectories": use.num_trajectories,
        "updates": None if first is None else str(first) if first == last else f"{first}-{last}",
        "reward": use.reward_mean,
    }


def _show_differences(old: Path, new: Path, json_output: bool) -> None:
    from hotpot.observability.changes import against

    found = against(
        open_reader(old), open_reader(new), old_manifest=read_manifest(old), new_manifest=read_manifest(new)
    )
    if json_output:
        print_json([dataclasses.asdict(difference) for difference in found])
        return
    if not found:
        print_lines([(f"{new.name} and {old.name} differ in nothing that is recorded", "")])
    print_lines(line for difference in found for line in difference_lines(difference))


def _show_chain(run: Path, trajectory: str, json_output: bool) -> None:
    from hotpot.observability.lineage import trajectory_lineage

    reader = open_reader(run)
    found, run_id = trajectory_lineage(reader, trajectory), reader.manifest.run_id
    checkpoints = {policy.policy_version: _checkpoint(run, policy, run_id) for policy in found.policies}
    if json_output:
        chain = dataclasses.asdict(found)
        for policy in chain["policies"]:
            policy["checkpoint"] = checkpoints[policy["policy_version"]]
        print_json(chain)
    else:
        print_lines(chain_lines(found, run_id, checkpoints))


def _checkpoint(run: Path, policy: "PolicyUse", run_id: str) -> Path | None:
    """Return the folder that holds the policy's weights, where it is still there: one of the run's, or its origin."""
    if policy.origin not in {"", run_id} and Path(policy.origin).is_dir():
        return Path(policy.origin)
    kept = run / "checkpoints" / f"update-{policy.made_by_update or 0:06d}"
    return kept if kept.is_dir() else None
