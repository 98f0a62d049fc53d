import os
from pathlib import Path

import pyarrow as pa
import pytest

from hotpot.errors import CorruptRecordError, StoreError
from hotpot.experience.log import wal
from hotpot.experience.log.wal import (
    HEADER_BYTES,
    WalWriter,
    last_written,
    read_segment,
    segment_numbers,
    segment_path,
    truncate_segment,
)


def tables(number):
    return {
        "a": pa.table(
            {"n": pa.array([number, number + 1]), "l": pa.array([[1, 2], []], pa.list_(pa.int32()))}
        ),
        "b": pa.table({"text": pa.array([f"frame {number}"])}),
    }


@pytest.fixture
def log(tmp_path):
    writer = WalWriter(tmp_path, 1)
    ends = [writer.append(tables(number)) for number in range(3)]
    writer.close()
    return segment_path(tmp_path, 1), ends


def test_frames_come_back_with_all_their_tables(log):
    path, ends = log
    segment = read_segment(path, sealed=True)
    assert [frame.end for frame in segment.frames] == ends
    assert segment.torn_bytes == 0
    for number, frame in enumerate(segment.frames):
        assert set(frame.streams) == {"a", "b"}
        for name, table in tables(number).items():
            assert frame.table(name).equals(table)
        assert frame.table("c") is None
    assert path.stat().st_size == ends[-1].offset


def test_readers_see_whole_frames_while_the_writer_appends(tmp_path):
    writer = WalWriter(tmp_path, 4)
    path = segment_path(tmp_path, 4)
    assert read_segment(path, sealed=False).frames == ()
    for number in range(3):
        writer.append(tables(number))
        assert len(read_segment(path, sealed=False).frames) == number + 1
    writer.close()


def test_any_torn_tail_is_cut_and_nothing_else(log):
    path, ends = log
    whole = path.read_bytes()
    for size in {
        *range(0, len(whole), 97),
        *(e.offset for e in ends),
        *(e.offset - 1 for e in ends),
        len(whole) - 1,
    }:
        path.write_bytes(whole[:size])
        kept = [end for end in ends if end.offset <= size]
        segment = read_segment(path, sealed=False)
        assert [frame.end for frame in segment.frames] == kept
        assert segment.torn_bytes == size - segment.end_bytes
        if segment.torn_bytes:
            with pytest.raises(CorruptRecordError):
                read_segment(path, sealed=True)
            truncate_segment(path, segment.end_bytes)
            if segment.end_bytes:
                assert read_segment(path, sealed=True).torn_bytes == 0


def test_a_tail_full_of_zeros_is_torn(log):
    path, _ends = log
    with path.open("ab") as file:
        file.write(bytes(500))
    assert read_segment(path, sealed=False).torn_bytes == 500


def test_damage_before_whole_frames_is_an_error_never_skipped(log):
    path, ends = log
    whole = path.read_bytes()
    for place in (
        HEADER_BYTES,
        HEADER_BYTES + 5,
        HEADER_BYTES + 10,
        HEADER_BYTES + 40,
        ends[0].offset - 9,
        ends[0].offset + 3,
    ):
        broken = bytearray(whole)
        broken[place] ^= 0xFF
        path.write_bytes(broken)
        with pytest.raises(CorruptRecordError, match="damaged"):
            read_segment(path, sealed=False)


def test_damage_to_what_was_acknowledged_is_an_error_even_in_the_last_frame(log):
    path, ends = log
    whole = bytearray(path.read_bytes())
    whole[ends[1].offset + 60] ^= 0xFF
    path.write_bytes(whole)
    assert len(read_segment(path, sealed=False).frames) == 2
    with pytest.raises(CorruptRecordError, match="acknowledged"):
        read_segment(path, sealed=False, acknowledged_bytes=ends[2].offset)


def test_a_foreign_header_is_refused(log):
    path, _ = log
    whole = path.read_bytes()
    path.write_bytes(b"NOTOURS!" + whole[8:])
    with pytest.raises(CorruptRecordError, match="does not begin"):
        read_segment(path, sealed=False)
    path.write_bytes(whole[:16] + (99).to_bytes(4, "little") + whole[20:])
    with pytest.raises(CorruptRecordError, match="schema version 99"):
        read_segment(path, sealed=False)
    moved = path.with_name("00000009.wal")
    moved.write_bytes(whole)
    with pytest.raises(CorruptRecordError, match="segment 9"):
        read_segment(moved, sealed=True)


def test_a_failed_write_leaves_nothing_and_the_next_one_works(tmp_path, monkeypatch):
    writer = WalWriter(tmp_path, 1)
    writer.append(tables(0))
    real = os.pwritev

    def half_then_full(descriptor, pieces, offset):
        os.pwrite(descriptor, b"".join(bytes(p) for p in pieces)[:50], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wal.os, "pwritev", half_then_full)
    with pytest.raises(StoreError, match="No space"):
        writer.append(tables(1))
    monkeypatch.setattr(wal.os, "pwritev", real)
    writer.append(tables(2))
    writer.close()
    segment = read_segment(segment_path(tmp_path, 1), sealed=True)
    assert [frame.table("b").column("text").to_pylist() for frame in segment.frames] == [
        ["frame 0"],
        ["frame 2"],
    ]


def test_a_short_write_is_completed(tmp_path, monkeypatch):
    writer = WalWriter(tmp_path, 1)
    monkeypatch.setattr(
        wal.os, "pwritev", lambda d, pieces, offset: os.pwrite(d, bytes(pieces[0])[:10], offset)
    )
    writer.append(tables(0))
    writer.close()
    assert len(read_segment(segment_path(tmp_path, 1), sealed=True).frames) == 1


def test_after_a_failed_sync_everything_is_refused(tmp_path, monkeypatch):
    writer = WalWriter(tmp_path, 1)

    def failing(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(wal.os, "fdatasync", failing)
    with pytest.raises(StoreError, match="durable"):
        writer.append(tables(0))
    monkeypatch.undo()
    with pytest.raises(StoreError, match="broke earlier"):
        writer.append(tables(1))
    writer.close()


@pytest.mark.parametrize("call", ["pwritev", "fsync"])
def test_a_segment_that_cannot_be_begun_leaves_nothing_in_the_way(tmp_path, monkeypatch, call):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wal.os, call, full)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(StoreError, match="No space"):
        WalWriter(tmp_path, 2)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    monkeypatch.undo()
    assert segment_numbers(tmp_path) == []
    WalWriter(tmp_path, 2).close()


def test_the_last_written_segment_is_the_one_with_frames(tmp_path):
    assert last_written(tmp_path, []) == -1
    for number in (1, 2, 3):
        writer = WalWriter(tmp_path, number)
        if number < 3:
            writer.append(tables(number))
        writer.close()
    segment_path(tmp_path, 4).write_bytes(b"HOT")
    assert last_written(tmp_path, [1, 2, 3, 4]) == 2
    assert last_written(tmp_path, [3, 4]) == -1


def test_segments_are_listed_by_number_and_never_overwritten(tmp_path):
    assert segment_numbers(tmp_path / "missing") == []
    for number in (11, 2):
        WalWriter(tmp_path, number).close()
    (tmp_path / "note.txt").write_text("x")
    assert segment_numbers(tmp_path) == [2, 11]
    with pytest.raises(StoreError, match="exists"):
        WalWriter(tmp_path, 2)
