"""Where the time of the embedded engine's steps goes: its own clock, a :class:`hotpot.timeline.Timeline`, read around a round."""

from typing import Any

from hotpot.timeline import Timeline

WORK = ("forward", "sample")
"""Its spans that are work; the rest of a round is scheduling, book-keeping, and the driver."""


def totals(engine: Any) -> dict[str, float] | None:
    """Return the seconds of each span so far; None of an engine that has no clock."""
    clock = getattr(engine, "clock", None)
    return clock.totals() if isinstance(clock, Timeline) else None


def overhead(before: dict[str, float] | None, after: dict[str, float] | None, seconds: float) -> float | None:
    """Return the share of ``seconds`` that was neither forward pass nor sampling, from the totals around them."""
    if before is None or after is None:
        return None
    spent = sum(after.get(name, 0.0) - before.get(name, 0.0) for name in WORK)
    return max(0.0, seconds - spent) / seconds
