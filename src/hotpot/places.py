"""Where in Hotpot a thread is, or an error was raised: the innermost function of ours, with file and line.

What holds a run up or fails for a test (:mod:`hotpot.testing`, the named places of :mod:`hotpot.experience.crashpoints`) is passed
over: the place is where it was called.
"""

import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

_ON_PURPOSE = ("hotpot.testing.", "hotpot.experience.crashpoints")


def thread_place(frame: FrameType | None) -> str:
    """Return the innermost function of Hotpot in the stack of ``frame``; without one, the innermost function."""
    return "" if frame is None else _innermost(reversed(list(traceback.walk_stack(frame))))


def error_place(error: BaseException) -> str:
    """Return the innermost function of Hotpot that ``error`` came through; without one, the innermost function; "" where the
    error was never raised."""
    return _innermost(traceback.walk_tb(error.__traceback__))


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the last of ``frames`` that is ours."""
    last = ours = ""
    for frame, line in frames:
        name, code = frame.f_globals.get("__name__", ""), frame.f_code
        where = f"{code.co_qualname} ({Path(code.co_filename).name}:{line})"
        last = where
        if name.startswith("hotpot.") and not name.startswith(_ON_PURPOSE):
            ours = f"{name}.{where}"
    return ours or last
