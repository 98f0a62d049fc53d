"""Hotpot: agentic reinforcement learning in which every number is traceable."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotpot.experience import open_run

__all__ = ["__version__", "open_run"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load what needs Arrow and a database only when it is asked for."""
    if name == "open_run":
        from hotpot.experience import open_run

        return open_run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
