"""Waiting until files and folders are on the device, for a whole folder each file once.

Knows no table format but that files of a lake are written once under a name of their own, all but the pointer to the last
checkpoint.
"""

import os
from pathlib import Path

_REWRITTEN = "_last_checkpoint"


class FolderSync:
    """Makes folders durable; remembers which files are."""

    def __init__(self) -> None:
        self._synced: set[str] = set()

    def sync(self, folder: Path) -> None:
        """Wait until every file right in ``folder`` that is new since the last call is on the device, and its entry.

        Does nothing where there is no such folder. Raises OSError.
        """
        try:
            found = os.scandir(folder)
        except FileNotFoundError:
            return
        with found:
            new = [
                entry.path
                for entry in found
                if (entry.path not in self._synced or entry.name == _REWRITTEN) and entry.is_file()
            ]
        for path in new:
            sync_file(path)
        if new:
            sync_folder(folder)
        self._synced.update(new)


def sync_folder(folder: Path) -> None:
    """Make the folder's entries durable: a created, renamed or deleted file counts only after this."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: str) -> None:
    """Wait until a file is on the device; does nothing where there is none. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        # Another writer's draft that has its name by now, or a file that a vacuum took: no commit of ours needs it.
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
