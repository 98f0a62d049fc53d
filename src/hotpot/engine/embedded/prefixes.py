"""The prefix cache: which block holds the keys and values of which tokens after which tokens.

Owns the index. A block is found by a hash chained over *all* tokens up to its end, from a root that names the weights and
whatever else changes keys and values; a hash is a hint only, the tokens decide: a block counts only if its own tokens are
equal and it continues the very block that was found before it. Knows no tensors and no requests.

A context ends inside a block more often than not. Such a part of a block is found too, as far as it agrees: of all that
follows one block, in the order of its bytes, what agrees longest stands next to where the wanted tokens would stand.

Invariants: after :meth:`PrefixIndex.restart` nothing that was there before is found; a block stands for one piece of
context, and a piece of context is held by at most one block.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from hotpot.engine.embedded.blocks import BLOCK_TOKENS

Tokens = NDArray[np.int32]
Digest = bytes

_TOKEN_BYTES = 4


def chain(parent: Digest, piece: bytes) -> Digest:
    """Return the hash of a context: its last piece (the bytes of int32 tokens) chained to what stands before it."""
    return blake2b(piece, key=parent, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Node:
    """A place in the cache: the chained hash up to it, and the block that ends there (-1: the beginning)."""

    digest: Digest
    block: int


@dataclass(frozen=True, slots=True)
class _Entry:
    parent: Node
    digest: Digest
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Found:
    """What the cache holds of a context: whole blocks from its beginning, and ``part_tokens`` of block ``part``."""

    nodes: tuple[Node, ...]
    part: int | None
    part_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens that are held."""
        return len(self.nodes) * BLOCK_TOKENS + self.part_tokens


class PrefixIndex:
    """Blocks by the context they hold. ``hasher`` chains the hashes; only tests give another."""

    def __init__(self, root: str, hasher: Callable[[Digest, bytes], Digest] = chain) -> None:
        self._chain = hasher
        self._entries: dict[int, _Entry] = {}
        self._blocks: dict[Digest, int] = {}
        # By the block before: sorted tokens, each with its block.
        self._children: dict[int, list[tuple[bytes, int]]] = {}
        self.root = Node(b"", -1)
        self.restart(root)

    def restart(self, root: str) -> None:
        """Forget everything; ``root`` names all that keys and values depend on besides the tokens."""
        self._entries.clear()
        self._blocks.clear()
        self._children.clear()
        self.root = Node(chain(b"", root.encode()), -1)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def digests(self, tokens: Tokens, found: Found) -> list[Digest]:
        """Return the chained hash after each block of ``tokens`` int32 ``[n]`` that is not among those ``found``, the last one
        complete or not.
        """
        hashes, digest = [], found.nodes[-1].digest if found.nodes else self.root.digest
        for start in range(len(found.nodes) * BLOCK_TOKENS, len(tokens), BLOCK_TOKENS):
            digest = self._chain(digest, tokens[start : start + BLOCK_TOKENS].tobytes())
            hashes.append(digest)
        return hashes

    def find(self, tokens: Tokens, most: int) -> Found:
        """Return what is held of the first ``most`` of ``tokens`` int32 ``[n]``."""
        nodes: list[Node] = []
        last = self.root
        for start in range(0, most - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            piece = tokens[start : start + BLOCK_TOKENS].tobytes()
            digest = self._chain(last.digest, piece)
            block = self._blocks.get(digest)
            if block is None:
                break
            entry = self._entries[block]
            if entry.tokens != piece or entry.parent != last:
                break
            last = Node(digest, block)
            nodes.append(last)
        start = len(nodes) * BLOCK_TOKENS
        part, count = self._part(last.block, tokens[start : min(most, start + BLOCK_TOKENS)])
        return Found(nodes=tuple(nodes), part=part, part_tokens=count)

    def add(self, block: int, parent: Node, tokens: Tokens) -> Node | None:
        """Say that ``block`` holds ``tokens`` int32 ``[1 to 32]`` after ``parent``, and return where they stand now.

        That is another block where one holds the same already. None where ``parent`` is held no more: then nobody could
        find what follows it.
        """
        self.forget(block)
        if parent != self.root and not self._holds(parent):
            return None
        piece = tokens.tobytes()
        digest = self._chain(parent.digest, piece)
        other = self._blocks.get(digest)
        if other is not None:
            entry = self._entries[other]
            if entry.parent == parent and entry.tokens == piece:
                return Node(digest, other)
            self.forget(other)
        self._entries[block] = _Entry(parent, digest, piece)
        self._blocks[digest] = block
        insort(self._children.setdefault(parent.block, []), (piece, block))
        return Node(digest, block)

    def held(self, block: int) -> int:
        """Return of how many tokens ``block`` is known to hold keys and values; 0 where it is not found."""
        entry = self._entries.get(block)
        return 0 if entry is None else len(entry.tokens) // _TOKEN_BYTES

    def forget(self, block: int) -> None:
        """Let ``block`` not be found any more, nor what continues it."""
        entry = self._entries.pop(block, None)
        if entry is None:
            return
        del self._blocks[entry.digest]
        siblings = self._children[entry.parent.block]
        del siblings[bisect_left(siblings, (entry.tokens, block))]
        if not siblings:
            del self._children[entry.parent.block]
        for _, child in self._children.get(block, [])[:]:
            self.forget(child)

    def _holds(self, node: Node) -> bool:
        entry = self._entries.get(node.block)
        return entry is not None and entry.digest == node.digest

    def _part(self, parent: int, rest: Tokens) -> tuple[int | None, int]:
        """Return the block after ``parent`` whose tokens agree longest with ``rest``, and how many do."""
        best: int | None = None
        most = 0
        siblings = self._children.get(parent)
        if siblings is None or not len(rest):
            return None, 0
        wanted = rest.tobytes()
        place = bisect_left(siblings, (wanted, -1))
        for tokens, block in siblings[max(place - 1, 0) : place + 1]:
            count = _num_equal(tokens, wanted)
            if count > most:
                best, most = block, count
        return best, most


def _num_equal(one: bytes, other: bytes) -> int:
    """Return how many tokens two pieces begin with alike."""
    size = min(len(one), len(other))
    apart = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    # The lowest bit that differs is in the first token that does.
    first = (apart & -apart).bit_length() - 1 if apart else 8 * size
    return first // (8 * _TOKEN_BYTES)
