"""Exit codes: 0 good, 1 the work failed or a check says no, 2 wrong use, 130 ended by Ctrl-C.

An error raised on purpose is one message on standard error; anything else keeps its traceback.
"""

from typing import Any

import typer
from typer.core import TyperGroup

from hotpot.errors import HotpotError, UsageError

FAILED = 1
WRONG_USE = 2
INTERRUPTED = 130


class HotpotGroup(TyperGroup):
    """A group of commands that turns Hotpot's own errors into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; exit with 2 on wrong use, with 1 where the work failed."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(WRONG_USE) from None
        except HotpotError as error:
            typer.echo(f"failed: {error}", err=True)
            raise typer.Exit(FAILED) from None
