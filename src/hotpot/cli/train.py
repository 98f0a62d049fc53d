"""``hotpot train``: run a recipe, print its plan, or go on with a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotpot.cli.output import make_console, print_json
from hotpot.cli.runs_folder import DEFAULT_RUNS, JsonOption, RunsOption, find_run, read_recipe, read_summary
from hotpot.errors import RecipeError, UsageError

if TYPE_CHECKING:
    from hotpot.config import Recipe


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE", help="TOML file. With --resume: by default the run's own."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings laid over the recipe."),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the derived sizes and stop.")] = False,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Go on with this run.")
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            metavar="NAME",
            help="With --resume: first, last (the default), or an update's number.",
        ),
    ] = None,
    runs: RunsOption = DEFAULT_RUNS,
    json_output: JsonOption = False,
) -> None:
    """Train an agent by a recipe, with a live table."""
    if checkpoint is not None and resume is None:
        raise UsageError("--checkpoint belongs to --resume; a new run starts from model.path")
    run = find_run(resume, runs) if resume is not None else None
    resolved = resolve_recipe(recipe, overrides or [], run)
    if plan:
        print_plan(resolved, json_output)
        return
    from hotpot import topology

    finished = topology.train(
        resolved,
        resume=run,
        checkpoint=checkpoint,
        console=make_console(err=json_output),
        json_output=json_output,
    )
    if json_output:
        print_json({"run": finished, **(read_summary(finished) or {})})
    else:
        typer.echo(closing_words(finished))


def closing_words(run: Path) -> str:
    """Return what is said at the end of a run: what hold-out success was and is, and how to look at the run."""
    holdout = (read_summary(run) or {}).get("holdout", {})
    lines = []
    for when in ("before", "after"):
        if found := holdout.get(when):
            interval = f"[{found['low']:.3f}, {found['high']:.3f}]"
            lines.append(
                f"hold-out success {when}: {found['mean']:.3f} {interval} on {found['num_tasks']} tasks"
            )
    return "\n".join(
        [
            *lines,
            f"run folder: {run}",
            "look at it:",
            f"  hotpot sql {run} 'select \"update\", success_rate, entropy from updates order by 1'",
            f"  hotpot show {run} 0.0.0",
            f"  hotpot lineage {run}",
        ]
    )


def resolve_recipe(recipe: str | None, overrides: list[str], run: Path | None) -> "Recipe":
    """Return the recipe from a file, or the one that the run to go on with was told last, with overrides over it.

    Raises
    ------
    RecipeError: neither is given, or something in it cannot work.
    """
    from hotpot.config.load import build_recipe, load_recipe

    if recipe is not None and run is not None and "=" in recipe and not Path(recipe).exists():
        overrides, recipe = [recipe, *overrides], None
    if recipe is not None:
        return load_recipe(Path(recipe), overrides)
    if run is None:
        raise RecipeError("no recipe is given; name a TOML file, or a run to go on with (--resume RUN)")
    stored = read_recipe(run)
    if stored is None:
        raise RecipeError(f"{run} holds no recipe (recipe.json, manifest.json); name the recipe's file")
    return build_recipe(stored, overrides, origin=str(run))


def print_plan(recipe: "Recipe", json_output: bool) -> None:
    """Print the sizes a recipe comes to."""
    from hotpot.config.plan import make_plan, plan_table

    made = make_plan(recipe)
    if json_output:
        print_json({"plan": made.to_dict(), "recipe": recipe.model_dump(mode="json")})
        return
    console = make_console()
    console.print(plan_table(made))
    for note in made.notes:
        console.print(f"note: {note}", markup=False)
