"""The lock that makes one living process the owner of a run folder, and the question whether there is one.

Owns ``owner.lock``. The kernel releases the lock when the process dies, however it dies, so a crashed owner never
blocks a resume; the ledger's fencing token guards where a file lock doesn't reach (network file systems).
"""

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path

from hotpot.errors import RunFolderError

_TRIES = 5
_PAUSE_S = 0.01

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

    ``file_name`` is another lock of the same kind, for what one process at a time may do beside the writer; ``refusal``
    says so in words, with ``{}`` for the holder. Raises :class:`RunFolderError` where another living process holds it, naming it, and where the
    file can't be made.
    """

    def __init__(
        self,
        run_folder: Path,
        file_name: str = "owner.lock",
        refusal: str = "is being written by {}; a run has one writer",
    ) -> None:
        path = run_folder / file_name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunFolderError(f"can't lock {path}: {error}; check space and rights") from error
        if not _take(descriptor):
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise RunFolderError(
                f"{run_folder} {refusal.format(holder or 'another process')}: wait for it, or stop it"
            )
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


def is_owned(run_folder: Path) -> bool:
    """Return whether a living process owns ``run_folder``. Writes nothing.

    Raises :class:`RunFolderError` where the lock file cannot be opened.
    """
    path = run_folder / "owner.lock"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise RunFolderError(
            f"{path} can't be opened ({error.strerror}), so whether the run goes on is unknown; allow reading it"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return False
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    """Return whether the exclusive lock could be had. Tries again for a moment: :func:`is_owned` holds it for an instant."""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_S)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False
