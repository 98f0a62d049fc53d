"""Exit codes: 0 good, 1 the work failed or a check says no, 2 wrong use, 130 ended by Ctrl-C.

An error raised on purpose is one message on standard error; anything else keeps its traceback.
"""

import sys
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
        """Run the command; exit with 2 on wrong use, 1 where the work failed, 130 where it was stopped."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(WRONG_USE) from None
        except HotpotError as error:
            if _asked_to_stop(error):
                typer.echo(f"{error}; everything finished so far is stored", err=True)
                raise typer.Exit(INTERRUPTED) from None
            typer.echo(f"failed: {error}", err=True)
            raise typer.Exit(FAILED) from None


def _asked_to_stop(error: HotpotError) -> bool:
    """Say whether the operator ended the work; only a loaded topology can have raised that, so none is imported."""
    stopping = sys.modules.get("hotpot.topology.supervision.stopping")
    return stopping is not None and isinstance(error, stopping.StopRequested)
