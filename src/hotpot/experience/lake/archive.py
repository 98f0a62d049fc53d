"""The background writer: takes sealed log segments to the lake.

::

    append ──► active log segment ──seal──► sealed ones ──► Delta tables ──► watermark ──► log segment deleted

Owns one thread and the list of sealed log segments. Consumes those that are sealed; produces lake commits; waits
for a threshold (batches, bytes), for the age limit, or for someone who calls :meth:`Archive.flush`; is woken by
:meth:`Archive.note` and :meth:`Archive.flush`. Knows no record class.

Invariants: log segments are committed in order; one is deleted only after its watermark is published and durable; a
failure that may pass is tried again with growing pauses for as long as it takes, told once when it begins and once when
it is over; one that can't pass is raised from :meth:`Archive.check` (the records stay in the log meanwhile). Log
segments are sealed while the lake fails too, and :meth:`Archive.wait_for_room` holds whoever appends where too many
wait. When it runs changes only which log segment a record went through.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from hotpot.errors import BacklogError, StoreError
from hotpot.experience.crashpoints import reach
from hotpot.experience.disk import sync_folder
from hotpot.experience.lake.health import ArchiveHealth, ArchiveStatus, Told
from hotpot.experience.lake.lake import LAKE_ERRORS, Lake, is_permanent, plain
from hotpot.experience.log.order import row_numbers
from hotpot.experience.log.wal import read_segment
from hotpot.places import error_place
from hotpot.timeline import Timeline
from hotpot.types import TABLES

_LONGEST_PAUSE_S = 60.0
MAX_SLICES = 100_000
"""Slices of the archive's work that are kept for a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """When the active log segment is sealed: at the first of these many batches, bytes, or seconds since its first frame."""

    batches: int
    num_bytes: int
    seconds: float


