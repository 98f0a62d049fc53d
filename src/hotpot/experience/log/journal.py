"""The journal: log frame and ledger change as one step, which is what acknowledging means.

Owns the active log segment and the thread that writes frames. Knows tables and ledger rows, no gate and no lake.

Frames are written on a thread of their own because an interrupt (Ctrl-C) is raised in the main thread only, between any
two instructions: there it can end the waiting, but never fall between log and ledger. Once a frame is in the log and the
ledger refused it, the journal refuses everything after, since only a recovery can bring the two together again.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa

from hotpot.errors import StoreError
from hotpot.experience.crashpoints import reach
from hotpot.experience.log.ledger import Ledger
from hotpot.experience.log.wal import WalWriter
from hotpot.experience.records.schema import to_table
from hotpot.types import AttemptRow, ConsumptionRow, DiscardRow

_LedgerRows = tuple[Sequence[AttemptRow], Sequence[ConsumptionRow], Sequence[DiscardRow]]
_NONE: _LedgerRows = ((), (), ())

LONGEST_WRITE_S = 300.0
"""Longest wait for a frame: a disk that takes none for so long hangs. Far above what a busy one takes for its slowest sync."""


class Journal:
    """Writes frames, one after the other, and seals log segments. Any thread may call any method.

    ``noted(num_bytes, batches)`` is called after each frame, ``sealed(path)`` after each sealed log segment, both under
    the journal's lock: no frame falls between them. ``span`` opens a named span of the thread that waits for a frame:
    ``log`` until the frame is durable, then ``ledger``.
    """

    def __init__(
        self,
        log_folder: Path,
        number: int,
        ledger: Ledger,
        *,
        noted: Callable[[int, int], None],
        sealed: Callable[[Path], None],
        span: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._folder = log_folder
        self._ledger = ledger
        self._noted = noted
        self._sealed = sealed
        self._span = span
        self._guard = threading.Lock()
        self._broken: str | None = None
        self._log = WalWriter(log_folder, number)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hotpot-log")

    def write(
        self,
        tables: dict[str, pa.Table],
        attempts: Sequence[AttemptRow] = (),
        consumptions: Sequence[ConsumptionRow] = (),
        discards: Sequence[DiscardRow] = (),
        *,
        update: int | None = None,
        batches: int = 0,
    ) -> None:
        """Write one frame of ``tables`` and of the attempts that end with it or ended since the last frame.

        Returns once it is durable and the ledger agrees. Writes nothing where there is nothing. Raises
        :class:`StoreError` where log or ledger fail, or take longer than :data:`LONGEST_WRITE_S`.
        """
        logged = threading.Event()
        rows = (attempts, consumptions, discards)
        written = self._thread.submit(self._write, tables, rows, update, batches, logged)
        written.add_done_callback(lambda _: logged.set())
        with self._span("log"):
            if not logged.wait(LONGEST_WRITE_S):
                raise self._hangs()
        with self._span("ledger"):
            self._result(written)

    def note(self, tables: dict[str, pa.Table]) -> None:
        """Write one frame of ``tables`` for a thread that has no spans. Raises :class:`StoreError` as :meth:`write`."""
        self._result(self._thread.submit(self._write, tables, _NONE, None, 0, threading.Event()))

    def settle(self) -> None:
        """Wait for a frame whose caller was interrupted, so that what is decided next is decided on its outcome."""
        self._result(self._thread.submit(lambda: None))

    def end(self, reason: str) -> None:
        """End every attempt that is still leased as dropped for ``reason``, and log that."""
        self._result(self._thread.submit(self._end, reason))

    def seal(self) -> None:
        """Close the active log segment and begin another, unless it holds no frame.

        Raises :class:`StoreError` where the log broke, so that a frame nobody acknowledged never gets into the lake, and
        where no other file can be made; then the active one stays.
        """
        with self._guard:
            self._check()
            if self._log.frames == 0:
                return
            full, self._log = self._log, WalWriter(self._folder, self._log.number + 1)
            reach("log_segment_made")
            full.close()
            self._sealed(full.path)
            reach("log_segment_sealed")

    def close(self) -> None:
        """Stop the thread and close the file; an active log segment without a frame is deleted.

        Raises :class:`StoreError` where the thread hangs; then both are left to the end of the process.
        """
        last = self._thread.submit(lambda: None)
        self._thread.shutdown(wait=False)
        self._result(last)
        with self._guard:
            self._log.close()
            if self._log.frames == 0:
                self._log.path.unlink(missing_ok=True)

    def _result(self, written: Future[None]) -> None:
        try:
            written.result(LONGEST_WRITE_S)
        except TimeoutError as error:
            if written.done():
                raise  # its own
            raise self._hangs() from error

    def _hangs(self) -> StoreError:
        return StoreError(
            f"the log's thread has not written a frame to {self._log.path} and the ledger for {LONGEST_WRITE_S:.0f} s: "
            "the disk hangs; what was acknowledged is there: mend the disk and resume the run"
        )

    def _write(
        self,
        tables: dict[str, pa.Table],
        rows: _LedgerRows,
        update: int | None,
        batches: int,
        logged: threading.Event,
    ) -> None:
        with self._guard:
            self._check()
            attempts, consumptions, discards = rows
            ended = [*self._ledger.not_logged(), *attempts]
            if ended:
                tables = {**tables, "attempts": to_table("attempts", ended)}
            if not tables:
                return
            before = self._log.position.offset
            position = self._log.append(tables)
            logged.set()
            self._broken = "a frame is in the log that the ledger was not told of"  # until it is
            try:
                self._ledger.apply(position, ended, consumptions, update, discards)
            except StoreError as error:
                self._broken = str(error)
                raise
            self._broken = None
            self._noted(position.offset - before, batches)

    def _end(self, reason: str) -> None:
        self._ledger.drop_leased(reason)
        self._write({}, _NONE, None, 0, threading.Event())

    def _check(self) -> None:
        if self._broken is not None:
            raise StoreError(f"log and ledger disagree ({self._broken}); stop and resume the run to recover")
        if self._log.broken is not None:
            raise StoreError(
                f"log segment {self._log.path} broke earlier ({self._log.broken}); stop and resume the run"
            )
