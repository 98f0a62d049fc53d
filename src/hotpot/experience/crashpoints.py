"""Named places where a crash test kills the process; a no-op unless a test asks for one.

``HOTPOT_CRASH_AT=name`` kills at the first time the place is reached, ``name:3`` at the third; :func:`arm` asks for it from
within. SIGKILL, so that no ``finally`` runs and nothing is flushed: what is left on disk is what the death of the process
would leave. There is one before and after every durable operation; :func:`watch` tells which were passed.
"""

import os
import signal

_wanted, _, _count = os.environ.get("HOTPOT_CRASH_AT", "").partition(":")
_left = int(_count or 1)
_passed: set[str] | None = None


def reach(name: str) -> None:
    """Die here if this place was asked for (see the module)."""
    global _left  # noqa: PLW0603 - a counter of the process, for tests only
    if _passed is not None:
        _passed.add(name)
    if _wanted and name == _wanted:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def arm(name: str, count: int = 1) -> None:
    """Die at the ``count``-th time from now that ``name`` is reached; an empty name disarms."""
    global _wanted, _left
    _wanted, _left = name, count


def watch() -> set[str]:
    """Begin to note the places that are passed, and return the set they are noted in."""
    global _passed  # noqa: PLW0603 - as above
    if _passed is None:
        _passed = set()
    return _passed
