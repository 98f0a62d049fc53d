"""Verification: whether a run's lake, log and ledger are whole and agree. Changes nothing, and may go on beside a writer.

Owns the order: the ledger is read first, then the record at one moment, then the files; a check that needs what is
damaged is named as skipped, never passed over.
"""

import sqlite3
from collections.abc import Iterator

from hotpot.errors import HotpotError
from hotpot.experience.log.wal import segment_numbers
from hotpot.experience.maintenance.deletions import Deletion, read_deletions, rows_gone
from hotpot.experience.maintenance.file_checks import LakeFacts, check_files, check_segments
from hotpot.experience.maintenance.findings import Counts, Finding, Verification
from hotpot.experience.maintenance.ledger_checks import LedgerFacts, check_ledger, read_ledger
from hotpot.experience.maintenance.record_checks import check_records
from hotpot.experience.reading.reader import RunReader


def verify(reader: RunReader, *, deep: bool = False) -> Verification:
    """Return what is wrong with a run's record. ``deep`` decodes every page and recomputes what the tokens give.

    Raises nothing for damage: that is what it finds.
    """
    check = _Check(reader, deep=deep)
    findings = tuple(check.run())
    return Verification(findings=findings, skipped=tuple(check.skipped), counts=check.counts)


class _Check:
    """One verification, as it goes along."""

    def __init__(self, reader: RunReader, *, deep: bool) -> None:
        self._reader = reader
        self._deep = deep
        self._facts = LakeFacts()
        self._watermark = 0
        self.counts = Counts()
        self.skipped: list[tuple[str, str]] = []

    def run(self) -> Iterator[Finding]:
        ledger, unreadable = self._ledger()
        yield from unreadable
        try:
            self._watermark = self._reader.lake.watermark()
        except HotpotError as error:
            yield Finding(check="table_unreadable", table="segments", detail=str(error))
            self.skipped.append(("everything else", "the watermark can't be read"))
            return
        yield from check_files(self._reader.lake, self.counts, self._facts, deep=self._deep)
        yield from self._log_gaps()
        try:
            moment = self._reader.at_once()
        except HotpotError as error:
            yield Finding(check="log_unreadable", table="", detail=str(error))
            self.skipped.append(("records", "the log can't be read"))
            return
        deletions = self._deletions(moment)
        self.counts.deletions = len(deletions)
        yield from self._segments(deletions)
        yield from self._records(moment, deletions)
        if ledger is not None:
            yield from self._agreement(moment, ledger)

    def _ledger(self) -> tuple[LedgerFacts | None, list[Finding]]:
        folder = self._reader.run_folder
        if folder is None:
            return None, []
        try:
            return read_ledger(folder), []
        except sqlite3.Error as error:
            detail = f"{folder / 'control.sqlite'}: {error}; restore it from a copy"
            return None, [Finding(check="ledger_unreadable", table="", detail=detail)]

    def _log_gaps(self) -> Iterator[Finding]:
        folder = self._reader.run_folder
        waiting = [] if folder is None else segment_numbers(folder / "wal")
        self.counts.log_segments = len(waiting)
        # The watermark is read after the files: one that went meanwhile is below it.
        watermark = self._reader.lake.watermark()
        for number in sorted(set(range(watermark + 1, max(waiting, default=0))) - set(waiting)):
            detail = f"log segment {number} is neither in the log nor in the lake; restore it from a copy"
            yield Finding(check="log_gap", table="", detail=detail)

    def _deletions(self, moment: RunReader) -> list[Deletion]:
        if "events" in self._facts.damaged:
            self.skipped.append(("deletions", "they are in table events, which is damaged"))
            return []
        return read_deletions(moment)

    def _segments(self, deletions: list[Deletion]) -> Iterator[Finding]:
        if "segments" in self._facts.damaged:
            self.skipped.append(("segment_rows", "it needs table segments"))
            return
        yield from check_segments(
            self._reader.lake, self._watermark, self.counts, self._facts, rows_gone(deletions)
        )

    def _records(self, moment: RunReader, deletions: list[Deletion]) -> Iterator[Finding]:
        deleted = [deletion.trajectory_id for deletion in deletions]
        for found in check_records(moment, deleted, self._facts.damaged, deep=self._deep):
            if isinstance(found, Finding):
                yield found
            else:
                self.skipped.append(found)

    def _agreement(self, moment: RunReader, ledger: LedgerFacts) -> Iterator[Finding]:
        if self._facts.damaged & {"attempts", "consumptions", "discards"}:
            self.skipped.append(("ledger", "it needs attempts, consumptions and discards"))
            return
        yield from check_ledger(moment, ledger)
