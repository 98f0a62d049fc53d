"""The race of a reader with an archive that is faster: simulated move by move."""

import pytest

from hotpot.errors import CorruptRecordError, StoreError
from hotpot.experience import to_table
from hotpot.experience.log.wal import WalWriter, segment_path
from hotpot.experience.reading import snapshot as snapshot_module
from hotpot.experience.reading.snapshot import take_snapshot
from hotpot.testing.records import make_row
from hotpot.types import EventRow


class MovingLake:
    """A lake whose watermark moves between two looks; each move deletes the log segments it covers."""

    def __init__(self, folder, looks):
        self.folder = folder
        self.looks = list(looks)
        self.now = 0

    def watermark(self):
        if self.looks:
            self.now = self.looks.pop(0)
            for number in range(1, self.now + 1):
                segment_path(self.folder, number).unlink(missing_ok=True)
        return self.now

    def files(self, table):
        return None


@pytest.fixture
def log(tmp_path):
    folder = tmp_path / "wal"
    folder.mkdir()
    for number in range(1, 5):
        writer = WalWriter(folder, number)
        writer.append({"events": to_table("events", [make_row(EventRow, update=number)])})
        writer.close()
    return folder


def seen(log, lake):
    found = take_snapshot(log.parent, "run", lake, ["events"])
    return found.watermark, found.tables["events"].tail.column("update").to_pylist()


def test_nothing_moves(log):
    assert seen(log, MovingLake(log, [1, 1])) == (1, [2, 3, 4])


def test_the_watermark_moves_while_the_log_is_read(log):
    # First look at 0 reads all four; by the second look 1 and 2 are in the lake: they must not count as tail too.
    assert seen(log, MovingLake(log, [0, 2, 2])) == (2, [3, 4])


def test_it_moves_twice_and_to_the_end(log):
    assert seen(log, MovingLake(log, [0, 1, 3, 4, 4])) == (4, [])


def test_a_segment_that_goes_between_listing_and_reading(log, monkeypatch):
    lake = MovingLake(log, [0])
    real = snapshot_module.segment_numbers
    moves = []

    def listed(folder):
        numbers = real(folder)
        if not moves:
            moves.append(1)
            lake.looks = [2]
            lake.watermark()
        return numbers

    monkeypatch.setattr(snapshot_module, "segment_numbers", listed)
    assert seen(log, lake) == (2, [3, 4])


def test_a_torn_tail_before_an_empty_segment_is_not_there_yet(log):
    with segment_path(log, 4).open("ab") as file:
        file.write(b"HPFR torn")
    WalWriter(log, 5).close()
    segment_path(log, 6).write_bytes(b"")
    assert seen(log, MovingLake(log, [0, 0])) == (0, [1, 2, 3, 4])
    with segment_path(log, 3).open("ab") as file:
        file.write(b"HPFR torn")
    with pytest.raises(CorruptRecordError, match="damaged"):
        seen(log, MovingLake(log, [0, 0]))


def test_one_that_never_rests_is_given_up_on(log, monkeypatch):
    monkeypatch.setattr(snapshot_module, "LOOK_AGAIN_S", -1.0)
    with pytest.raises(StoreError, match="try again"):
        seen(log, MovingLake(log, [0, 1, 2, 3]))
