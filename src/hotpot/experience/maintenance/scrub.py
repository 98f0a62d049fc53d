"""Taking the last traces of a deleted trajectory out of a table's folder: old files, and values in Delta's log.

Owns what the newest version does not show. The log's entries keep their names and their actions: only the statistics of
files that are gone are reduced to row counts, since their smallest and largest values are content. Old checkpoints,
which repeat those statistics, are replaced by a new one. Safe to repeat; must not run beside a writer of the same run.
"""

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from hotpot.experience.crashpoints import reach
from hotpot.experience.lake.lake import Lake
from hotpot.experience.maintenance.sought import Sought
from hotpot.experience.maintenance.tables import TableFolder, data_files, folder_of, plain

_ENTRY = re.compile(r"_delta_log/\d{20}\.json")
_CHECKPOINT = re.compile(r"_delta_log/(\d{20})\.checkpoint.*\.parquet")


def scrub(lake: Lake, table: str, sought: Sought) -> dict[str, int]:
    """Remove the run's files that no longer count and hold a row that is ``sought``; return their sizes.

    Files that can't be read go too: nobody can say what is in them.
    """
    folder, handle = folder_of(lake, table), lake.open_table(table)
    if folder is None or handle is None:
        return {}
    lying = folder.listing()
    kept = {file.path for file in data_files(lake, table)}
    removed = {
        path: size for path, size in lying.items() if path not in kept and _holds(folder, path, sought)
    }
    for path in removed:
        reach("scrub_before")
        folder.remove(path)
    lying = folder.listing()
    changed = list(_blanked(folder, set(lying)))
    for path, data in changed:
        reach("scrub_log")
        folder.replace(path, data)
    if changed or removed:
        reach("scrub_checkpoint")
        handle.create_checkpoint()
        lake.forget()
        lake.sync(table)  # the new checkpoint must be on the device before the old ones go
        _drop_checkpoints(folder, below=handle.version())
    return removed


def _holds(folder: TableFolder, path: str, sought: Sought) -> bool:
    try:
        with folder.open(path) as parquet:
            rows = plain(parquet.read(columns=list(sought.columns)))
    except (OSError, pa.ArrowException):
        return True
    return bool(sought.of(rows).num_rows)


def _blanked(folder: TableFolder, there: set[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the log entries that tell values of files of the run that are gone, without those values."""
    for path in folder.log_sizes():
        if not _ENTRY.fullmatch(path):
            continue
        actions = [json.loads(line) for line in folder.read(path).splitlines() if line.strip()]
        changed = [_blank(action, folder.own, there) for action in actions]
        if any(changed):
            lines = [json.dumps(action, ensure_ascii=False, separators=(",", ":")) for action in actions]
            yield path, ("\n".join(lines) + "\n").encode()


def _blank(action: dict[str, Any], own: str, there: set[str]) -> bool:
    added = action.get("add")
    if added is None or not added.get("stats"):
        return False
    path = unquote(added["path"])
    told = json.loads(added["stats"])
    if not path.startswith(own) or path in there or set(told) == {"numRecords"}:
        return False
    added["stats"] = json.dumps({"numRecords": told.get("numRecords", 0)})
    return True


def _drop_checkpoints(folder: TableFolder, *, below: int) -> None:
    for path in folder.log_sizes():
        match = _CHECKPOINT.fullmatch(path)
        if match and int(match[1]) < below:
            folder.remove(path)
