"""Whole columns straight from the lake's Parquet files, in the order of recording: no database, no row decoded twice.

Owns which parts of a file are read. Knows no SQL, no log and no ledger: it is handed the files of one snapshot, its
watermark and the log's tail. A lake's files never change, so what is learned of one is kept: its footer, and from one
look at the hidden columns which log segments it holds and whether its rows stand in the order of recording. After
that only the chunks of the wanted columns are read. For files that are out of order or reach above the watermark (a
compaction may shuffle rows) the arrangement of their rows is worked out from the hidden columns once, and kept.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq

from hotpot.errors import StoreError
from hotpot.experience.lake.lake import ROW_COLUMN, SEGMENT_COLUMN
from hotpot.experience.lake.storage import LakeLocation
from hotpot.experience.reading.arrangement import Arrangement

KEPT_FOOTER_BYTES = 16 << 20
"""Footers kept in memory, by their size in the files."""

READERS = 4
"""Files read at once."""

KEPT_ARRANGEMENTS = 16
"""Orders of rows kept, each of one list of files."""

_HIDDEN = pa.schema([(SEGMENT_COLUMN, pa.int64()), (ROW_COLUMN, pa.int64())])

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """What a file holds: (segment, row) of its first and last row, and whether all between are in order."""

    num_rows: int
    first: tuple[int, int]
    last: tuple[int, int]
    in_order: bool


class ColumnReader:
    """Reads columns of the files of one lake. Not to be shared between threads."""

    def __init__(self, location: LakeLocation) -> None:
        self._location = location
        self._filesystem: pa_fs.FileSystem | None = None
        self._footers: OrderedDict[str, pq.FileMetaData] = OrderedDict()
        self._contents: dict[str, _Contents] = {}
        self._arrangements: OrderedDict[tuple[tuple[str, ...], int], Arrangement] = OrderedDict()

    def read(self, paths: Sequence[str], watermark: int, schema: pa.Schema) -> list[pa.Table]:
        """Return the columns of ``schema`` of all rows up to the watermark, in the order of recording, in pieces.

        Files may hold the same values in another representation (a deletion rewrites text as views). Raises :class:`StoreError` where a file can't be read.
        """
        wanted = self._counted(paths, watermark)
        contents = [self._contents[path] for path in wanted]
        ordered = all(one.in_order and one.last[0] <= watermark for one in contents) and all(
            one.last < two.first for one, two in itertools.pairwise(contents)
        )
        if ordered:
            return self._read_all(wanted, schema)
        arrangement = self._arranged(tuple(wanted), watermark)
        return [arrangement.apply(pa.concat_tables(self._read_all(wanted, schema)))]

    def batches(
        self, paths: Sequence[str], watermark: int, schema: pa.Schema, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield the columns of ``schema`` of all rows up to the watermark, at most ``batch_rows`` at once, file by file.

        Each row once; in the order of recording where the files keep it. No more than a row group of the columns is in
        memory. Raises :class:`StoreError` where a file can't be read.
        """
        for path in self._counted(paths, watermark):
            above = self._contents[path].last[0] > watermark
            read = [*schema.names, SEGMENT_COLUMN] if above else schema.names
            try:
                with self._open(path) as file:
                    for batch in file.iter_batches(batch_rows, columns=read, use_threads=False):
                        if above:
                            batch = batch.filter(pc.field(SEGMENT_COLUMN) <= watermark)
                        yield batch.select(schema.names).cast(schema)
            except (OSError, pa.ArrowException) as error:
                raise _unreadable(path, error) from error

    def _arranged(self, paths: tuple[str, ...], watermark: int) -> Arrangement:
        found = self._arrangements.pop((paths, watermark), None)
        if found is None:
            hidden = pa.concat_tables(self._read_all(paths, _HIDDEN))
            segments, rows = (hidden.column(name).to_numpy() for name in _HIDDEN.names)
            found = Arrangement.of(segments, rows, watermark)
        self._arrangements[paths, watermark] = found
        while len(self._arrangements) > KEPT_ARRANGEMENTS:
            self._arrangements.popitem(last=False)
        return found

    def _counted(self, paths: Sequence[str], watermark: int) -> list[str]:
        """Return the files that hold rows up to the watermark, by their first row."""
        self._learn(paths)
        counted = [
            path
            for path in paths
            if self._contents[path].num_rows and self._contents[path].first[0] <= watermark
        ]
        return sorted(counted, key=lambda path: self._contents[path].first)

    def _learn(self, paths: Sequence[str]) -> None:
        new = [path for path in paths if path not in self._contents]
        for path, contents in zip(new, self._map(self._look, new), strict=True):
            self._contents[path] = contents

    def _look(self, path: str) -> _Contents:
        hidden = self._read_one(path, _HIDDEN.names)
        segments, rows = (hidden.column(name).to_numpy() for name in _HIDDEN.names)
        if not len(segments):
            return _Contents(num_rows=0, first=(0, 0), last=(0, 0), in_order=True)
        steps, places = np.diff(segments), np.diff(rows)
        in_order = bool(np.all((steps > 0) | ((steps == 0) & (places > 0))))
        low, high = int(segments.min()), int(segments.max())
        return _Contents(
            num_rows=len(segments),
            first=(low, int(rows[segments == low].min())),
            last=(high, int(rows[segments == high].max())),
            in_order=in_order,
        )

    def _read_all(self, paths: Sequence[str], schema: pa.Schema) -> list[pa.Table]:
        return self._map(lambda path: self._read_one(path, schema.names).cast(schema), paths)

    def _read_one(self, path: str, columns: Sequence[str]) -> pa.Table:
        try:
            with self._open(path) as file:
                return file.read(columns=list(columns), use_threads=False).select(list(columns))
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(path, error) from error

    def _open(self, path: str) -> pq.ParquetFile:
        footer = self._footers.get(path)
        if self._filesystem is None:
            self._filesystem, _ = self._location.filesystem()
        file = pq.ParquetFile(path.removeprefix("s3://"), metadata=footer, filesystem=self._filesystem)
        if footer is None:
            self._footers[path] = file.metadata
        return file

    def _map(self, act: Callable[[str], Found], paths: Sequence[str]) -> list[Found]:
        if len(paths) < 2:
            found = [act(path) for path in paths]
        else:
            with ThreadPoolExecutor(min(READERS, len(paths))) as pool:
                found = list(pool.map(act, paths))
        kept = sum(footer.serialized_size for footer in self._footers.values())
        while kept > KEPT_FOOTER_BYTES:
            kept -= self._footers.popitem(last=False)[1].serialized_size
        return found


def _unreadable(path: str, error: Exception) -> StoreError:
    return StoreError(f"can't read {path} of the lake: {error}; restore it from a copy")
