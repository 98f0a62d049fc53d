"""A server's process: started, watched, ended, with everything it started.

Owns the process group and the log file. The group ends with :meth:`ServerProcess.stop`; if this process dies without
calling it, Linux ends the server. Knows no HTTP.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hotpot.errors import EngineError

_GRACE_S = 15.0

_TIED = (
    "import ctypes, os, signal, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"
    "os.execv(sys.argv[1], sys.argv[1:])"
)
"""Runs a command that gets SIGTERM when its parent dies."""


class ServerProcess:
    """``command(folder)`` is what serves the model in ``folder``; ``log`` takes all that it says."""

    def __init__(
        self, command: Callable[[Path], Sequence[str]], *, environment: Mapping[str, str], log: Path
    ) -> None:
        self.log = log
        self._command = command
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, folder: Path) -> None:
        """Start it, ending the one that runs. Raises :class:`EngineError` where it cannot be started."""
        self.stop()
        command = list(self._command(folder))
        try:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _TIED, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self._environment},
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineError(f"{command[0]} can't be started: {error}") from error

    @property
    def pid(self) -> int | None:
        """Its process id, also that of its process group; None where it does not run."""
        return None if self._process is None else self._process.pid

    def exit_code(self) -> int | None:
        """Return its exit code once it ended, None while it runs. Never started counts as ended, with -1."""
        return -1 if self._process is None else self._process.poll()

    def last_words(self) -> str:
        """Return the last line of the log."""
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.is_file() else []
        return lines[-1][-300:] if lines else "it said nothing"

    def stop(self) -> None:
        """End the process and all it started; first it is asked to."""
        process, self._process = self._process, None
        if process is None:
            return
        for wish in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, wish)
            except ProcessLookupError:
                break
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                continue
        process.wait(_GRACE_S)


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
