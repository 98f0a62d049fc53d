"""The write-ahead log: append-only files of checksummed frames, each frame one atomic unit.

A file is a log segment: ``wal/00000007.wal`` is a header of 32 bytes, then frames. A frame is a header of 32 bytes (magic, CRC-32 of
header and payload, payload length, number of the frame) and a payload: the Arrow IPC streams of one or several tables.
Everything is little-endian and aligned to 8 bytes, so that Arrow reads it where it lies.

Owns the bytes. Knows no record class and no ledger. What an older release wrote is read with the columns of this one
(:mod:`hotpot.experience.records.upgrades`). Invariants:

- :meth:`WalWriter.append` returns only after the frame is on the device (fdatasync). A frame whose write failed is cut
  off again; after a failed fdatasync the writer refuses everything, since what is on the device is unknown.
- A frame is either whole or the torn last one of its file. A broken frame with anything after it is damage, and an
  error, never skipped.
- Any number of readers may read while one writer appends.
"""

import contextlib
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from hotpot.errors import CorruptRecordError, StoreError
from hotpot.experience.crashpoints import reach
from hotpot.experience.disk import sync_folder
from hotpot.experience.records.upgrades import is_known, upgrade_table
from hotpot.types import SCHEMA_VERSION

_SEGMENT_MAGIC = b"HOTPOTW1"
_FRAME_MAGIC = b"HPFR"
_SEGMENT_HEADER = struct.Struct("<8sQI12x")
_FRAME_HEADER = struct.Struct("<4sIIQQ4x")
_ENTRY = struct.Struct("<HQ")
_NAME = re.compile(r"(\d{8})\.wal")

HEADER_BYTES = _SEGMENT_HEADER.size
"""Bytes of a log segment before its first frame."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Position:
    """A place in the log: the log segment, and the offset in bytes behind a frame's end. Ordered as the log is."""

    segment: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """One whole frame: where it ends, the schema version it was written under, and its tables as IPC streams, decoded
    on demand."""

    end: Position
    version: int
    streams: Mapping[str, pa.Buffer] = field(repr=False)

    def table(self, name: str) -> pa.Table | None:
        """Return table ``name`` of the frame in this release's columns, or None where the frame has none.

        Without a copy, but for the columns that an older frame lacks.
        """
        buffer = self.streams.get(name)
        if buffer is None:
            return None
        with pa.ipc.open_stream(buffer) as reader:
            return upgrade_table(name, reader.read_all(), self.version)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogSegment:
    """What a log segment holds: its whole frames in order, the offset behind the last one, and the torn bytes after."""

    number: int
    frames: tuple[Frame, ...]
    end_bytes: int
    torn_bytes: int


def segment_path(folder: Path, number: int) -> Path:
    """Return the path of log segment ``number`` under the log's folder."""
    return folder / f"{number:08d}.wal"


