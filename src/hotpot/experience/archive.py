"""The background writer: takes sealed log segments to the lake.

::

    append ──► active segment ──seal──► sealed segments ──► Delta tables ──► watermark ──► segment deleted

Owns one thread and the list of sealed segments. Consumes the segments that are sealed; produces lake commits; waits
for a threshold (batches, bytes), for the age limit, or for someone who calls :meth:`Archive.flush`; is woken by
:meth:`Archive.note` and :meth:`Archive.flush`. Knows no record class.

Invariants: segments are committed in order; a log segment is deleted only after its watermark is published; a failure is
tried again with growing pauses and, once persistent, raised from :meth:`Archive.check` and :meth:`Archive.flush`
(the records stay in the log meanwhile). When it runs changes only which segment a record went through.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from hotpot.errors import StoreError
from hotpot.experience.crashpoints import reach
from hotpot.experience.lake import LAKE_ERRORS, Lake
from hotpot.experience.wal import read_segment, sync_folder
from hotpot.types import TABLES

PERSISTENT_FAILURES = 4
"""Failures in a row after which the writer says so to whoever appends."""

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """When the active segment is sealed: at the first of these many batches, bytes, or seconds since its first frame."""

    batches: int
    num_bytes: int
    seconds: float


class Archive:
    """Writes sealed segments to the lake in a thread of its own, from :meth:`start` to :meth:`close`."""

    def __init__(self, lake: Lake, *, thresholds: Thresholds) -> None:
        self._lake = lake
        self._thresholds = thresholds
        self._wake = threading.Condition()
        self._sealed: list[Path] = []
        self._batches = 0
        self._bytes = 0
        self._first_frame_at: float | None = None
        self._seal_asked = 0
        self._seal_done = 0
        self._failures = 0
        self._failure: BaseException | None = None
        self._stop = False

    def start(self, *, seal: Callable[[], None], settle: Callable[[], None]) -> None:
        """Start the thread. ``seal`` seals the active segment and calls :meth:`add`; ``settle`` makes the ledger durable."""
        self._seal = seal
        self._settle = settle
        self._thread = threading.Thread(target=self._run, name="hotpot-archive", daemon=True)
        self._thread.start()

    def add(self, path: Path) -> None:
        """Take a sealed segment over."""
        with self._wake:
            self._sealed.append(path)
            self._batches = self._bytes = 0
            self._first_frame_at = None
            self._wake.notify_all()

    def note(self, num_bytes: int, batches: int) -> None:
        """Hear of a frame appended to the active segment."""
        with self._wake:
            self._batches += batches
            self._bytes += num_bytes
            if self._first_frame_at is None:
                self._first_frame_at = time.monotonic()
                self._wake.notify_all()
            elif self._due():
                self._wake.notify_all()

    def backlog(self) -> int:
        """Return how many sealed segments wait for the lake."""
        with self._wake:
            return len(self._sealed)

    def check(self) -> None:
        """Raise :class:`StoreError` where archiving has failed persistently; nothing is lost, it lies in the log."""
        with self._wake:
            if self._failure is not None and (self._failures >= PERSISTENT_FAILURES or self._stop):
                raise StoreError(
                    f"the lake has refused log segment {self._sealed[0] if self._sealed else ''} "
                    f"{self._failures} times: {self._failure}; everything acknowledged is in the log: "
                    "mend the storage and resume the run"
                ) from self._failure

    def flush(self, *, timeout_s: float) -> None:
        """Seal, and wait until everything appended so far is in the lake.

        Raises :class:`StoreError` where that fails persistently or takes longer than ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        with self._wake:
            self._seal_asked += 1
            wanted = self._seal_asked
            self._wake.notify_all()
            while self._seal_done < wanted or self._sealed:
                self.check()
                left = deadline - time.monotonic()
                if left <= 0 or not self._thread.is_alive():
                    raise StoreError(
                        f"the lake did not take the log within {timeout_s} s"
                        f"{f' (last failure: {self._failure})' if self._failure else ''}; "
                        "everything acknowledged is in the log: resume the run to archive it"
                    )
                self._wake.wait(min(left, 1.0))

    def close(self) -> None:
        """Stop the thread after the segment it is at. Call :meth:`flush` first to leave nothing behind."""
        with self._wake:
            self._stop = True
            self._wake.notify_all()
        self._thread.join()

    def _due(self) -> bool:
        limits = self._thresholds
        if self._first_frame_at is None:
            return False
        return (
            self._batches >= limits.batches
            or self._bytes >= limits.num_bytes
            or time.monotonic() - self._first_frame_at >= limits.seconds
        )

    def _run(self) -> None:
        try:
            while self._wait():
                self._work()
        except BaseException as error:  # noqa: BLE001 - kept, and raised from the next call of the owner
            with self._wake:
                self._failure, self._failures = error, PERSISTENT_FAILURES
                self._wake.notify_all()

    def _wait(self) -> bool:
        """Wait until there is something to do; return False to stop."""
        with self._wake:
            while not (self._stop or self._sealed or self._seal_asked > self._seal_done or self._due()):
                self._wake.wait(self._until_due())
            return not self._stop

    def _until_due(self) -> float | None:
        if self._first_frame_at is None:
            return None
        return max(0.0, self._first_frame_at + self._thresholds.seconds - time.monotonic())

    def _work(self) -> None:
        with self._wake:
            asked = self._seal_asked
            seal = asked > self._seal_done or self._due()
        try:
            if seal:
                # Not under the condition: the journal takes its own lock first, then this one.
                self._seal()
                with self._wake:
                    self._seal_done = asked
                    self._wake.notify_all()
            while self._sealed and not self._stop:
                self._archive(self._sealed[0])
        except (*LAKE_ERRORS, StoreError) as error:
            self._lake.forget()
            with self._wake:
                self._failure = error
                self._failures += 1
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._stop, self._pause())

    def _archive(self, path: Path) -> None:
        # Settling first makes the ledger durable before its log goes, and stops a superseded owner before it writes.
        self._settle()
        archive_segment(self._lake, path)
        path.unlink()
        sync_folder(path.parent)
        with self._wake:
            self._sealed.pop(0)
            self._failure, self._failures = None, 0
            self._wake.notify_all()

    def _pause(self) -> float:
        return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._failures - 1)))


def archive_segment(lake: Lake, path: Path) -> None:
    """Commit every table of a sealed log segment to the lake, then its watermark. Safe to repeat.

    Raises :class:`hotpot.errors.CorruptRecordError` where the segment is damaged, and what the lake raises.
    """
    segment = read_segment(path, sealed=True)
    counts: dict[str, int] = {}
    for name in TABLES:
        pieces = [table for frame in segment.frames if (table := frame.table(name)) is not None]
        if pieces:
            rows = pa.concat_tables(pieces).combine_chunks()
            counts[name] = rows.num_rows
            lake.commit(name, segment.number, rows)
    if counts:
        reach("before_watermark")
        lake.publish(segment.number, counts)
        reach("after_watermark")
