"""A log whose disk hangs: whoever waits for a frame is told so, instead of waiting for ever."""

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hotpot.errors import StoreError
from hotpot.experience import Ledger, to_table
from hotpot.experience.log import journal as module
from hotpot.experience.log.journal import Journal


def test_a_disk_that_hangs_ends_the_wait_and_a_late_frame_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / "control.sqlite", "run")
    journal = Journal(
        tmp_path, 1, ledger, noted=lambda *_: None, sealed=lambda _: None, span=lambda _: nullcontext()
    )
    goes_on, append = threading.Event(), journal._log.append

    def hangs(tables: dict[str, Any]) -> Any:
        goes_on.wait(30)
        return append(tables)

    monkeypatch.setattr(journal._log, "append", hangs)
    monkeypatch.setattr(module, "LONGEST_WRITE_S", 0.05)
    tables = {"attempts": to_table("attempts", [])}
    for wait in (lambda: journal.write(tables), lambda: journal.note(tables), journal.settle):
        with pytest.raises(StoreError, match="the disk hangs"):
            wait()
    goes_on.set()
    monkeypatch.setattr(module, "LONGEST_WRITE_S", 30.0)
    journal.settle()
    assert journal._log.frames == 2
    journal.close()
    ledger.close(ended=True)
