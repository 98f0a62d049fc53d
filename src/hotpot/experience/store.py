"""The experience store: the one writer of a run folder.

::

    trajectories ──► gate ──► log frame (fsync) ──► ledger ──► acknowledged
                      │            │
                 quarantine        └──► archive (own thread) ──► lake ──► watermark

Owns the order in which things become durable. Knows no model, environment or topology. Invariants:

- one call, one log frame, one ledger transaction: after a crash each call happened wholly or not at all;
- what was acknowledged survives the process's death (``acknowledge = "log"``) or is in the lake (``"lake"``): rows of
  every kind that :meth:`ExperienceStore.append`, ``record`` and ``record_update`` take;
- an attempt's trajectories are accepted or refused together;
- all rows of a run carry its id and this release's schema version.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from hotpot.config import GateSection, StoreSection
from hotpot.errors import RunFolderError, StoreError
from hotpot.experience.disk import sync_folder
from hotpot.experience.gate.door import ArrowRecords, records_of
from hotpot.experience.gate.entrance import Admitted, Entrance
from hotpot.experience.gate.rules import Limits
from hotpot.experience.lake.archive import Archive, Thresholds
from hotpot.experience.lake.budget import DiskBudget
from hotpot.experience.lake.health import ArchiveStatus, Told
from hotpot.experience.lake.lake import RUN_COLUMN, Lake
from hotpot.experience.lake.storage import LakeLocation
from hotpot.experience.log import recovery
from hotpot.experience.log.journal import Journal
from hotpot.experience.log.ledger import Ledger
from hotpot.experience.log.wal import segment_path
from hotpot.experience.records.redact import Redactor
from hotpot.experience.records.redact_tables import redact_tables
from hotpot.experience.records.schema import group_rows, to_table
from hotpot.experience.run_folder.checks import checked_manifest, chosen_location, prepare_folder
from hotpot.experience.run_folder.manifest import collect_manifest, take_over, write_manifest
from hotpot.experience.run_folder.owner import OwnerLock
from hotpot.experience.run_folder.places import check_unclaimed, claim_run
from hotpot.ids import canonical_json
from hotpot.timeline import Slice, Timeline
from hotpot.types import (
    SCHEMA_VERSION,
    ConsumptionRow,
    DiscardRow,
    EventRow,
    GroupRow,
    LearnedTokensRow,
    Trajectory,
    UpdateRow,
    VersionRow,
)

RUN_ENDED = "run_ended"
"""Reason of an attempt that was still leased when the run was closed in order."""

_OWN_CALLS = {
    "steps": "append",
    "trajectories": "append",
    "attempts": "the ledger",
    "consumptions": "record_update",
    "discards": "discard",
    "updates": "record_update",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendReport:
    """What became of the trajectories of one call: accepted ids, and (id, reason) of the refused, in the order given.

    ``redactions`` counts the secrets that were replaced in them. ``details`` are the words on each refusal.
    ``open_producers`` are those of the ``num_producers`` heard of so far whose breaker is not closed.
    """

    accepted: tuple[str, ...]
    quarantined: tuple[tuple[str, str], ...]
    redactions: int = 0
    details: tuple[str, ...] = ()
    open_producers: tuple[str, ...] = ()
    num_producers: int = 0

    @property
    def all_open(self) -> bool:
        """Whether every producer is held off: nothing is coming in."""
        return 0 < self.num_producers == len(self.open_producers)


class ExperienceStore:
    """The writer of one run. Made by :meth:`open`; use it as a context manager or call :meth:`close`."""

    def __init__(
        self,
        run_folder: Path,
        *,
        run_id: str,
        settings: StoreSection,
        location: LakeLocation,
        limits: Limits,
        lock: OwnerLock,
        redactor: Redactor,
        gate: GateSection,
        timeline: Timeline | None = None,
    ) -> None:
        self.run_folder = run_folder
        self.run_id = self._run_id = run_id
        self._settings = settings
        self._lock_file = lock
        self._redactor = redactor
        self._timeline = timeline
        self._span: Callable[[str], AbstractContextManager[None]] = (
            timeline.span if timeline is not None else lambda _: nullcontext()
        )
        self._guard = threading.RLock()
        self._closed = False
        self.ledger = Ledger(
            run_folder / "control.sqlite", run_id, redact=lambda reason: redactor.redact(reason)[0]
        )
        self._entrance = Entrance(run_folder, limits, self.ledger, gate)
        try:
            self._begin(run_folder / "wal", Lake(location, writer=run_id))
        except BaseException:
            self.ledger.close(ended=False)
            raise

    def _begin(self, log_folder: Path, lake: Lake) -> None:
        watermark = lake.watermark()
        if watermark:
            lake.sync("segments")  # recovery deletes what is below it
        recovered = recovery.recover(log_folder, self.ledger, watermark)
        if watermark or recovered.sealed:
            self._entrance.recall()
        self._archive = Archive(
            lake,
            thresholds=Thresholds(
                batches=self._settings.archive_every_batches,
                num_bytes=self._settings.archive_every_bytes,
                seconds=self._settings.archive_every_s,
            ),
        )
        self._budget = DiskBudget(
            log_folder,
            lake.location.folder if lake.location.is_local else None,
            partition=None if self._settings.lake is None else f"{RUN_COLUMN}={self._run_id}",
            max_bytes=self._settings.max_bytes,
            min_free_bytes=self._settings.min_free_bytes,
        )
        self._journal = Journal(
            log_folder,
            recovered.next_segment,
            self.ledger,
            noted=self._noted,
            sealed=self._archive.add,
            span=self._span,
        )
        for number in recovered.sealed:
            self._archive.add(segment_path(log_folder, number))
        self._archive.start(
            seal=self._journal.seal,
            settle=self.ledger.sync,
            tell=self._tell,
            archived=self._budget.measure,
        )
        if recovered.unclean:
            try:
                self.record([recovery.event(recovered, self.ledger, self._run_id)])
            except BaseException:
                self._archive.close(timeout_s=self._longest_operation_s)
                self._journal.close()
                raise

    @classmethod
    def open(
        cls,
        run_folder: Path,
        *,
        run_id: str,
        settings: StoreSection,
        vocabulary_size: int,
        recipe: str = "{}",
        seed: int = 0,
        num_threads: int = 0,
        resume: bool = False,
        gate: GateSection | None = None,
        timeline: Timeline | None = None,
    ) -> Self:
        """Create the run folder, or with ``resume`` take over the one that is there (recovering it from a crash).

        A run of an older schema version goes on under this release's, which the manifest says from then on.
        ``recipe`` (JSON), ``seed`` and ``num_threads`` go into the manifest of a new run. ``timeline``, of the one thread
        that calls the store, gets the spans ``gate``, ``log`` and ``ledger`` of each write; open them inside a ``whole``
        span to count them under that. Raises :class:`hotpot.errors.RecipeError` where a pattern of
        ``settings.redact_patterns`` can't work and :class:`hotpot.errors.UsageError` where the lake's place can't, or
        credentials for it are missing, before anything is made; :class:`RunFolderError` where the folder exists (without
        ``resume``), is missing (with it), can't be written, or has a living writer, or where its lake holds another run
        of that id; :class:`StoreError` where what lies in it can't be recovered.
        """
        run_folder = Path(run_folder)
        redactor = Redactor(settings.redact_patterns)
        location = chosen_location(run_folder, settings)
        location.storage_options()  # credentials that are missing are told before anything is made
        prepare_folder(run_folder, resume=resume)
        if not resume:
            manifest = collect_manifest(
                run_id=run_id,
                recipe=recipe,
                seed=seed,
                num_threads=num_threads,
                run_folder=run_folder,
                redactor=redactor,
                lake=None if settings.lake is None else LakeLocation.of(settings.lake, settings.s3).uri,
                s3=settings.s3.model_dump() if str(settings.lake).startswith("s3://") else None,
                vocabulary_size=vocabulary_size,
            )
        lock = OwnerLock(run_folder)
        try:
            if resume:
                manifest = take_over(run_folder, checked_manifest(run_folder, run_id, settings))
            else:
                check_unclaimed(location, run_id)
                write_manifest(run_folder, manifest)
            for folder in (run_folder / "wal", run_folder / "checkpoints", run_folder / "logs"):
                folder.mkdir(exist_ok=True)
            if location.is_local:
                location.folder.mkdir(parents=True, exist_ok=True)
            claim_run(location, manifest)
            sync_folder(run_folder)
            sync_folder(run_folder.parent)
            limits = Limits(run_id=run_id, vocabulary_size=vocabulary_size)
            return cls(
                run_folder,
                run_id=run_id,
                settings=settings,
                location=location,
                limits=limits,
                lock=lock,
                redactor=redactor,
                gate=gate or GateSection(),
                timeline=timeline,
            )
        except OSError as error:
            lock.release()
            raise RunFolderError(f"can't write {run_folder}: {error}; check space and rights") from error
        except BaseException:
            lock.release()
            raise

    def append(self, trajectories: Sequence[Trajectory]) -> AppendReport:
        """Pass trajectories through the gate, log them and close their attempts; returns once that is acknowledged.

        The attempts must be leased. A refused trajectory goes to quarantine and its attempt is dropped. Raises
        :class:`hotpot.errors.LedgerError` where an accepted trajectory's attempt isn't leased (nothing is kept then),
        and :class:`StoreError` where log, ledger or lake fail.
        """
        return self._take(trajectories)

    def append_records(
        self,
        records: Iterable[Any] | ArrowRecords,
        *,
        producer: str,
        versions: Sequence[VersionRow] = (),
        follow: Callable[[Admitted], Sequence[tuple[str, Mapping[str, Any]]]] | None = None,
    ) -> AppendReport:
        """Take records that are not our dataclasses: mappings or Arrow tables as :mod:`hotpot.experience.gate.door` has them.

        Records of an older known schema version are upgraded; unknown, malformed and wrong ones go to quarantine under
        ``producer``, whose breaker they count for. Their attempts need no lease (:mod:`hotpot.experience.gate.entrance` says which ids are
        taken). ``versions`` explain versions that the records name. ``follow`` returns events (kind, detail) that tell of the
        outcome in the same frame. Raises :class:`StoreError` where log, ledger or lake fail, or ``versions`` are no rows of
        this run; never for what a record holds.
        """
        brought = records_of(records) if isinstance(records, ArrowRecords) else list(records)
        return self._take(brought, producer=producer, versions=versions, follow=follow)

    def _take(
        self,
        records: Sequence[Any],
        *,
        producer: str | None = None,
        versions: Sequence[VersionRow] = (),
        follow: Callable[[Admitted], Sequence[tuple[str, Mapping[str, Any]]]] | None = None,
    ) -> AppendReport:
        with self._guard:
            self._check_open()
            with self._span("gate"):
                admitted = self._entrance.admit(records, producer=producer, versions=versions)
                told = [self._entrance.event(*each) for each in (follow(admitted) if follow else ())]
                others = self._tables(group_rows([*versions, *admitted.events, *told]))
                tables, redactions = redact_tables(self._redactor, {**admitted.tables, **others})
            with self._span("ledger"):
                brought = self.ledger.brought(admitted.leases)
                finished = dict.fromkeys((t.row.attempt_id for t in admitted.accepted), "")
                for row in brought:
                    finished.pop(row.attempt_id)
                attempts = (
                    brought
                    + self.ledger.ended(finished, "finished")
                    + self.ledger.ended(admitted.dropped, "dropped")
                )
            self._write(tables, attempts, batches=1)
            self._entrance.learn(versions, admitted.accepted)
            report = AppendReport(
                accepted=tuple(t.row.trajectory_id for t in admitted.accepted),
                quarantined=tuple((row.record_id, row.reason) for row in admitted.quarantine),
                redactions=redactions,
                details=tuple(row.detail for row in admitted.quarantine),
                open_producers=self._entrance.breaker.open_producers(),
                num_producers=len(self._entrance.breaker.producers()),
            )
        self._wait_for_lake()
        return report

    def record(self, rows: Iterable[Any]) -> None:
        """Log rows of any tables but those with a call of their own, in one frame; returns once that is acknowledged.

        Raises :class:`StoreError` where a row is of no table, of a table with its own call, of another run or schema
        version, or holds a value of the wrong type.
        """
        self._record(list(rows))

    def _record(self, rows: Sequence[Any], discards: Sequence[DiscardRow] = ()) -> None:
        grouped = group_rows(rows)
        for name in grouped:
            if name in _OWN_CALLS and not (name == "discards" and discards):
                raise StoreError(f"rows of {name} are written by {_OWN_CALLS[name]} only, not by record")
        if not grouped:
            return
        with self._guard:
            self._check_open()
            with self._span("ledger"):
                self.ledger.check_discards(discards)
            with self._span("gate"):
                tables, _ = redact_tables(self._redactor, self._tables(grouped))
            self._write(tables, discards=discards)
            self._entrance.learn(rows)
        self._wait_for_lake()

    def record_update(
        self,
        update: UpdateRow,
        groups: Sequence[GroupRow],
        learned: Sequence[LearnedTokensRow],
        consumptions: Sequence[ConsumptionRow],
        others: Iterable[Any] = (),
    ) -> None:
        """Log one update with its groups, learned tokens and consumptions as one atomic frame, acknowledged.

        ``others`` are further rows for the same frame (metrics, events, versions). Raises
        :class:`hotpot.errors.LedgerError` where the update's number was recorded before, or it consumes a trajectory
        twice or one on no finished attempt of this run; :class:`StoreError` as :meth:`record`.
        """
        others = list(others)
        grouped = group_rows([update, *groups, *learned, *consumptions, *others])
        with self._guard:
            self._check_open()
            with self._span("ledger"):
                self.ledger.check_consumptions(consumptions, update.update)
            with self._span("gate"):
                tables, _ = redact_tables(self._redactor, self._tables(grouped))
            self._write(tables, consumptions=consumptions, update=update.update)
            self._entrance.learn(others)
        self._wait_for_lake()

    def discard(self, discards: Sequence[DiscardRow], others: Iterable[Any] = ()) -> None:
        """Log that finished trajectories are not learned from, and ``others`` (events, metrics), in one frame, acknowledged.

        Raises :class:`hotpot.errors.LedgerError` where one is not of a finished attempt, was consumed, or was discarded
        before (nothing is kept then); :class:`StoreError` as :meth:`record`.
        """
        if discards:
            self._record([*discards, *others], discards)
        else:
            self.record(others)

    def flush(self, *, timeout_s: float | None = None) -> None:
        """Wait until everything appended so far is in the lake, by default for ``store.flush_timeout_s``.

        Raises :class:`StoreError` where it does not get there.
        """
        self._archive.flush(timeout_s=self._settings.flush_timeout_s if timeout_s is None else timeout_s)

    def backlog(self) -> int:
        """Return how many log segments are sealed and not yet in the lake."""
        return self._archive.backlog()

    def archive_status(self) -> ArchiveStatus:
        """Return how archiving goes: what waits, and since when and why it fails, if it does."""
        return self._archive.status()

    def archive_slices(self) -> list[Slice]:
        """Return what the archive thread did when, in seconds since the timeline given to :meth:`open` began.

        Empty without a timeline.
        """
        if self._timeline is None:
            return []
        shift = self._timeline.elapsed_s - self._archive.timeline.elapsed_s
        moved = [
            replace(piece, start_s=piece.start_s + shift) for piece in list(self._archive.timeline.slices)
        ]
        return [piece for piece in moved if piece.start_s >= 0]

    def close(self) -> None:
        """End the run in order: leased attempts are dropped, everything is archived, the folder is let go.

        Raises :class:`StoreError` where the lake does not take the rest; it stays in the log for a resume. Where its
        storage hangs for longer than its own deadlines the run stays this process's until that ends. May be called twice.
        """
        with self._guard:
            if self._closed:
                return
            self._closed = True
        in_order = False
        try:
            self._journal.end(RUN_ENDED)
            self.flush()
            in_order = True
        finally:
            stopped = self._archive.close(timeout_s=self._longest_operation_s)
            self._journal.close()
            self.ledger.close(ended=in_order)
            if stopped:
                self._lock_file.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store of {self.run_folder} is closed; open it again with resume")
        self._archive.check()
        self._archive.wait_for_room(
            max_backlog=self._settings.max_backlog, timeout_s=self._settings.backpressure_s
        )
        self._journal.settle()

    @property
    def _longest_operation_s(self) -> float:
        return 2 * self._settings.s3.deadline_s + 5.0

    def _write(self, tables: dict[str, pa.Table], *rows: Sequence[Any], **keywords: Any) -> None:
        self._budget.check(sum(table.nbytes for table in tables.values()))
        self._journal.write(tables, *rows, **keywords)

    def _noted(self, num_bytes: int, batches: int) -> None:
        self._budget.appended(num_bytes)
        self._archive.note(num_bytes, batches)

    def _tell(self, told: Told) -> None:
        # Called by the archive's thread: past the store's lock, which may be held by someone who waits for the archive.
        row = EventRow(
            run_id=self._run_id,
            kind=told.kind,
            detail=canonical_json(dict(told.detail)),
            update=max(0, self.ledger.mark("update")),
            policy_version=max(0, self.ledger.mark("policy_version")),
            time_us=told.time_us,
            schema_version=SCHEMA_VERSION,
        )
        tables, _ = redact_tables(self._redactor, {"events": to_table("events", [row])})
        self._journal.note(tables)

    def _wait_for_lake(self) -> None:
        if self._settings.acknowledge == "lake":
            self.flush()

    def _tables(self, grouped: Mapping[str, Sequence[Any]]) -> dict[str, pa.Table]:
        for name, rows in grouped.items():
            for row in rows:
                if row.run_id != self._run_id or row.schema_version != SCHEMA_VERSION:
                    raise StoreError(
                        f"a row of {name} is of run {row.run_id!r}, schema version {row.schema_version}; this store "
                        f"keeps run {self._run_id!r}, version {SCHEMA_VERSION}"
                    )
        return {name: to_table(name, rows) for name, rows in grouped.items()}
