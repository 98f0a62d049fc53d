"""Named places where a crash test kills the process; a no-op unless the environment asks for one.

``HOTPOT_CRASH_AT=name`` kills at the first time the place is reached, ``name:3`` at the third. SIGKILL, so that no
``finally`` runs and nothing is flushed: what is left on disk is what a power cut of the process would leave.
"""

import os
import signal

_WANTED, _, _COUNT = os.environ.get("HOTPOT_CRASH_AT", "").partition(":")
_left = int(_COUNT or 1)


def reach(name: str) -> None:
    """Die here if the environment names this place (see the module)."""
    global _left  # noqa: PLW0603 - a counter of the process, for tests only
    if _WANTED and name == _WANTED:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
