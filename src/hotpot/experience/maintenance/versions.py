"""Which Delta version of each table stands for an update, so that a vacuum can keep what those versions need.

Owns the way update → log segment → version. Every commit says which run's log segment it wrote
(``hotpot.run``, ``hotpot.segment``); a table stands as of a segment until the run's first commit of a later one. Of all
versions in between (compactions, other runs' commits) the last is taken: it holds the same rows of the run in the fewest
files.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from deltalake import DeltaTable

from hotpot.experience.lake.lake import RUN_COLUMN, SEGMENT_COLUMN, Lake
from hotpot.experience.maintenance.tables import LAKE_TABLES, data_files, folder_of, read_columns
from hotpot.experience.run_folder.places import runs_in


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateVersions:
    """The Delta version of each table that holds what was archived with an update's log segment."""

    update: int
    segment: int
    versions: dict[str, int]


def update_versions(lake: Lake, *, last: int) -> list[UpdateVersions]:
    """Return where the ``last`` updates of the run that are in the lake stand, ascending.

    A table whose version is not on Delta's log any more is left out of ``versions``. Raises
    :class:`hotpot.errors.StoreError` where the lake can't be read.
    """
    updates = _updates(lake)[-last:] if last else []
    commits = {name: _commits(handle) for name in LAKE_TABLES if (handle := lake.open_table(name))}
    return [
        UpdateVersions(
            update=update,
            segment=segment,
            versions={
                name: version
                for name, found in commits.items()
                if (version := version_as_of(found, segment, lake.writer)) is not None
            },
        )
        for update, segment in updates
    ]


def version_as_of(
    commits: Iterable[tuple[int, str | None, int | None]], segment: int, run: str
) -> int | None:
    """Return the last version before ``run`` brought rows of a segment after ``segment``; None where the log has none.

    ``commits`` are (version, run, segment) ascending; both are None for a commit that brought no rows, the run alone for
    one of a lake that one run has for itself.
    """
    version = None
    for number, writer, brought in commits:
        if brought is not None and writer in (None, run) and brought > segment:
            break
        version = number
    return version


def runs_of(lake: Lake) -> list[str]:
    """Return the runs that share the lake, the lake's own first: one that has only just begun counts, too."""
    found = {lake.writer, *runs_in(lake.location)}
    for name in LAKE_TABLES:
        handle = lake.open_table(name)
        if handle is not None and RUN_COLUMN in handle.metadata().partition_columns:
            found.update(str(partition[RUN_COLUMN]) for partition in handle.partitions())
    return [lake.writer, *sorted(found - {lake.writer})]


def _updates(lake: Lake) -> list[tuple[int, int]]:
    folder, files = folder_of(lake, "updates"), data_files(lake, "updates")
    if folder is None or not files:
        return []
    rows = read_columns(folder, files, ["update", SEGMENT_COLUMN])
    watermark = lake.watermark()
    pairs: list[dict[str, Any]] = rows.to_pylist()
    return sorted((row["update"], row[SEGMENT_COLUMN]) for row in pairs if row[SEGMENT_COLUMN] <= watermark)


def _commits(handle: DeltaTable) -> list[tuple[int, str | None, int | None]]:
    found = []
    for commit in reversed(handle.history()):
        info: dict[str, Any] = commit
        segment = info.get("hotpot.segment")
        found.append(
            (int(info["version"]), info.get("hotpot.run"), None if segment is None else int(segment))
        )
    return found
