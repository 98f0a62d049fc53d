"""Where the time of the embedded engine's steps goes: its own clock, read around a round.

An engine that offers ``clock``, a :class:`hotpot.timeline.Timeline` with the spans ``forward`` and ``sample``, is asked; for
one that has none, the calls that do the two are timed from outside, where they have the names known here.
"""

from typing import Any

from hotpot.engine.embedded import engine as engine_module
from hotpot.timeline import Timeline

WORK = ("forward", "sample")


def watch(engine: Any) -> Timeline | None:
    """Return the timeline of an embedded engine; None where there is no way to have one."""
    clock = getattr(engine, "clock", None)
    if isinstance(clock, Timeline):
        return clock
    if not hasattr(engine, "_forward") or not hasattr(engine_module, "sample"):
        return None
    timeline, forward, sample = Timeline(), engine._forward, engine_module.sample

    def timed_forward(*arguments: Any) -> Any:
        with timeline.span("forward"):
            return forward(*arguments)

    def timed_sample(*arguments: Any) -> Any:
        with timeline.span("sample"):
            return sample(*arguments)

    engine._forward = timed_forward
    engine_module.sample = timed_sample  # type: ignore[attr-defined]
    return timeline


def overhead(before: dict[str, float], after: dict[str, float], seconds: float) -> float:
    """Return the share of ``seconds`` that was neither forward pass nor sampling, from the clock's totals around them."""
    spent = sum(after.get(name, 0.0) - before.get(name, 0.0) for name in WORK)
    return max(0.0, seconds - spent) / seconds
