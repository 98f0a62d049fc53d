"""The local cache of cold: blocks as uncompressed Arrow files, memory-mapped, bounded in bytes, disposable.

Owns one folder. A block is one file under a name its reader chooses: two Arrow streams (steps, rows), then a trailer
with their lengths and a checksum. Knows nothing of what the blocks stand for.

Invariants: a file appears whole or not at all; one of the wrong length or checksum counts as missing and is removed; the
files together never exceed the bound, the one used longest ago goes first; a file taken away from outside (or the whole
folder) is missing from the next look on. Nothing here is the only copy of anything, so a disk that takes no more costs
time and nothing else: it is told by :meth:`BlockCache.take_failures`.
"""

import contextlib
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa

from hotpot.experience.replay.block import Block
from hotpot.experience.replay.flat import FlatBlock

_TRAILER = struct.Struct("<8sQQQ")
_MAGIC = b"hotpot-1"
_ENDING = ".block"


class BlockCache:
    """Blocks by name. ``max_bytes`` bounds the files; a block larger than that is never kept."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._open: dict[str, FlatBlock] = {}
        self._failures: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("*.tmp"):
            left.unlink(missing_ok=True)
        # Oldest use first: a dictionary keeps the order, and a use moves its name to the end.
        self._sizes = {path.stem: path.stat().st_size for path in self._by_age()}
        self._evict(0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        return sum(self._sizes.values())

    def get(self, name: str) -> FlatBlock | None:
        """Return a block, or None where it is missing or damaged. The first look at a file verifies its checksum."""
        path = os.path.join(self._folder, name + _ENDING)  # noqa: PTH118 - a draw asks for hundreds of blocks
        try:
            size = os.stat(path).st_size  # noqa: PTH116 - as above
        except (FileNotFoundError, NotADirectoryError):
            self._forget(name)
            return None
        found = self._open.get(name)
        if found is None:
            found = _read(self._path(name))
            if found is None:
                self._forget(name)
                self._path(name).unlink(missing_ok=True)
                return None
            self._open[name] = found
            os.utime(path)
        self._sizes.pop(name, None)
        self._sizes[name] = size
        return found

    def put(self, name: str, block: Block) -> FlatBlock:
        """Keep a block, and return it as :meth:`get` would. What was used longest ago makes room."""
        flat = FlatBlock.of(block)
        data = _encoded(flat.block)
        if sum(map(len, data)) > self._max_bytes:
            return flat
        self._evict(sum(map(len, data)))
        try:
            self._write(self._path(name), data)
        except OSError as error:
            self._failures.append(f"{self._path(name)}: {error}")
            return flat
        self._sizes[name] = sum(map(len, data))
        self._open.pop(name, None)
        return self.get(name) or flat

    def take_failures(self) -> list[str]:
        """Return why blocks could not be kept since this was asked last."""
        failures, self._failures = self._failures, []
        return failures

    def _write(self, path: Path, data: tuple[Any, ...]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        try:
            with draft.open("wb") as file:
                for part in data:
                    file.write(part)
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_ENDING}"

    def _by_age(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{_ENDING}"), key=lambda path: (path.stat().st_mtime_ns, path.name))

    def _evict(self, wanted: int) -> None:
        for name in list(self._sizes):
            if self.num_bytes + wanted <= self._max_bytes:
                return
            self._path(name).unlink(missing_ok=True)
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._sizes.pop(name, None)
        self._open.pop(name, None)


def _encoded(block: Block) -> tuple[Any, ...]:
    streams = [_stream(_compacted(table)) for table in (block.steps, block.rows)]
    check = 0
    for stream in streams:
        check = zlib.crc32(stream, check)
    return (*streams, _TRAILER.pack(_MAGIC, len(streams[0]), len(streams[1]), check))


def _compacted(table: pa.Table) -> pa.Table:
    """Return the table with texts that repeat (versions, ids of a trajectory's steps) kept once."""
    for place, field in enumerate(table.schema):
        if field.type == pa.string() and table.num_rows:
            encoded: Any = table.column(place).combine_chunks().dictionary_encode()
            if 2 * len(encoded.dictionary) <= table.num_rows:
                table = table.set_column(place, field.name, encoded)
    return table


def _stream(table: pa.Table) -> Any:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _read(path: Path) -> FlatBlock | None:
    with contextlib.suppress(FileNotFoundError), pa.memory_map(str(path)) as file:
        data: Any = file.read_buffer()
        if len(data) < _TRAILER.size:
            return None
        body = memoryview(data)[: len(data) - _TRAILER.size]
        magic, steps, rows, check = _TRAILER.unpack(memoryview(data)[len(body) :])
        if magic != _MAGIC or steps + rows != len(body) or zlib.crc32(body) != check:
            return None
        tables = [
            pa.ipc.open_stream(data.slice(begin, size)).read_all()
            for begin, size in ((0, steps), (steps, rows))
        ]
        return FlatBlock(Block(rows=tables[1], steps=tables[0]))
    return None
