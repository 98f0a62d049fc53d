"""What the process does with memory: it keeps what a pass gave back for the next one, and looks for cyclic garbage seldom.

Owns one setting of the C library and one of the interpreter. A pass of a small model takes and gives back tensors of a few
megabytes by the thousand; by default glibc hands them to the system each time, and every page is asked for, zeroed and mapped
anew. Thousands of episodes under way are hundreds of thousands of objects that live for long and are in no cycle; by default
the interpreter walks through all of them again and again, for a quarter of the main loop's time (``make bench-concurrency``).
"""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

KEPT_BYTES = 256 * 2**20
"""Most that stays with the process, unused, at the end of its heap."""

SMALL_BYTES = 32 * 2**20
"""Tensors below this come from the heap (the most that glibc takes); larger ones go back to the system at once."""

COLLECT_AFTER = 20_000
"""Objects that are made and still live before the interpreter looks for garbage among them; by default it is some hundreds."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Let the process keep freed memory for its next tensors; return whether the C library can be told so (glibc)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return all([mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES), mallopt(_M_MMAP_THRESHOLD, SMALL_BYTES)])


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Let the interpreter look for cyclic garbage after :data:`COLLECT_AFTER` new objects; on leaving it is as before.

    Where tensors may be in cycles, call :func:`collect_young` now and then. An interpreter that was told to look less often,
    or never (``gc.disable``), is left so.
    """
    before, *older = gc.get_threshold()
    gc.set_threshold(max(before, COLLECT_AFTER) if before else 0, *older)
    try:
        yield
    finally:
        gc.set_threshold(before, *older)


def collect_young() -> None:
    """Free what is in cycles among objects that no more than one collection has seen."""
    gc.collect(1)