def segment_numbers(folder: Path) -> list[int]:
    """Return the numbers of the log segments in the folder, ascending; none where the folder is missing."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def last_written(folder: Path, numbers: Sequence[int]) -> int:
    """Return which of the log segments ``numbers`` (ascending) was written last: the only one that may have a torn tail.

    Files behind it that hold no more than a header do not count: a writer makes the next file before it leaves this
    one, and goes on here where that fails. -1 where none was written. Raises FileNotFoundError where one is gone.
    """
    for number in reversed(numbers):
        if segment_path(folder, number).stat().st_size > HEADER_BYTES:
            return number
    return -1


class WalWriter:
    """Appends frames to one log segment. Not safe for several threads; the store holds its lock around it.

    Raises :class:`StoreError` where the file exists or can't be written.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self.path = segment_path(folder, number)
        self._end = 0
        self.frames = 0
        self._broken: str | None = None
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            self._begin(folder)
        except OSError as error:
            raise StoreError(
                f"can't create log segment {self.path}: {error}; check space and rights"
            ) from error

    def _begin(self, folder: Path) -> None:
        try:
            self._write([_SEGMENT_HEADER.pack(_SEGMENT_MAGIC, self.number, SCHEMA_VERSION)])
            os.fsync(self._file)
            sync_folder(folder)
        except OSError:
            # What is half made would be in the way of the next attempt.
            os.close(self._file)
            with contextlib.suppress(OSError):
                self.path.unlink()
            raise

    @property
    def position(self) -> Position:
        """The end of what was appended."""
        return Position(segment=self.number, offset=self._end)

    @property
    def broken(self) -> str | None:
        """Why nothing can be appended any more; None while all is well."""
        return self._broken

    def append(self, tables: Mapping[str, pa.Table]) -> Position:
        """Append one frame with all ``tables``, wait until it is on the device, and return its end.

        Raises :class:`StoreError` where it can't be kept; then nothing of it is in the log.
        """
        if self._broken is not None:
            raise StoreError(
                f"log segment {self.path} broke earlier ({self._broken}); stop and resume the run"
            )
        start, pieces = self._end, _encode(tables, self.frames)
        self._broken = "a frame was left half-written"  # stands where anything unforeseen is raised below
        try:
            reach("log_write")
            self._write(pieces)
            reach("wal_written")
        except OSError as error:
            self._cut(start, error)
            raise StoreError(
                f"can't append to log segment {self.path}: {error}; check space and rights"
            ) from error
        try:
            reach("log_sync")
            os.fdatasync(self._file)
        except OSError as error:
            self._broken = f"fdatasync failed: {error}"
            raise StoreError(
                f"log segment {self.path} could not be made durable: {error}; stop, check the disk, resume"
            ) from error
        self._broken = None
        self.frames += 1
        return self.position

    def close(self) -> None:
        """Close the file; what was appended stays."""
        os.close(self._file)
        self._broken = "closed"

    def _write(self, pieces: list[Any]) -> None:
        total = sum(len(memoryview(piece).cast("B")) for piece in pieces)
        written = os.pwritev(self._file, pieces, self._end)
        if written != total:
            # A short write is how a full disk announces itself; the rest goes in one piece or raises.
            rest = memoryview(b"".join(pieces))[written:]
            while rest:
                count = os.pwrite(self._file, rest, self._end + written)
                written += count
                rest = rest[count:]
        self._end += total

    def _cut(self, start: int, cause: OSError) -> None:
        self._end = start
        try:
            os.ftruncate(self._file, start)
        except OSError:
            self._broken = f"a failed write could not be cut off: {cause}"
        else:
            self._broken = None


