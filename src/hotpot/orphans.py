"""A child process that doesn't outlive its parent, from its first line on: importing takes seconds, on a busy machine many.

Imports nothing that takes time, and is to be imported first.
"""

import os
import threading

LOOK_S = 0.2
"""Time between two looks at whether the parent lives."""

ORPHANED = 3
"""Exit code of a process whose parent died."""


def end_with(parent: int) -> threading.Event:
    """End this process at once when process ``parent`` is not its parent any more; set what is returned to leave that off."""
    left_off = threading.Event()
    threading.Thread(target=_look, args=(parent, left_off), name="parent", daemon=True).start()
    return left_off


def _look(parent: int, left_off: threading.Event) -> None:
    while not left_off.wait(LOOK_S):
        if os.getppid() != parent:
            os._exit(ORPHANED)