class Archive:
    """Writes sealed log segments to the lake in a thread of its own, from :meth:`start` to :meth:`close`.

    ``timeline`` is the thread's own: its slices are what it did when (seal, read, commit, sync, publish, archive).
    """

    def __init__(self, lake: Lake, *, thresholds: Thresholds) -> None:
        self._lake = lake
        self.timeline = Timeline(keep_slices=True, max_slices=MAX_SLICES)
        self._thresholds = thresholds
        self._wake = threading.Condition()
        self._sealed: list[Path] = []
        self._deleted: Path | None = None
        self._batches = 0
        self._bytes = 0
        self._first_frame_at: float | None = None
        # Each wish to seal has a number: the last one, the last one sealed for, the last one all of whose records are in
        # the lake, and the one that takes what was told of an outage there.
        self._seal_asked = 0
        self._seal_done = 0
        self._in_lake = 0
        self._told_asked = 0
        self._health = ArchiveHealth()
        self._untold: list[Told] = []
        self._died: BaseException | None = None
        self._stop = False

    def start(
        self,
        *,
        seal: Callable[[], None],
        settle: Callable[[], None],
        tell: Callable[[Told], None],
        archived: Callable[[], None],
    ) -> None:
        """Start the thread.

        ``seal`` seals the active log segment and calls :meth:`add`; ``settle`` makes the ledger durable; ``tell``
        records that archiving began to fail or goes on again; ``archived`` is called when a log segment is gone.
        """
        self._seal = seal
        self._settle = settle
        self._record = tell
        self._archived = archived
        self._thread = threading.Thread(target=self._run, name="hotpot-archive", daemon=True)
        self._thread.start()

    def add(self, path: Path) -> None:
        """Take a sealed log segment over."""
        with self._wake:
            self._sealed.append(path)
            self._batches = self._bytes = 0
            self._first_frame_at = None
            self._wake.notify_all()

    def note(self, num_bytes: int, batches: int) -> None:
        """Hear of a frame appended to the active log segment."""
        with self._wake:
            self._batches += batches
            self._bytes += num_bytes
            if self._first_frame_at is None:
                self._first_frame_at = time.monotonic()
                self._wake.notify_all()
            elif self._due():
                self._wake.notify_all()

    def backlog(self) -> int:
        """Return how many sealed log segments wait for the lake."""
        with self._wake:
            return len(self._sealed)

    def status(self) -> ArchiveStatus:
        """Return how archiving goes."""
        with self._wake:
            return self._health.status(len(self._sealed), time.monotonic())

    def check(self) -> None:
        """Raise :class:`StoreError` where archiving has ended for good; nothing is lost, it lies in the log."""
        with self._wake:
            if self._died is not None:
                known = isinstance(self._died, (*LAKE_ERRORS, StoreError))
                raised = "" if known else f" ({type(self._died).__name__} in {error_place(self._died)})"
                raise StoreError(
                    f"the log can't go to the lake, {len(self._sealed)} log segments wait: {plain(self._died)}{raised}; "
                    f"everything acknowledged is in the log: {'mend the storage and ' if known else ''}resume the run"
                ) from self._died

    def wait_for_room(self, *, max_backlog: int, timeout_s: float) -> None:
        """Wait while ``max_backlog`` log segments or more wait for the lake: nobody appends faster than it takes.

        What lies in the active log segment counts as if it were sealed. Raises :class:`BacklogError` after
        ``timeout_s``, and as :meth:`check`.
        """
        deadline = time.monotonic() + timeout_s
        with self._wake:
            while self._waiting() >= max_backlog:
                self.check()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise BacklogError(
                        f"{self._waiting()} log segments wait for the lake, store.max_backlog allows {max_backlog}, and "
                        f"none went there within {timeout_s} s{self._last_failure()}; everything acknowledged is in the "
                        "log: mend the storage and resume the run"
                    )
                self._wake.wait(min(left, 1.0))

    def flush(self, *, timeout_s: float) -> None:
        """Seal, and wait until everything appended so far is in the lake, whatever others append meanwhile.

        Raises :class:`StoreError` where that can't be or takes longer than ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        with self._wake:
            self._seal_asked += 1
            asked = self._seal_asked
            self._wake.notify_all()
            while self._untold or self._in_lake < max(asked, self._told_asked):
                self.check()
                left = deadline - time.monotonic()
                if left <= 0 or not self._thread.is_alive():
                    raise StoreError(
                        f"the lake did not take the log within {timeout_s} s{self._last_failure()}; "
                        "everything acknowledged is in the log: resume the run to archive it"
                    )
                self._wake.wait(min(left, 1.0))

    def close(self, *, timeout_s: float) -> bool:
        """Stop the thread after the log segment it is at; return False where it still hangs there after ``timeout_s``.

        Call :meth:`flush` first to leave nothing behind.
        """
        with self._wake:
            self._stop = True
            self._wake.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _last_failure(self) -> str:
        cause = self._health.cause
        return f" ({self._health.tries} tries failed, the last one: {cause})" if cause else ""

    def _waiting(self) -> int:
        limits = self._thresholds
        return len(self._sealed) + max(self._batches // limits.batches, self._bytes // limits.num_bytes)

    def _due(self) -> bool:
        limits = self._thresholds
        if self._first_frame_at is None:
            return False
        return (
            self._batches >= limits.batches
            or self._bytes >= limits.num_bytes
            # A lake that fails gets no more of them for waiting longer.
            or (
                not (self._health.tries and self._sealed)
                and time.monotonic() - self._first_frame_at >= limits.seconds
            )
        )

    def _run(self) -> None:
        try:
            while self._wait():
                self._work()
        except BaseException as error:  # noqa: BLE001 - kept, and raised from the next call of the owner
            with self._wake:
                self._died = error
                self._wake.notify_all()

    def _wait(self) -> bool:
        """Wait until there is something to do; return False to stop."""
        with self._wake:
            while not (self._stop or self._sealed or self._seal_asked > self._seal_done or self._due()):
                self._wake.wait(self._until_due())
            return not self._stop

    def _until_due(self) -> float:
        if self._first_frame_at is None:
            return _LONGEST_PAUSE_S
        left = self._first_frame_at + self._thresholds.seconds - time.monotonic()
        return min(max(0.0, left), _LONGEST_PAUSE_S)

    def _work(self) -> None:
        with self._wake:
            asked = self._seal_asked
            seal = asked > self._seal_done or self._due()
        # What is sealed goes first: a full disk that lets no new log segment begin gets room by it. A lake that fails
        # must not keep the log from being sealed, or one log segment would grow without bound.
        well = self._tried(self._drain)
        if seal:
            sealed = self._tried(self._seal_active)
            if sealed:
                with self._wake:
                    self._seal_done = asked
                    self._wake.notify_all()
            well = well and sealed and self._tried(self._drain)
        if not well:
            self._tried(self._tell)
            with self._wake:
                self._wake.wait_for(lambda: self._stop, self._health.pause_s)

    def _tried(self, work: Callable[[], None]) -> bool:
        """Do ``work`` and return True, or note that it failed in a way that may pass."""
        try:
            work()
            return True
        except (*LAKE_ERRORS, StoreError) as error:
            if not _may_pass(error):
                raise
            self._lake.forget()
            with self._wake:
                self._hear(self._health.failed(plain(error), len(self._sealed), time.monotonic()))
            return False

    def _seal_active(self) -> None:
        # Not under the condition: the journal takes its own lock first, then this one.
        with self.timeline.span("seal"):
            self._seal()

    def _hear(self, told: Told | None) -> None:
        if told is not None:
            self._untold.append(told)
        self._wake.notify_all()

    def _tell(self) -> None:
        while self._untold:
            self._record(self._untold[0])
            with self._wake:
                self._untold.pop(0)
                # Whoever waits for the lake waits for this too, and a closed run leaves nothing in its log.
                if self._health.tries == 0:
                    self._seal_asked += 1
                    self._told_asked = self._seal_asked
                self._wake.notify_all()

    def _drain(self) -> None:
        while self._sealed and not self._stop:
            with self.timeline.span("archive"):
                self._archive(self._sealed[0])
        with self._wake:
            if not self._sealed:
                self._in_lake = self._seal_done
                self._wake.notify_all()
        self._tell()

    def _archive(self, path: Path) -> None:
        # Settling first makes the ledger durable before its log goes, and stops a superseded owner before it writes.
        self._settle()
        if path != self._deleted:  # else a try before came that far
            archive_segment(self._lake, path, self.timeline)
            path.unlink()
            self._deleted = path
        sync_folder(path.parent)
        reach("log_segment_deleted")
        self._archived()
        with self._wake:
            self._sealed.pop(0)
            self._hear(self._health.succeeded(len(self._sealed), time.monotonic()))


def _may_pass(error: BaseException) -> bool:
    # Storage that refused may take it later. What was found out here (another owner, damage, a failed sync) stays true.
    if isinstance(error, StoreError):
        return error.__cause__ is not None
    return not is_permanent(error)


def archive_segment(lake: Lake, path: Path, timeline: Timeline) -> None:
    """Commit every table of a sealed log segment to the lake, then its watermark, durably. Safe to repeat.

    Raises :class:`hotpot.errors.CorruptRecordError` where the log segment is damaged, and what the lake raises.
    """
    with timeline.span("read"):
        segment = read_segment(path, sealed=True)
    counts: dict[str, int] = {}
    order = row_numbers(segment.frames)
    for name in TABLES:
        pieces = [table for frame in segment.frames if (table := frame.table(name)) is not None]
        if pieces:
            rows = pa.concat_tables(pieces).combine_chunks()
            counts[name] = rows.num_rows
            with timeline.span("commit"):
                lake.commit(name, segment.number, rows, order[name])
    if counts:
        reach("before_watermark")
        with timeline.span("sync"):
            lake.sync()
        with timeline.span("publish"):
            lake.publish(segment.number, counts)
            lake.sync()
        reach("after_watermark")
