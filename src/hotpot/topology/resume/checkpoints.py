"""Checkpoints of a run: which exist, which is whole, which to keep.

A checkpoint is a folder ``checkpoints/update-000040`` that is also an ordinary model folder. It is written under a
temporary name and renamed when complete, so a folder with the final name is whole. The learner writes and reads its
own files; this module owns only the folders and the pointer at one of them.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from hotpot.errors import ModelFilesError
from hotpot.experience.crashpoints import reach
from hotpot.observability.files import replace_text

CURRENT = "current"
"""File in the checkpoint folder with the update that a resume goes on from, the newest or the one it was sent back to;
then the number up to which updates recorded on top of it are left behind."""

LAST = "last"
"""Name of the checkpoint that :data:`CURRENT` points at."""

_NAME = re.compile(r"update-(\d{6,})")


def checkpoint_folder(run: Path, update: int) -> Path:
    """Return the folder of the checkpoint after ``update``."""
    return run / "checkpoints" / f"update-{update:06d}"


def list_checkpoints(run: Path) -> list[int]:
    """Return the updates that have a checkpoint, ascending."""
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))


def write_checkpoint(
    run: Path, update: int, save: Callable[[Path], None], *, keep: int, after: int | None = None
) -> Path:
    """Write the checkpoint after ``update`` with ``save(folder)``, whole or not at all; prune to first, last and ``keep``.

    ``after`` as in :func:`point_at`, by default nothing is left behind.
    """
    save(begin_checkpoint(run, update))
    return finish_checkpoint(run, update, keep=keep, after=after)


def begin_checkpoint(run: Path, update: int) -> Path:
    """Return the folder to write the checkpoint after ``update`` into, empty; torn ones are removed.

    It becomes a checkpoint by :func:`finish_checkpoint`; one is written at a time.
    """
    final = checkpoint_folder(run, update)
    for torn in final.parent.glob("*.partial"):
        shutil.rmtree(torn)
    partial = _partial(final)
    partial.mkdir(parents=True)
    reach("checkpoint_begun")
    return partial


def finish_checkpoint(run: Path, update: int, *, keep: int, after: int | None = None) -> Path:
    """Make what was written into the folder of :func:`begin_checkpoint` the checkpoint after ``update``, and prune as
    :func:`write_checkpoint` does."""
    final = checkpoint_folder(run, update)
    reach("checkpoint_written")
    if final.exists():
        final.replace(final.with_name(final.name + ".old.partial"))
    _partial(final).replace(final)
    reach("checkpoint_renamed")
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    point_at(run, update, after=update if after is None else after)
    reach("checkpoint_pointed")
    for old in list_checkpoints(run)[1 : -keep - 1]:
        shutil.rmtree(checkpoint_folder(run, old))
    reach("checkpoint_pruned")
    return final


def _partial(final: Path) -> Path:
    return final.with_name(final.name + ".partial")


def point_at(run: Path, update: int, *, after: int) -> None:
    """Make the checkpoint after ``update`` the one that a resume goes on from, durably.

    Updates numbered up to ``after`` that were recorded on top of it are left behind; later ones are on the way.
    """
    replace_text(run / "checkpoints" / CURRENT, [f"{update} {after}\n"])


def left_behind(run: Path, update: int) -> int:
    """Return the number up to which updates on top of the checkpoint ``update`` are left behind."""
    return max(update, _pointer(run)[1]) if _pointer(run)[0] == update else update


def find_checkpoint(run: Path, name: str | None = None) -> tuple[int, Path]:
    """Return (update, folder) of the checkpoint called ``name`` ("first", "last" or an update's number; default last).

    Raises :class:`ModelFilesError` where there is none of that name.
    """
    known = list_checkpoints(run)
    if not known:
        raise ModelFilesError(
            f"{run} has no checkpoint; restore {run / 'checkpoints'} from a copy, or start the run anew"
        )
    if name is None or name == LAST:
        pointed, _ = _pointer(run)
        update = pointed if pointed in known else known[-1]
    elif name == "first":
        update = known[0]
    elif name.isdigit() and int(name) in known:
        update = int(name)
    else:
        raise ModelFilesError(
            f"{run} has no checkpoint {name!r}; give one of first, last, {', '.join(map(str, known))}"
        )
    return update, checkpoint_folder(run, update)


def _pointer(run: Path) -> tuple[int, int]:
    """Return the two numbers in :data:`CURRENT`; (-1, -1) where there is no such file."""
    path = run / "checkpoints" / CURRENT
    numbers = [int(word) for word in path.read_text().split()] if path.is_file() else []
    return (numbers[0], numbers[-1]) if numbers else (-1, -1)
