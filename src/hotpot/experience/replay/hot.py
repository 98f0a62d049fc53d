"""Hot: the good experience of the last rounds, as Arrow in memory, bounded in bytes.

A *round* is what one update learned fresh. *Good* is a positive advantage (a reward above the group's mean) that reaches
the quantile ``hot_min_advantage_quantile`` of its round's positive advantages.

Owns which trajectories stay (:func:`good`, :func:`kept`: pure) and their bytes (:class:`Hot`). Knows no record and no
sampler.

Invariants: what stays depends on the trajectories and the last round alone, not on the path there, so it can be rebuilt
from the record; the oldest round goes first and in a round the least good first; the bytes never exceed the bound.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotpot.experience.replay.block import Block


def good(advantages: NDArray[np.float64], signal: NDArray[np.bool_], quantile: float) -> NDArray[np.bool_]:
    """Return which trajectories of one round are good, bool ``[n]``."""
    positive = signal & (advantages > 0)
    if not positive.any():
        return positive
    least = np.quantile(advantages[positive], quantile, method="lower")
    return positive & (advantages >= least)


def kept(
    updates: NDArray[np.int64],
    advantages: NDArray[np.float64],
    keys: NDArray[np.uint64],
    sizes: NDArray[np.int64],
    *,
    oldest: int,
    max_bytes: int,
) -> NDArray[np.bool_]:
    """Return which good trajectories stay, bool ``[n]``: the newest round first, the best first, while they fit.

    Rounds before ``oldest`` go. The first one that does not fit ends it, so what goes is the end of a fixed order.
    """
    order = np.lexsort((keys, -advantages, -updates))
    order = order[updates[order] >= oldest]
    stays = np.zeros(len(updates), np.bool_)
    stays[order[np.cumsum(sizes[order]) <= max_bytes]] = True
    return stays


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Round:
    """The good of one update: ``places`` in the index, and the bytes, all ``[n]`` in one order."""

    places: NDArray[np.int64]
    advantages: NDArray[np.float64]
    sizes: NDArray[np.int64]
    block: Block

    def pick(self, stays: NDArray[np.bool_]) -> "_Round":
        at = np.flatnonzero(stays)
        return _Round(
            places=self.places[at],
            advantages=self.advantages[at],
            sizes=self.sizes[at],
            block=self.block.take(at),
        )


class Hot:
    """The rounds in memory, by the number of their update."""

    def __init__(self, *, rounds: int, max_bytes: int) -> None:
        self._num_rounds, self._max_bytes = rounds, max_bytes
        self._rounds: dict[int, _Round] = {}
        self._is_full = False

    @property
    def num_bytes(self) -> int:
        """Bytes held: at most ``max_bytes``."""
        return sum(int(entry.sizes.sum()) for entry in self._rounds.values())

    @property
    def places(self) -> NDArray[np.int64]:
        """Lines of the index that are held, int64 ``[n]``."""
        return _joined([entry.places for entry in self._rounds.values()], np.int64)

    def add(
        self,
        update: int,
        places: NDArray[np.int64],
        advantages: NDArray[np.float64],
        block: Block,
        *,
        newest: int | None = None,
    ) -> None:
        """Take the good of ``update`` (arrays in the order of ``block``); let go what is over the bounds.

        ``newest`` is the last update there was, where it is not this one: hot is filled again from the record.
        """
        if len(places):
            self._rounds[update] = _Round(
                places=places, advantages=advantages, sizes=block.sizes(), block=block
            )
        self._trim(update if newest is None else newest)

    def _trim(self, newest: int) -> None:
        numbers = list(self._rounds)
        entries = [self._rounds[number] for number in numbers]
        counts = [len(entry.places) for entry in entries]
        stays = kept(
            np.repeat(np.array(numbers, np.int64), counts),
            _joined([entry.advantages for entry in entries], np.float64),
            _joined([entry.block.keys for entry in entries], np.uint64),
            _joined([entry.sizes for entry in entries], np.int64),
            oldest=newest - self._num_rounds + 1,
            max_bytes=self._max_bytes,
        )
        self._is_full = not stays.all()
        for number, part in zip(
            numbers, np.split(stays, np.cumsum(counts)[:-1]) if counts else [], strict=True
        ):
            if not part.any():
                del self._rounds[number]
            elif not part.all():
                self._rounds[number] = self._rounds[number].pick(part)

    @property
    def is_full(self) -> bool:
        """Whether something was let go because the bytes were over the bound: nothing older can stay."""
        return self._is_full

    def blocks(self) -> list[Block]:
        """Return the rounds' blocks."""
        return [entry.block for entry in self._rounds.values()]

    def discard(self, places: NDArray[np.int64]) -> None:
        """Let go of lines that the record does not hold any more."""
        for number, entry in list(self._rounds.items()):
            stays = ~np.isin(entry.places, places)
            if not stays.any():
                del self._rounds[number]
            elif not stays.all():
                self._rounds[number] = entry.pick(stays)


def _joined(parts: list[NDArray[Any]], kind: Any) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, kind)
