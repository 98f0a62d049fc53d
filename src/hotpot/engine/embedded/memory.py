"""Which blocks of the cache each running request's context lies in. Plain Python and NumPy, no tensors.

Owns the block tables, and the rules by which a context is placed, grows and is let go::

    place ──► what the prefix cache holds is read where it lies, or copied; blocks for the rest
    grow  ──► one more block, or none: somebody must be preempted
    computed, seal ──► blocks that are complete (and the part at the end) can be found by others
    release ──► nobody needs them; what can be found is kept until its block is wanted

Reading a block that others read at the same time saves its memory and, in attention, its way through the processor's cache;
but every such run of blocks is an extra product. Below ``share_from`` blocks a copy is cheaper.

Invariants: a block that more than one context reads is complete and is never written; nothing is found that other weights
computed (:meth:`ContextMemory.restart`); the first ``count[row]`` entries of ``table[row]`` are the row's blocks in order.
"""

from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from hotpot.engine.embedded.blocks import BLOCK_TOKENS, BlockPool
from hotpot.engine.embedded.prefixes import Digest, Found, Node, PrefixIndex

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Placement:
    """A context that has its blocks: ``reused`` tokens need not be computed once ``copies`` (source, target) are made."""

    reused: int
    copies: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """A context that can't be placed now: row ``leader`` computes what it begins with, or (None) there is no room."""

    leader: int | None