def read_segment(path: Path, *, sealed: bool, acknowledged_bytes: int = 0) -> LogSegment:
    """Return the frames of a log segment.

    ``sealed``: nothing may be torn (the file is not the last one, or was closed). ``acknowledged_bytes``: what is known
    to have been durable; a broken frame before it is damage too. Raises :class:`CorruptRecordError` on damage, naming
    file and offset, and FileNotFoundError where the archive has taken the log segment in the meantime.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        # Read, not mapped: a writer may cut a torn tail meanwhile, and touching a cut page kills the process.
        data = pa.py_buffer(file.read(size))
    size = data.size
    number = int(path.stem)
    if size < HEADER_BYTES:
        _must_be_torn(path, 0, size, sealed=sealed, acknowledged_bytes=acknowledged_bytes)
        return LogSegment(number=number, frames=(), end_bytes=0, torn_bytes=size)
    magic, written_number, version = _SEGMENT_HEADER.unpack(data.slice(0, HEADER_BYTES))
    if magic != _SEGMENT_MAGIC or written_number != number:
        raise CorruptRecordError(f"{path} does not begin like log segment {number}; restore it from a copy")
    if not is_known(version):
        raise CorruptRecordError(
            f"{path} was written with schema version {version}, this release reads {SCHEMA_VERSION} and those before it; "
            "use the release that wrote it, or a newer one"
        )
    frames = tuple(_frames(data, number, version))
    end = frames[-1].end.offset if frames else HEADER_BYTES
    if end < size:
        _must_be_torn(path, end, size, sealed=sealed, acknowledged_bytes=acknowledged_bytes)
        _must_be_last(path, data, end, size)
    return LogSegment(number=number, frames=frames, end_bytes=end, torn_bytes=size - end)


def truncate_segment(path: Path, end_bytes: int) -> None:
    """Cut the torn tail off a log segment, durably."""
    with path.open("r+b") as file:
        file.truncate(end_bytes)
        os.fsync(file.fileno())


def _encode(tables: Mapping[str, pa.Table], number: int) -> list[Any]:
    directory = b""
    bodies: list[pa.Buffer | bytes] = []
    for name, table in tables.items():
        sink = pa.BufferOutputStream()
        # The columns' meanings stay with the release and the lake; in the log they would be half of a small frame.
        plain = table.replace_schema_metadata(None)
        bare = pa.schema([item.remove_metadata() for item in plain.schema])
        with pa.ipc.new_stream(sink, bare) as writer:
            writer.write_table(plain.cast(bare) if plain.schema != bare else plain)
        body = sink.getvalue()
        directory += _ENTRY.pack(len(name), body.size) + name.encode()
        bodies += [body, bytes(-body.size % 8)]
    head = struct.pack("<I", len(tables)) + directory
    head += bytes(-len(head) % 8)
    payload: list[Any] = [head, *bodies]
    length = sum(len(piece) for piece in payload)
    checksum = 0
    for piece in payload:
        checksum = zlib.crc32(piece, checksum)
    header_checksum = zlib.crc32(struct.pack("<IQQ", checksum, length, number))
    return [_FRAME_HEADER.pack(_FRAME_MAGIC, header_checksum, checksum, length, number), *payload]


def _frames(data: pa.Buffer, segment: int, version: int) -> Iterator[Frame]:
    offset, number = HEADER_BYTES, 0
    while (payload := _payload_at(data, offset)) is not None and payload[1] == number:
        offset += _FRAME_HEADER.size + payload[0].size
        end = Position(segment=segment, offset=offset)
        yield Frame(end=end, version=version, streams=_streams(payload[0]))
        number += 1


def _payload_at(data: pa.Buffer, offset: int) -> tuple[pa.Buffer, int] | None:
    """Return the payload and number of the whole frame at ``offset``, or None where there is none."""
    begin = offset + _FRAME_HEADER.size
    if begin > data.size:
        return None
    header = data.slice(offset, _FRAME_HEADER.size)
    magic, header_checksum, checksum, length, number = _FRAME_HEADER.unpack(header)
    if magic != _FRAME_MAGIC or header_checksum != zlib.crc32(struct.pack("<IQQ", checksum, length, number)):
        return None
    if begin + length > data.size:
        return None
    payload = data.slice(begin, length)
    return (payload, number) if zlib.crc32(payload) == checksum else None


def _streams(payload: pa.Buffer) -> dict[str, pa.Buffer]:
    view = memoryview(payload)
    (count,) = struct.unpack_from("<I", view, 0)
    cursor, entries = 4, []
    for _ in range(count):
        name_bytes, size = _ENTRY.unpack_from(view, cursor)
        cursor += _ENTRY.size
        entries.append((bytes(view[cursor : cursor + name_bytes]).decode(), size))
        cursor += name_bytes
    cursor += -cursor % 8
    streams = {}
    for name, size in entries:
        streams[name] = payload.slice(cursor, size)
        cursor += size + (-size % 8)
    return streams


def _must_be_torn(path: Path, end: int, size: int, *, sealed: bool, acknowledged_bytes: int) -> None:
    if sealed or acknowledged_bytes > end:
        raise CorruptRecordError(
            f"{path} is damaged at byte {end} of {size}: acknowledged records can't be read; "
            "restore the file from a copy, or move it away to give up what it holds"
        )


def _must_be_last(path: Path, data: pa.Buffer, end: int, size: int) -> None:
    # One frame is written at a time, so a torn tail is all of one frame: a whole frame after it means damage before.
    raw = data.slice(end).to_pybytes()
    place = raw.find(_FRAME_MAGIC, 1)
    while place != -1:
        if _payload_at(data, end + place) is not None:
            raise CorruptRecordError(
                f"{path} is damaged at byte {end} of {size}, with whole frames after it; restore it from a copy"
            )
        place = raw.find(_FRAME_MAGIC, place + 1)
