"""``hotpot env``: which environments are installed, and whether one keeps its contract."""

import dataclasses
from typing import Annotated

import typer

from hotpot.cli.exits import FAILED, HotpotGroup
from hotpot.cli.output import print_json, print_rows
from hotpot.cli.runs_folder import JsonOption

app = typer.Typer(cls=HotpotGroup, no_args_is_help=True, help="Environments: list and check.")


@app.command("list")
def list_installed(json_output: JsonOption = False) -> None:
    """List the installed environments."""
    from hotpot.envs import list_environments

    rows = [dataclasses.asdict(entry) for entry in list_environments()]
    if json_output:
        print_json(rows)
    else:
        print_rows(rows, columns=("name", "target", "distribution"))


@app.command()
def check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Environment, as `hotpot env list` names it.")],
    params: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Parameters of the environment.")
    ] = None,
    tasks: Annotated[
        int, typer.Option("--tasks", metavar="N", min=1, help="Tasks of each split to check.")
    ] = 64,
    episodes: Annotated[int, typer.Option("--episodes", metavar="N", min=1, help="Episodes to run.")] = 16,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, help="Seed of the tasks and episodes.")
    ] = 0,
    json_output: JsonOption = False,
) -> None:
    """Check an environment against its contract; exits with 1 where it breaks it."""
    from hotpot.config.load import build_mapping
    from hotpot.envs import load_environment
    from hotpot.envs.check import Level, check_environment

    env = load_environment(name, build_mapping(params or []))
    findings = check_environment(env, num_tasks=tasks, num_episodes=episodes, seed=seed)
    good = not any(finding.level is Level.ERROR for finding in findings)
    if json_output:
        print_json(
            {
                "env": name,
                "env_version": env.env_version.version,
                "reward_version": env.reward_version.version,
                "good": good,
                "findings": [dataclasses.asdict(finding) for finding in findings],
            }
        )
    else:
        for finding in findings:
            typer.echo(str(finding))
        verdict = "keeps its contract" if good else "breaks its contract"
        typer.echo(
            f"{env.env_version} with {env.reward_version} {verdict} ({tasks} tasks a split, {episodes} episodes)"
        )
    if not good:
        raise typer.Exit(FAILED)
