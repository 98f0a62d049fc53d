"""From the updates that are wanted to the updates that must be learned to come to them. Pure.

Owns the walk along ``updates.parent_update``. Knows numbers only: updates, their parents, the updates with a checkpoint.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hotpot.errors import RunFolderError, UsageError

_RANGE = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How to come to an update: from the checkpoint after update ``start`` by learning ``updates``, the last the wanted."""

    start: int
    updates: tuple[int, ...]


def way_to(update: int, parents: Mapping[int, int], checkpoints: Collection[int]) -> Way:
    """Return the shortest way to ``update``: from the nearest checkpoint among those it descends from.

    ``parents`` are the recorded updates, each with the update whose weights it started from. Raises
    :class:`RunFolderError` where no checkpoint is among them.
    """
    updates = [update]
    while parents[updates[-1]] not in checkpoints:
        parent = parents[updates[-1]]
        if parent not in parents:
            kept = ", ".join(map(str, sorted(checkpoints))) or "none"
            raise RunFolderError(
                f"update {update} descends from update {parent}, of which there is no checkpoint and no record; "
                f"checkpoints kept: {kept}. Put back the checkpoint of an update it descends from "
                f"({', '.join(map(str, [*updates[::-1][:-1], parent][:4]))}), for instance from a copy of the run"
            )
        updates.append(parent)
    return Way(start=parents[updates[-1]], updates=tuple(updates[::-1]))


def wanted_updates(text: str, recorded: Sequence[int]) -> list[int]:
    """Return the updates that ``text`` names ("3", "3..7" or "all") out of those recorded, ascending.

    Raises :class:`UsageError` where it names none, or is none of these.
    """
    if text == "all":
        found = sorted(recorded)
    elif match := _RANGE.fullmatch(text):
        found = sorted(number for number in recorded if int(match[1]) <= number <= int(match[2]))
    elif text.isdecimal():
        found = [number for number in recorded if number == int(text)]
    else:
        raise UsageError(f"{text!r} names no updates; give a number, A..B or all")
    if not found:
        known = f"{min(recorded)} to {max(recorded)}" if recorded else "none"
        raise UsageError(f"the record holds no update {text}; updates recorded: {known}")
    return found
