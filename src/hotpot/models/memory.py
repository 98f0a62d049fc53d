"""What the process does with memory that a pass gave back: it keeps a little for the next one.

Owns one setting of the C library. A pass of a small model takes and gives back tensors of a few megabytes by the thousand;
by default glibc hands them to the system each time, and every page is asked for, zeroed and mapped anew.
"""

import ctypes
import sys

KEPT_BYTES = 256 * 2**20
"""Most that stays with the process, unused, at the end of its heap."""

SMALL_BYTES = 32 * 2**20
"""Tensors below this come from the heap (the most that glibc takes); larger ones go back to the system at once."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> bool:
    """Let the process keep freed memory for its next tensors; return whether the C library can be told so (glibc)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return all([mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES), mallopt(_M_MMAP_THRESHOLD, SMALL_BYTES)])