def num_blocks_of(num_tokens: int) -> int:
    """Return how many blocks hold ``num_tokens`` tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


class ContextMemory:
    """Block tables of ``num_rows`` running requests over ``num_blocks`` blocks.

    Parameters
    ----------
    max_tokens: longest context.
    share_from: blocks in a row from which on a beginning that others read is read in place.
    root: names all that keys and values depend on besides the tokens.
    remembers: false where nothing can be kept between passes; then nothing is found.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        num_blocks: int,
        max_tokens: int,
        share_from: int,
        root: str,
        remembers: bool = True,
    ) -> None:
        self.table = np.zeros((num_rows, num_blocks_of(max_tokens)), dtype=np.int64)
        self.count = np.zeros(num_rows, dtype=np.int64)
        self.index = PrefixIndex(root)
        self.pool = BlockPool(num_blocks, self.index.forget)
        self._share_from = share_from
        self._remembers = remembers
        # Where each row's complete blocks stand in the prefix cache; None where they may not be found.
        self._nodes: list[list[Node] | None] = [None] * num_rows
        self._leaders: dict[Digest, int] = {}
        self._led: dict[int, list[Digest]] = {}

    def place(self, row: int, tokens: Tokens, *, headroom: int = 0) -> Placement | Wait:
        """Give ``row`` blocks for ``tokens`` int32 ``[n]``, leaving ``headroom`` blocks for others to grow into.

        The last token is always left to compute: its logits are needed.
        """
        found = self.index.find(tokens, len(tokens) - 1) if self._remembers else Found((), None, 0)
        digests = self.index.digests(tokens, found) if self._remembers else []
        if digests and digests[0] in self._leaders:
            return Wait(self._leaders[digests[0]])
        placed = self._place(row, tokens, found, headroom)
        if placed is None and found.part is not None:
            # A part that is kept for nobody else takes a block that may be the last one missing.
            placed = self._place(row, tokens, Found(found.nodes, None, 0), headroom)
        if placed is None:
            return Wait(None)
        if placed.reused < len(tokens) - 1:
            self._lead(row, digests)
        return placed

    def _place(self, row: int, tokens: Tokens, found: Found, headroom: int) -> Placement | None:
        """Give ``row`` blocks for ``tokens``, of which ``found`` is known, or return None where they are not there."""
        needed, in_place = num_blocks_of(len(tokens)), self._in_place(found)
        takes_over = self._takes_over(found)
        pinned = [node.block for node in found.nodes] + ([] if found.part is None else [found.part])
        for block in pinned:
            self.pool.read(block)
        if self.pool.available < needed - sum(in_place) - takes_over + headroom:
            for block in reversed(pinned):
                self.pool.release(block, keep=True)
            return None
        blocks: list[int] = []
        copies: list[tuple[int, int]] = []
        for block, kept in zip(pinned, [*in_place, takes_over], strict=False):
            blocks.append(block if kept else self._take())
            if not kept:
                copies.append((block, blocks[-1]))
                self.pool.release(block, keep=True)
        if takes_over:
            # It will hold more than it is known for.
            self.index.forget(pinned[-1])
        blocks += [self._take() for _ in range(needed - len(blocks))]
        self.table[row, : len(blocks)] = blocks
        # Whoever reads beyond a row's end, to pad it, reads the row's own.
        self.table[row, len(blocks) :] = blocks[-1]
        self.count[row] = len(blocks)
        self._nodes[row] = list(found.nodes) if self._remembers else None
        return Placement(reused=found.num_tokens, copies=tuple(copies))

    def grow(self, row: int) -> bool:
        """Give ``row`` one more block; return whether there was one."""
        block = self.pool.take()
        if block is None:
            return False
        self.table[row, self.count[row] :] = block
        self.count[row] += 1
        return True

    def computed(self, row: int, tokens: Tokens, upto: int) -> None:
        """Say that the first ``upto`` of ``tokens`` (the row's context) are computed: complete blocks can be found."""
        nodes = self._nodes[row]
        while nodes is not None and len(nodes) < upto // BLOCK_TOKENS:
            place = len(nodes)
            piece = tokens[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS]
            node = self.index.add(int(self.table[row, place]), self._last(nodes), piece)
            if node is None:
                self._nodes[row] = nodes = None
            else:
                nodes.append(node)

    def seal(self, row: int, tokens: Tokens, upto: int) -> None:
        """Like :meth:`computed`, and the part of a block at the end can be found too; nobody waits for ``row`` any more."""
        self.computed(row, tokens, upto)
        nodes = self._nodes[row]
        if nodes is not None and upto % BLOCK_TOKENS:
            begin = len(nodes) * BLOCK_TOKENS
            self.index.add(int(self.table[row, len(nodes)]), self._last(nodes), tokens[begin:upto])
        self._lead(row, [])

    def release(self, row: int) -> list[int]:
        """Let go of the row's blocks; what can be found is kept while there is room. Return those that are free now."""
        self._lead(row, [])
        freed = []
        # The end first: of two blocks of one context the later one is of use to fewer.
        for block in self.table[row, : self.count[row]][::-1].tolist():
            kept = block in self.index
            if self.pool.release(block, keep=kept) and not kept:
                freed.append(block)
        self.count[row], self._nodes[row] = 0, None
        return freed

    def discard(self, row: int) -> list[int]:
        """Let go of the row's blocks and let none of them be found again; return those that are free now."""
        for block in self.table[row, : self.count[row]].tolist():
            self.index.forget(block)
        return self.release(row)

    def restart(self, root: str) -> None:
        """Let nothing be found that is there now; what rows read they go on reading, and nobody else will."""
        self.index.restart(root)
        self.pool.drop_idle()
        self._nodes = [None] * len(self._nodes)
        self._leaders.clear()
        self._led.clear()

    def _in_place(self, found: Found) -> list[bool]:
        """Return which of the blocks are read where they lie: those nobody reads, and long runs of those others read."""
        decided: list[bool] = []
        for read, run in groupby(self.pool.readers(node.block) > 0 for node in found.nodes):
            length = len(list(run))
            decided += [not read or length >= self._share_from] * length
        return decided

    def _takes_over(self, found: Found) -> bool:
        """Return whether the part at the end can be continued where it lies: nobody reads it, and all of it is wanted."""
        part = found.part
        if part is None or self.pool.readers(part):
            return False
        return found.part_tokens == self.index.held(part) < BLOCK_TOKENS

    def _take(self) -> int:
        block = self.pool.take()
        assert block is not None
        return block

    def _lead(self, row: int, digests: list[Digest]) -> None:
        for digest in self._led.pop(row, ()):
            # What another row computes too, since neither could know of the other, is that row's to announce.
            if self._leaders.get(digest) == row:
                del self._leaders[digest]
        if digests:
            self._led[row] = digests
            for digest in digests:
                self._leaders.setdefault(digest, row)

    def _last(self, nodes: list[Node]) -> Node:
        return nodes[-1] if nodes else self.index.root
