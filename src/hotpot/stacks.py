"""What every thread of a process is in: written where it can be read after the process is gone.

::

    child: register(folder, name) ──► folder/NAME-PID.txt, locked for as long as the child lives; empty
    parent: request(folder) ──SIGUSR1──► each living child writes its stacks there, whatever it hangs in

Owns those files and the signal. Knows no run and decides nothing. The stacks are written by faulthandler's own handler, in
C: that a thread hangs in native code, or holds the interpreter's lock, does not matter.
"""

import faulthandler
import fcntl
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

_SIGNAL = signal.SIGUSR1
_PAUSE_S = 0.02
_registered: list[TextIO] = []
"""Files of this process; closing one would lose its lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFile:
    """The stacks of one living child: its name, its process, and the file that it writes them to."""

    name: str
    pid: int
    path: Path


def register(folder: Path, name: str) -> Path:
    """Let this process write every stack to ``folder/NAME-PID.txt`` on request; return that file. Call it once, in a child of
    the process that will ask."""
    path = folder / f"{name}-{os.getpid()}.txt"
    folder.mkdir(parents=True, exist_ok=True)
    file = path.open("w")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    faulthandler.register(_SIGNAL, file=file, all_threads=True)
    _registered.append(file)
    return path


def living(folder: Path) -> list[StackFile]:
    """Return the processes that registered in ``folder`` and live, by name and process."""
    found = []
    for path in sorted(folder.glob("*.txt")):
        name, _, pid = path.stem.rpartition("-")
        if name and pid.isdecimal() and _locked(path):
            found.append(StackFile(name=name, pid=int(pid), path=path))
    return found


def request(folder: Path, *, timeout_s: float) -> list[StackFile]:
    """Ask every living process for its stacks, and wait at most ``timeout_s`` seconds until all have written some.

    Returns those that were asked. A file that stays empty is of a process that is stopped, or hangs in the kernel.
    """
    asked = living(folder)
    for one in asked:
        with suppress(ProcessLookupError):
            os.kill(one.pid, _SIGNAL)
    deadline = time.monotonic() + timeout_s
    while not all(one.path.stat().st_size for one in asked) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    return asked


def tidy(folder: Path) -> None:
    """Remove the empty files of processes that are gone: nobody asked them for anything."""
    for path in folder.glob("*.txt"):
        if path.stem.rpartition("-")[2].isdecimal() and not path.stat().st_size and not _locked(path):
            path.unlink(missing_ok=True)


def _locked(path: Path) -> bool:
    with path.open("r") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(file, fcntl.LOCK_UN)
    return False
