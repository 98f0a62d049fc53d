"""Blocks of the key/value cache: who reads each, which are kept though nobody does, which are free. Plain Python.

Owns the accounting, and with it the bound on memory: there are ``num_blocks`` and never one more. Knows neither tokens nor
tensors. A pure state machine::

    free ──take──► read ──release, kept──► idle (least recently used first) ──read──► read
      ▲              │ release                 │ taken when nothing is free
      └──────────────┴─────────────────────────┘

Invariants: every block is free, idle, or read by at least one; a block that is read is never taken.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable

BLOCK_TOKENS = 32
"""Tokens in a block. Smaller ones waste less at a context's end; larger ones are fewer products in attention."""


class BlockPool:
    """``num_blocks`` blocks, by number from 0.

    ``forget(block)`` is called when an idle block is taken for something else.
    """

    def __init__(self, num_blocks: int, forget: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self.evictions = 0
        self._forget = forget
        self._returned: list[int] = []
        self._untouched = 0
        self._readers: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_read(self) -> int:
        """Blocks that somebody reads."""
        return len(self._readers)

    @property
    def num_idle(self) -> int:
        """Blocks that are kept and read by nobody."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that can be taken: free or idle."""
        return self.num_blocks - len(self._readers)

    def readers(self, block: int) -> int:
        """Return how many read ``block``."""
        return self._readers.get(block, 0)

    def take(self) -> int | None:
        """Return a block for one reader: the lowest free one, else the idle one that was used least recently, else None.

        The lowest first: blocks that are read stay close together, and attention reads one range of the cache.
        """
        if self._returned:
            block = heapq.heappop(self._returned)
        elif self._untouched < self.num_blocks:
            block = self._untouched
            self._untouched += 1
        elif self._idle:
            block, _ = self._idle.popitem(last=False)
            self.evictions += 1
            self._forget(block)
        else:
            return None
        self._readers[block] = 1
        return block

    def read(self, block: int) -> None:
        """Add a reader to ``block``, which is read or idle."""
        if block in self._idle:
            del self._idle[block]
            self._readers[block] = 1
        else:
            self._readers[block] += 1

    def release(self, block: int, *, keep: bool) -> bool:
        """Take a reader away; without any left the block is idle (``keep``) or free. Return whether none is left."""
        left = self._readers[block] - 1
        if left:
            self._readers[block] = left
            return False
        del self._readers[block]
        if keep:
            self._idle[block] = None
        else:
            heapq.heappush(self._returned, block)
        return True

    def drop_idle(self, blocks: Iterable[int] | None = None) -> None:
        """Make idle ``blocks`` free; by default all of them."""
        for block in list(self._idle if blocks is None else blocks):
            if block in self._idle:
                del self._idle[block]
                heapq.heappush(self._returned, block)
