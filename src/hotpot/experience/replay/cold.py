"""Cold: any trajectory of the record, fast.

Owns the way to a trajectory: the cache's block of its log segment, filled from the lake on first use; or, for what is not
in the lake yet, the log's tail. Knows no sampler. Why a cache: 256 random trajectories touch every row group of a lake, so
reading them from Parquet costs a hundred times as much as from mapped files (figures in ``docs/replay.md``).

Invariants: what comes back is what was recorded, bit for bit; a trajectory the record does not hold comes back as None.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hotpot.experience.reading.reader import RunReader
from hotpot.experience.replay.cache import BlockCache
from hotpot.experience.replay.flat import FlatBatch, FlatBlock, Part, flatten
from hotpot.experience.replay.index import UNKNOWN_SEGMENT, Index
from hotpot.experience.replay.record import read_block, read_blocks, read_places
from hotpot.types import SCHEMA_VERSION, Trajectory

READ_TOKENS = 8_000_000
"""About the most tokens that are read from the lake at once (some 200 MB); a single log segment may have more."""


class Cold:
    """The record as a place to take lines of ``index`` from."""

    def __init__(self, reader: RunReader, index: Index, cache: BlockCache, *, watermark: int) -> None:
        """Take an index that knows the log segments up to ``watermark``."""
        self._reader, self._index, self._cache = reader, index, cache
        self._floor = watermark

    def trajectories(self, lines: NDArray[np.int64]) -> list[Trajectory | None]:
        """Return the trajectories of ``lines``, in their order; None where the record has one no more."""
        found: list[Trajectory | None] = [None] * len(lines)
        for block, places, at in self._parts(lines):
            for place, trajectory in zip(at.tolist(), block.trajectories(places), strict=True):
                found[place] = trajectory
        return found

    def sample_arrays(self, lines: NDArray[np.int64]) -> tuple[FlatBatch, NDArray[np.int64]]:
        """Return the flat batch of ``lines`` in their order, and those the record has no more, which it leaves out."""
        parts = list(self._parts(lines))
        there = np.zeros(len(lines), np.bool_)
        for _, _, at in parts:
            there[at] = True
        ranks, kept = np.cumsum(there) - 1, lines[there]
        batch = flatten(
            [(block, places, ranks[at]) for block, places, at in parts],
            ids=self._index.ids[kept].tolist(),
            groups=self._index.group_names(kept),
            rewards=self._index.rewards[kept],
        )
        return batch, lines[~there]

    def take_failures(self) -> list[str]:
        """Return why the cache could not keep what it was given, since this was asked last."""
        return self._cache.take_failures()

    def _parts(self, lines: NDArray[np.int64]) -> Iterator[Part]:
        """Yield, block by block, the places in it and the places in ``lines``."""
        if not len(lines):
            return
        segments = self._index.segments
        watermark = self._locate() if (segments[lines] == UNKNOWN_SEGMENT).any() else 0
        wanted = self._index.keys[lines]
        order = np.argsort(segments[lines], kind="stable")
        distinct, firsts = np.unique(segments[lines][order], return_index=True)
        where = dict(zip(distinct.tolist(), np.split(order, firsts[1:]), strict=True))
        for segment, columns in self._blocks(distinct):
            at = where[segment]
            places = columns.block.places_of(wanted[at])
            if (places >= 0).any():
                yield columns, places[places >= 0], at[places >= 0]
        rest = np.flatnonzero(segments[lines] == UNKNOWN_SEGMENT)
        if len(rest):
            block = read_block(self._reader, self._index.ids[lines[rest]].tolist(), above=watermark)
            places = block.places_of(wanted[rest])
            if (places >= 0).any():
                yield FlatBlock.of(block), places[places >= 0], rest[places >= 0]

    def _locate(self) -> int:
        """Ask the record where the lines lie by now that were not in the lake yet; return the watermark it answered for.

        What is UNKNOWN afterwards lies above that watermark, or is gone. A line may lie below a watermark that was seen
        before it was added: trajectories are recorded, and may be archived, before an update learns them. So the floor
        only spares reading: it is where the search begins, and what is not above it is looked for everywhere.
        """
        index = self._index
        unknown = np.flatnonzero(index.present & (index.segments == UNKNOWN_SEGMENT))
        names = index.ids[unknown].tolist()
        watermark, found = read_places(self._reader, names, above=self._floor)
        missing = [name for name in names if name not in found]
        if missing:
            found |= read_places(self._reader, missing, above=0)[1]
        places = np.array([found.get(name, UNKNOWN_SEGMENT) for name in names], np.int64)
        known = (places != UNKNOWN_SEGMENT) & (places <= watermark)
        index.segments[unknown[known]] = places[known]
        if known.any():
            # What is learned next was recorded at about the time of this, so the search for it may begin here.
            self._floor = int(places[known].min()) - 1
        return watermark

    def _blocks(self, segments: NDArray[np.int64]) -> Iterator[tuple[int, FlatBlock]]:
        missing = []
        for segment in segments[segments != UNKNOWN_SEGMENT].tolist():
            found = self._cache.get(self._name(segment))
            if found is None:
                missing.append(segment)
            else:
                yield segment, found
        for few in self._reads(missing):
            for segment, block in read_blocks(self._reader, few).items():
                yield segment, self._cache.put(self._name(segment), block)

    def _reads(self, segments: Sequence[int]) -> Iterator[list[int]]:
        """Yield ``segments`` in lots of about :data:`READ_TOKENS`."""
        lot: list[int] = []
        tokens = 0
        for segment in segments:
            size = int(self._index.num_tokens[self._index.segments == segment].sum())
            if lot and tokens + size > READ_TOKENS:
                yield lot
                lot, tokens = [], 0
            lot.append(segment)
            tokens += size
        if lot:
            yield lot

    def _name(self, segment: int) -> str:
        return f"v{SCHEMA_VERSION}-{self._reader.manifest.run_id}-{segment}"
