"""Vacuum: removes the files that no version of a table that is kept needs.

Owns what is kept: every file of the newest version; those of the versions the last updates used, of every run in the
lake; and whatever is younger than the retention, which is what protects a writer's files before their commit and readers
who hold a file list. What goes is what compaction replaced, and the half files of a crash. Removing them ends time
travel through Delta to other versions; :meth:`hotpot.experience.RunReader.as_of` needs no old version and goes on.

Safe to kill at any moment and to repeat: nothing that is removed is of use to anyone.
"""

from dataclasses import dataclass
from functools import partial

from hotpot.errors import UsageError
from hotpot.experience.crashpoints import reach
from hotpot.experience.lake.lake import Lake
from hotpot.experience.maintenance.lock import maintaining
from hotpot.experience.maintenance.tables import LAKE_TABLES, folder_of
from hotpot.experience.maintenance.versions import runs_of, update_versions
from hotpot.experience.reading.reader import RunReader

RETENTION_HOURS = 168
"""Hours a file that nobody needs any more is kept by default."""

SAFE_HOURS = 1
"""Shortest retention beside writers: far longer than one takes from a file to its commit."""

KEEP_UPDATES = 10
"""Updates whose versions of the tables are kept by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacuumed:
    """What a vacuum removed from one table, or would remove, and the versions it kept for updates."""

    table: str
    files: tuple[str, ...]
    num_bytes: int
    kept_versions: tuple[int, ...]


def vacuum(
    reader: RunReader,
    *,
    retention_hours: int = RETENTION_HOURS,
    keep_updates: int = KEEP_UPDATES,
    dry_run: bool = False,
) -> list[Vacuumed]:
    """Remove what no kept version needs from every table of the run's lake; returns one report per table.

    ``retention_hours`` below :data:`SAFE_HOURS` needs the run to have no living writer and the lake for itself; what is
    removed then includes what readers may be reading. Raises :class:`UsageError` where that is not so,
    :class:`hotpot.errors.RunFolderError` where another maintenance or writer is at it, and
    :class:`hotpot.errors.StoreError` where the lake can't be read.
    """
    alone = retention_hours < SAFE_HOURS
    shared = runs_of(reader.lake)
    if alone and len(shared) > 1:
        raise UsageError(
            f"the lake {reader.lake.location.uri} is shared by {len(shared)} runs, so a retention of {retention_hours} hours "
            f"could take files from under their writers; give at least {SAFE_HOURS}"
        )
    with maintaining(reader, alone=alone):
        kept = _kept_versions(reader.lake, shared, keep_updates)
        return [
            report
            for name in LAKE_TABLES
            if (
                report := _vacuum_table(
                    reader.lake, name, kept.get(name, ()), retention_hours, dry_run=dry_run
                )
            )
        ]


def _kept_versions(lake: Lake, runs: list[str], keep_updates: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, set[int]] = {}
    for run in runs:
        own = lake if run == lake.writer else Lake(lake.location, writer=run)
        for update in update_versions(own, last=keep_updates):
            for name, version in update.versions.items():
                found.setdefault(name, set()).add(version)
    return {name: tuple(sorted(versions)) for name, versions in found.items()}


def _vacuum_table(
    lake: Lake, table: str, kept: tuple[int, ...], retention_hours: int, *, dry_run: bool
) -> Vacuumed | None:
    handle, folder = lake.open_table(table), folder_of(lake, table)
    if handle is None or folder is None:
        return None
    run = partial(
        handle.vacuum,
        retention_hours=retention_hours,
        enforce_retention_duration=False,
        full=True,
        keep_versions=list(kept),
    )
    sizes = folder.listing(all_runs=True)
    files = [path for path in run(dry_run=True) if path in sizes]  # Delta names those that went before, too
    report = Vacuumed(
        table=table,
        files=tuple(files),
        num_bytes=sum(sizes[path] for path in files),
        kept_versions=kept,
    )
    if files and not dry_run:
        # What stands in for the old files must be on the device before they go.
        lake.sync(table)
        reach("vacuum_before")
        run(dry_run=False)
        reach("vacuum_after")
    return report
