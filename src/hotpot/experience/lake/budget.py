"""The disk budget: says no before the disk is full, while what was acknowledged can still be put in order.

Owns two bounds: most bytes that a run's log and local lake take together, and bytes that stay free on their disks.
Looks at the folders when asked to measure, and counts what is appended in between. Writes nothing. Invariant: what is in
the log when it says no fits into the lake, because bytes waiting in the log count twice (a copy goes to the lake before
the log segment goes).
"""

import contextlib
import os
import threading
from pathlib import Path

from hotpot.errors import DiskBudgetError

FOOTERS = 64 * 1024
"""Bytes kept back for what the lake's files need beside their data (footers, statistics): of a small log segment that is
more than of the log's frames."""

_MIB = 1024 * 1024


class DiskBudget:
    """Checks what is about to be written against the bounds. Any thread may call any method.

    ``lake`` is the folder of a local lake, None for one on S3; where runs share it, ``partition`` is the name of the
    folder that holds this run's files in each table. A bound of 0 is none.
    """

    def __init__(
        self, log: Path, lake: Path | None, *, partition: str | None, max_bytes: int, min_free_bytes: int
    ) -> None:
        self._log = log
        self._lake = lake
        self._partition = partition
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._guard = threading.Lock()
        self._log_bytes = 0
        self._appended_meanwhile = 0
        self._lake_bytes = 0
        self.measure()

    def measure(self) -> None:
        """Look at the folders again: after the archive moved something from log to lake.

        What is appended while it looks counts too, some of it perhaps twice until the next time.
        """
        lake_bytes = 0
        if self._max_bytes and self._lake is not None:
            # Only this bound needs the lake's size, and walking it is what costs.
            own = [self._lake] if self._partition is None else self._lake.glob(f"*/{self._partition}")
            lake_bytes = sum(map(_size_of, own))
        # The log last: looking at it takes a moment, and what is appended in that moment is counted twice at most.
        with self._guard:
            self._appended_meanwhile = 0
        log_bytes = _size_of(self._log)
        with self._guard:
            self._log_bytes, self._lake_bytes = log_bytes + self._appended_meanwhile, lake_bytes

    def appended(self, num_bytes: int) -> None:
        """Hear of bytes that were appended to the log."""
        with self._guard:
            self._log_bytes += num_bytes
            self._appended_meanwhile += num_bytes

    def check(self, coming_bytes: int) -> None:
        """Raise :class:`DiskBudgetError` where ``coming_bytes`` more in the log would break a bound."""
        with self._guard:
            log_bytes, lake_bytes = self._log_bytes + coming_bytes, self._lake_bytes
        used = log_bytes + lake_bytes + FOOTERS
        if self._max_bytes and used > self._max_bytes:
            raise DiskBudgetError(
                f"log and lake of the run take {_mib(used)} with the next frame, store.max_bytes allows "
                f"{_mib(self._max_bytes)} (log {_mib(log_bytes)}, lake {_mib(lake_bytes)}, kept back for the lake's files "
                f"{_mib(FOOTERS)}); nothing of it was written and "
                "everything acknowledged is kept: compact and vacuum the lake (`hotpot lake`), or raise store.max_bytes, "
                "and resume"
            )
        if self._min_free_bytes:
            for folder, needed in self._needs(coming_bytes, log_bytes).items():
                self._check_free(folder, needed)

    def _needs(self, coming_bytes: int, log_bytes: int) -> dict[Path, int]:
        """Return the bytes that each disk must still take: the frame, and the lake's copy of what is in the log."""
        if self._lake is None:
            return {self._log: coming_bytes}
        if self._lake.stat().st_dev == self._log.stat().st_dev:
            return {self._log: coming_bytes + log_bytes}
        return {self._log: coming_bytes, self._lake: log_bytes}

    def _check_free(self, folder: Path, needed: int) -> None:
        free = _free_bytes(folder)
        if free - needed < self._min_free_bytes:
            raise DiskBudgetError(
                f"the disk of {folder} has {_mib(free)} free; {_mib(needed)} are wanted for what waits in the log and "
                f"store.min_free_bytes keeps {_mib(self._min_free_bytes)}; nothing of it was written and everything "
                "acknowledged is kept: make room, or lower store.min_free_bytes, and resume"
            )


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _size_of(folder: Path) -> int:
    """Return the bytes of all files under ``folder``; a file that goes while it is looked at counts nothing."""
    total = 0
    waiting = [str(folder)]
    while waiting:
        with contextlib.suppress(FileNotFoundError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
    return total


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f} MiB"
