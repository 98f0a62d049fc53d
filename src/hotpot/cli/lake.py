"""``hotpot lake``: care for what is stored."""

import typer

from hotpot.cli import quarantine
from hotpot.cli.exits import HotpotGroup

app = typer.Typer(cls=HotpotGroup, no_args_is_help=True, help="Lake: what is stored, and what was refused.")
app.add_typer(quarantine.app, name="quarantine")
