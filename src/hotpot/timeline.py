"""Where the wall time of one thread goes: named spans that add up to the whole, and a trace of them.

A :class:`Timeline` is a stack. Time belongs to the innermost open span only, so the totals of all names add up to the
time between :meth:`Timeline.start` and now; what no span covers is ``other``. It knows neither metrics nor files.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One closed span: name, start and length in seconds since the timeline began, and its depth in the stack."""

    name: str
    start_s: float
    length_s: float
    depth: int


class Timeline:
    """Exclusive time by name, and the slices for a trace.

    Parameters
    ----------
    keep_slices: whether to keep every slice (for the trace file); totals are kept always.
    max_slices: bound on what is kept; further slices are counted in ``dropped_slices``.

    ``moves`` counts spans opened and closed: whoever watches the thread from another sees by it that it moves.
    """

    def __init__(self, *, keep_slices: bool = False, max_slices: int = 500_000) -> None:
        self._keep = keep_slices
        self._max = max_slices
        self._begin = time.perf_counter()
        self._mark = self._begin
        self._stack: list[str] = []
        self._whole: list[str] = [""]
        self._totals: dict[str, float] = {}
        self.slices: list[Slice] = []
        self.dropped_slices = 0
        self.moves = 0

    def start(self) -> None:
        """Begin counting now; forget what was before."""
        self._begin = self._mark = time.perf_counter()
        self._totals.clear()
        self.slices.clear()

    @contextmanager
    def span(self, name: str, *, whole: bool = False) -> Iterator[None]:
        """Count the time inside under ``name``; spans opened inside take their own time away from it.

        With ``whole`` they don't: everything inside counts under ``name``, and the inner spans are only slices.
        """
        opened = self._charge()
        self.moves += 1
        self._stack.append(name)
        self._whole.append(self._whole[-1] or (name if whole else ""))
        try:
            yield
        finally:
            closed = self._charge()
            self.moves += 1
            self._stack.pop()
            self._whole.pop()
            if self._keep:
                self._remember(name, opened, closed)

    def totals(self) -> dict[str, float]:
        """Return seconds by name up to now, with ``other`` for what no span covered. They add up to :attr:`elapsed_s`."""
        self._charge()
        return {"other": 0.0, **self._totals}

    @property
    def open_spans(self) -> tuple[str, ...]:
        """Names of the spans that are open, the innermost last. Any thread may ask."""
        return tuple(self._stack)

    @property
    def elapsed_s(self) -> float:
        """Seconds since :meth:`start`."""
        return time.perf_counter() - self._begin

    def _charge(self) -> float:
        now = time.perf_counter()
        name = self._whole[-1] or (self._stack[-1] if self._stack else "other")
        self._totals[name] = self._totals.get(name, 0.0) + now - self._mark
        self._mark = now
        return now

    def _remember(self, name: str, opened: float, closed: float) -> None:
        if len(self.slices) >= self._max:
            self.dropped_slices += 1
            return
        self.slices.append(
            Slice(name=name, start_s=opened - self._begin, length_s=closed - opened, depth=len(self._stack))
        )
