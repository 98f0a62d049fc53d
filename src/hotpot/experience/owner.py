"""The lock that makes one living process the owner of a run folder.

Owns ``owner.lock``. The kernel releases the lock when the process dies, however it dies, so a crashed owner never
blocks a resume; the ledger's fencing token guards where a file lock doesn't reach (network file systems).
"""

import contextlib
import fcntl
import os
import socket
from pathlib import Path

from hotpot.errors import RunFolderError

_held: set[int] = set()


def _forget_in_child() -> None:
    # A forked child shares the lock and would keep it alive after its parent's death.
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class OwnerLock:
    """An exclusive lock on a run folder, held until :meth:`release` or the process's death.

    Raises :class:`RunFolderError` where another living writer holds it, naming that writer.
    """

    def __init__(self, run_folder: Path) -> None:
        path = run_folder / "owner.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise RunFolderError(
                f"{run_folder} is being written by {holder or 'another process'}; a run has one writer: "
                "wait for it, stop it, or choose another run id"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._descriptor: int | None = descriptor
        _held.add(descriptor)

    def release(self) -> None:
        """Let another writer in. May be called twice."""
        if self._descriptor is not None and self._descriptor in _held:
            _held.discard(self._descriptor)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also for a child that was forked a moment ago
            os.close(self._descriptor)
        self._descriptor = None
