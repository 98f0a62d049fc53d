"""Ending a run on request: Ctrl-C and SIGTERM become a flag that the loop reads at its safe points.

A signal never interrupts a write. The first one asks for a clean end; the second one, with the first not yet obeyed,
raises KeyboardInterrupt where the process stands (what was acknowledged is in the log all the same).
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

from hotpot.errors import HotpotError


class StopRequested(HotpotError):
    """The operator asked the run to end; raised at a safe point."""


class StopSignal:
    """Context manager that turns SIGINT and SIGTERM into :meth:`check`. Outside the main thread it only holds the flag."""

    def __init__(self) -> None:
        self.requested = False
        self.signal_number = 0
        self._previous: dict[int, signal.Handlers | object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def check(self) -> None:
        """Raise :class:`StopRequested` if a signal has arrived."""
        if self.requested:
            raise StopRequested(f"stopped by signal {self.signal_number}")

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested, self.signal_number = True, number
