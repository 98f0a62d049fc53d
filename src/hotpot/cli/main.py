"""The program ``hotpot``: its commands, and nothing heavy before one of them runs."""

from typing import Annotated

import typer

from hotpot import __version__
from hotpot.cli import env, lake, model
from hotpot.cli.evaluate import evaluate
from hotpot.cli.exits import HotpotGroup
from hotpot.cli.lineage import lineage
from hotpot.cli.replay import replay
from hotpot.cli.runs import runs
from hotpot.cli.show import show
from hotpot.cli.sql import sql
from hotpot.cli.train import train

app = typer.Typer(
    name="hotpot",
    cls=HotpotGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train language-model agents by reinforcement learning, with every number traceable.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hotpot {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


app.command()(train)
app.command("eval")(evaluate)
app.command()(runs)
app.command()(show)
app.command()(sql)
app.command()(lineage)
app.command()(replay)
app.add_typer(lake.app, name="lake")
app.add_typer(model.app, name="model")
app.add_typer(env.app, name="env")


def main() -> None:
    """Run the command line; the entry point of the installed program."""
    app()
