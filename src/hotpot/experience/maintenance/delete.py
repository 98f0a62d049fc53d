"""Deleting one trajectory, everywhere a run keeps it, for good; and the record that it was.

Owns the order of steps; each may be repeated, so a killed deletion is completed by calling it again:

1. The run is opened as by its owner (a living one refuses), the log's tail goes to the lake and its files are deleted.
2. An event ``deleted`` is recorded and archived: from here on the record says so, and a verification says where the rest
   is missing.
3. Its rows leave the newest version of each table: ``steps``, ``trajectories``, ``learned_tokens``, ``quarantine``;
   from the last one also the refusals it came back from, under whatever name.
4. Every other file of the run that held it goes (older versions, orphans of a crash), and what Delta's log keeps of
   their values (statistics) is blanked.
5. Caches in the run folder go, and the files of evidence about skipped optimiser steps that hold it.

What stays: its attempt, its consumptions and its discard, which carry ids and numbers only. Time travel: versions of the four tables
that held it can't be read through Delta any more; :meth:`hotpot.experience.RunReader.as_of` goes on, without it.
"""

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError

from hotpot.config import StoreSection
from hotpot.errors import UsageError
from hotpot.experience.crashpoints import reach
from hotpot.experience.lake.encoding import writer_properties
from hotpot.experience.lake.lake import ROW_COLUMN, RUN_COLUMN, SEGMENT_COLUMN, Lake
from hotpot.experience.maintenance.compact import TRIES
from hotpot.experience.maintenance.deletions import Deletion, deletion_now, read_deletions
from hotpot.experience.maintenance.lock import maintaining
from hotpot.experience.maintenance.scrub import scrub
from hotpot.experience.maintenance.sought import Sought
from hotpot.experience.maintenance.tables import data_files, folder_of, is_partitioned, read_columns
from hotpot.experience.reading.reader import RunReader
from hotpot.experience.requeue import accepted_from, same_content
from hotpot.experience.store import ExperienceStore

HELD_BY = {
    "steps": "trajectory_id",
    "trajectories": "trajectory_id",
    "learned_tokens": "trajectory_id",
    "quarantine": "record_id",
}
"""The tables that hold a trajectory's content, and the column that names it there."""

CACHE_FOLDER = "cache"
EVIDENCE_FOLDER = "evidence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted:
    """What a deletion did: its record, and the files that were removed because they held it."""

    deletion: Deletion
    removed_files: int
    removed_bytes: int
    accepted_as: tuple[str, ...] = ()
    """Trajectories that were made of it when it was requeued as a refused record; they stay."""


def delete(reader: RunReader, trajectory_id: str, *, reason: str, settings: StoreSection) -> Deleted:
    """Delete a trajectory from a run; ``settings`` are the run's own.

    Raises :class:`UsageError` where the reason is empty or the run has no such trajectory,
    :class:`hotpot.errors.RunFolderError` naming the process that writes or maintains the run, and
    :class:`hotpot.errors.StoreError` where log or lake fail: then call it again.
    """
    if not reason.strip():
        raise UsageError("a deletion needs a reason; it is all that will be left of the trajectory")
    with maintaining(reader) as run_folder:
        others = accepted_from(reader, trajectory_id)
        deletion = _recorded(reader, run_folder, trajectory_id, reason, settings)
    reach("delete_recorded")
    with maintaining(reader, alone=True) as run_folder:
        files, num_bytes = 0, 0
        for name, sought in _sought(trajectory_id, deletion.refusals):
            _delete_rows(reader.lake, name, sought)
            removed = scrub(reader.lake, name, sought)
            files, num_bytes = files + len(removed), num_bytes + sum(removed.values())
        _drop_caches(run_folder)
        _drop_evidence(run_folder, trajectory_id)
    return Deleted(deletion=deletion, removed_files=files, removed_bytes=num_bytes, accepted_as=others)


def _recorded(
    reader: RunReader, run_folder: Path, trajectory_id: str, reason: str, settings: StoreSection
) -> Deletion:
    """Bring the log to the lake and record the deletion; return the record, an older one where it was begun before."""
    store = ExperienceStore.open(
        run_folder, run_id=reader.manifest.run_id, settings=settings, vocabulary_size=1, resume=True
    )
    with store:
        store.flush()
        begun = [one for one in read_deletions(reader) if one.trajectory_id == trajectory_id]
        if begun:
            return begun[-1]
        refusals = same_content(reader, trajectory_id)
        rows: dict[str, Counter[int]] = {}
        for name, sought in _sought(trajectory_id, refusals):
            if counts := _rows_of(reader.lake, name, sought):
                rows.setdefault(name, Counter()).update(counts)
        if not rows:
            raise UsageError(f"the run {run_folder} has no trajectory {trajectory_id!r}; nothing was deleted")
        deletion = deletion_now(trajectory_id, reason, {**rows}, refusals)
        ledger = store.ledger
        store.record(
            [
                deletion.event(
                    run_id=reader.manifest.run_id,
                    update=max(0, ledger.mark("update")),
                    policy_version=max(0, ledger.mark("policy_version")),
                )
            ]
        )
        store.flush()
    return deletion


def _sought(trajectory_id: str, refusals: Sequence[tuple[int, int]]) -> Iterator[tuple[str, Sought]]:
    for name, column in HELD_BY.items():
        yield name, Sought(columns=(column,), values=((trajectory_id,),))
    if refusals:
        yield "quarantine", Sought(columns=(SEGMENT_COLUMN, ROW_COLUMN), values=tuple(refusals))


def _rows_of(lake: Lake, table: str, sought: Sought) -> dict[int, int]:
    folder, files = folder_of(lake, table), data_files(lake, table)
    if folder is None or not files:
        return {}
    rows = read_columns(folder, files, list({*sought.columns, SEGMENT_COLUMN}))
    counted = sought.of(rows).group_by(SEGMENT_COLUMN).aggregate([([], "count_all")]).to_pylist()
    return {one[SEGMENT_COLUMN]: one["count_all"] for one in counted}


def _delete_rows(lake: Lake, table: str, sought: Sought) -> None:
    for attempt in range(1, TRIES + 1):
        handle = lake.open_table(table)
        if handle is None or not _rows_of(lake, table, sought):
            return
        try:
            _delete_from(handle, lake, table, sought)
            break
        except CommitFailedError:
            # Another run's commit came between: once more, at the newer table.
            lake.forget()
            if attempt == TRIES:
                raise
    # Before the old files go, the new ones must be on the device.
    lake.sync(table)
    reach("delete_after")


def _delete_from(handle: DeltaTable, lake: Lake, table: str, sought: Sought) -> None:
    condition = sought.condition
    if is_partitioned(handle):
        condition = f"{RUN_COLUMN} = '{lake.writer}' AND {condition}"
    reach("delete_before")
    handle.delete(
        condition,
        writer_properties=writer_properties(table),
        commit_properties=CommitProperties(
            custom_metadata={"hotpot.run": lake.writer, "hotpot.maintenance": "delete"}
        ),
    )


def _drop_caches(run_folder: Path) -> None:
    for folder in (run_folder / CACHE_FOLDER, *sorted(run_folder.glob(f"*/{CACHE_FOLDER}"))):
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
            reach("delete_cache")


def _drop_evidence(run_folder: Path, trajectory_id: str) -> None:
    for path in sorted((run_folder / EVIDENCE_FOLDER).glob("*/*.arrow")):
        with path.open("rb") as source, pa.ipc.open_file(source) as file:
            held = file.read_all().column("trajectory_id").to_pylist()
        if trajectory_id in held:
            path.unlink()
