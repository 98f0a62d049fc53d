"""How the tokens of one pass see the key/value cache.

Owns the shapes attention takes here. Knows no weights and no requests::

    stream  =  singles (one query a row)  +  pieces of prompts (many queries a row)
                 │ OneQuery                    │ ManyQueries
                 └──────────── every layer but the last ───────────┘
               wanted tokens (one query a row)
                 │ OneQuery
                 └──────────── the last layer

Keys and values of the whole stream are written first, so that a token sees itself and its own piece.

With one query a row the time goes into reading keys and values. While they are few, copies of each row's blocks are one batch
(``CopiedBlocks``). From ``_COPIED_BYTES`` a layer on they are read where they lie (``BlocksInPlace``): the query of a block's
reader goes to the block, each block gives a softmax of its own, and the parts of a row are merged by their greatest scores and
sums (online softmax, arXiv:1805.02867). Blocks that several rows read are then read once for all of them.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name torch's own documentation uses

from hotpot.engine.embedded.blocks import BLOCK_TOKENS
from hotpot.engine.embedded.store import BlockStore
from hotpot.engine.embedded.stream import Stream

Ints = NDArray[np.int64]
Part = tuple[Tensor, Tensor, Tensor]
"""Of E entries: greatest score and sum of exponentials float ``[E, heads]``, weighted values float ``[E, heads, head_dim]``."""

_COPIED_BYTES = 6 * 1024 * 1024
"""Keys and values of one layer, padded: up to here copying them costs less than the further calls that avoid it, also where
rows share most of their blocks."""


class StreamAttention:
    """Attention of one pass; its masks and indices serve every layer. ``table`` int64 ``[rows, n]``: blocks of each row."""

    def __init__(self, store: BlockStore, table: Ints, stream: Stream) -> None:
        self._store = store
        self._places = store.places(table, stream.rows, stream.positions)
        self._num_singles = count = stream.num_singles
        singles = OneQuery(store, table, stream.rows[:count], stream.positions[:count])
        self.wanted: Tensor | None = None
        self._singles = self._last = singles
        self._pieces: ManyQueries | None = None
        if stream.piece_rows.size:
            self._pieces = ManyQueries(store, table, stream)
            self.wanted = torch.from_numpy(stream.wanted)
            self._last = OneQuery(store, table, stream.wanted_rows, stream.positions[stream.wanted])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the stream's keys and values float ``[N, num_kv_heads, head_dim]``; return what its queries float
        ``[N, num_heads, head_dim]`` attend to: float ``[N, num_heads * head_dim]``.
        """
        self._store.write(layer, self._places, k, v)
        if self._pieces is None:
            return self._singles(layer, q)
        pieces = self._pieces(layer, q[self._num_singles :])
        if not self._num_singles:
            return pieces
        return torch.cat([self._singles(layer, q[: self._num_singles]), pieces])

    def finish(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Like a call, for queries float ``[M, num_heads, head_dim]`` of the ``wanted`` tokens only (None: all)."""
        self._store.write(layer, self._places, k, v)
        return self._last(layer, q)


class OneQuery:
    """One query a row: ``rows`` int64 ``[B]``, ``positions`` int64 ``[B]`` of their queries."""

    def __init__(self, store: BlockStore, table: Ints, rows: Ints, positions: Ints) -> None:
        self._way: CopiedBlocks | BlocksInPlace | None = None
        if not len(rows):
            return
        width = int(positions.max()) // BLOCK_TOKENS + 1
        if len(rows) * width * store.layer_bytes <= _COPIED_BYTES:
            self._way = CopiedBlocks(store, table[rows, :width], positions)
        else:
            self._way = BlocksInPlace(store, table[rows], positions)

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """Return what ``q`` float ``[B, num_heads, head_dim]`` attends to: float ``[B, num_heads * head_dim]``."""
        return q.flatten(1) if self._way is None else self._way(layer, q)


class CopiedBlocks:
    """One query a row over copies of its blocks, ``table`` int64 ``[B, n]``, up to the longest."""

    def __init__(self, store: BlockStore, table: Ints, positions: Ints) -> None:
        self._store, self._blocks = store, torch.from_numpy(table).reshape(-1)
        self._length = int(positions.max()) + 1
        hidden = torch.arange(self._length) > torch.from_numpy(positions)[:, None]
        self._mask = _hide(hidden).expand(len(store.keys[0]), -1, -1).flatten(0, 1)[:, None]
        # One place for the copies of all layers: it stays in the processor's cache.
        self._keys, self._values = store.keys[0].new_empty(0), store.values[0].new_empty(0)

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """See :meth:`OneQuery.__call__`."""
        count, heads, dim = q.shape
        keys = self._copied(self._store.keys[layer], self._keys)
        values = self._copied(self._store.values[layer], self._values)
        # Query heads of one key/value head are rows of one product.
        kv = len(keys) // count
        grouped = q.view(count, kv, -1, dim).transpose(0, 1).reshape(kv * count, -1, dim)
        scores = torch.baddbmm(self._mask, grouped, keys.transpose(1, 2), alpha=dim**-0.5)
        out = torch.bmm(scores.softmax(-1), values)
        return out.view(kv, count, -1).transpose(0, 1).reshape(count, heads * dim)

    def _copied(self, blocks: Tensor, place: Tensor) -> Tensor:
        """Return what the rows have of ``blocks``, copied to ``place``: float ``[num_kv_heads * B, length, head_dim]``."""
        copied = torch.index_select(blocks, 1, self._blocks, out=place)
        return copied.view(len(self._mask), -1, blocks.shape[-1])[:, : self._length]


class BlocksInPlace:
    """One query a row over its blocks where they lie, ``table`` int64 ``[B, n]``."""

    def __init__(self, store: BlockStore, table: Ints, positions: Ints) -> None:
        self._store, self._count = store, len(table)
        counts = positions // BLOCK_TOKENS + 1
        owner = np.repeat(np.arange(self._count), counts)
        column = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        blocks = table[owner, column]
        filled = np.minimum(positions[owner] + 1 - column * BLOCK_TOKENS, BLOCK_TOKENS)
        common = np.bincount(blocks)[blocks] > 1
        self._runs = _common_runs(owner[common], blocks[common]) if common.any() else []
        self._plan_own(owner[~common], blocks[~common], filled[~common])
        owners = [self._owner, *(readers for readers, _ in self._runs)]
        self._plan_merge(torch.cat(owners).numpy())

    def _plan_own(self, owner: Ints, blocks: Ints, filled: Ints) -> None:
        """Blocks with one reader: all of a range where most of it is wanted, else copies of the wanted ones."""
        self._own: slice | Tensor = slice(0, 0)
        self._chosen: Tensor | None = None
        self._owner = torch.from_numpy(owner)
        if not len(blocks):
            return
        first, last = int(blocks.min()), int(blocks.max()) + 1
        place = np.argsort(blocks, kind="stable")
        owner, blocks, filled = owner[place], blocks[place], filled[place]
        self._owner = torch.from_numpy(owner)
        if last - first <= 2 * len(blocks):
            self._own = slice(first, last)
            at = blocks - first
            asks, known = np.zeros(last - first, np.int64), np.full(last - first, BLOCK_TOKENS)
            asks[at], known[at] = owner, filled
            # Blocks inside the range that nobody asked for are computed and thrown away.
            self._chosen = torch.from_numpy(at) if last - first > len(blocks) else None
        else:
            self._own = torch.from_numpy(blocks)
            asks, known = owner, filled
        self._asks = torch.from_numpy(asks)
        hidden = torch.arange(BLOCK_TOKENS) >= torch.from_numpy(known)[:, None]
        self._mask = _hide(hidden)[:, None]

    def _plan_merge(self, owner: Ints) -> None:
        """Where each of E entries goes: ``owner`` int64 ``[E]`` is the query it belongs to."""
        counts = np.bincount(owner, minlength=self._count)
        place = np.argsort(owner, kind="stable")
        rank = np.empty_like(place)
        rank[place] = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._width = int(counts.max())
        self._entries = torch.from_numpy(owner)
        self._ranked = torch.from_numpy(owner * self._width + rank)

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """See :meth:`OneQuery.__call__`."""
        count, heads, dim = q.shape
        keys, values = self._store.keys[layer], self._store.values[layer]
        q = (q * dim**-0.5).view(count, len(keys), heads // len(keys), dim)
        parts = [self._of_own(q, keys, values)] if len(self._owner) else []
        parts += [_of_run(q, keys, values, *run) for run in self._runs]
        return self._merge(
            [torch.cat(tensors) for tensors in zip(*parts, strict=True)] if self._runs else parts[0]
        )

    def _of_own(self, q: Tensor, keys: Tensor, values: Tensor) -> Part:
        kv, group, dim = q.shape[1:]
        asked = q.index_select(0, self._asks)
        if isinstance(self._own, slice):
            keys, values = keys[:, self._own], values[:, self._own]
        else:
            keys, values = keys.index_select(1, self._own), values.index_select(1, self._own)
        size = len(asked)
        scores = q.new_empty(kv, size, group, BLOCK_TOKENS)
        for head in range(kv):
            torch.bmm(asked[:, head], keys[head].transpose(1, 2), out=scores[head])
        greatest = scores.add_(self._mask).amax(-1)
        weights = scores.sub_(greatest[..., None]).exp_()
        sums = weights.sum(-1)
        out = q.new_empty(kv, size, group, dim)
        for head in range(kv):
            torch.bmm(weights[head], values[head], out=out[head])
        part = (_by_entry(greatest), _by_entry(sums), _by_entry(out))
        if self._chosen is None:
            return part
        return part[0][self._chosen], part[1][self._chosen], part[2][self._chosen]

    def _merge(self, part: Part | list[Tensor]) -> Tensor:
        greatest, sums, values = part
        heads, dim = values.shape[1:]
        table = greatest.new_full((self._count * self._width, heads), float("-inf"))
        most = table.index_copy_(0, self._ranked, greatest).view(self._count, self._width, heads).amax(1)
        scale = (greatest - most.index_select(0, self._entries)).exp_()
        total = scale.new_zeros(self._count, heads).index_add_(0, self._entries, sums * scale)
        out = values.new_zeros(self._count, heads, dim)
        out.index_add_(0, self._entries, values * scale[..., None])
        return out.div_(total[..., None]).view(self._count, heads * dim)


class ManyQueries:
    """Pieces of prompts: padded to the longest, over copies of their blocks."""

    def __init__(self, store: BlockStore, table: Ints, stream: Stream) -> None:
        self._store = store
        starts, lengths = torch.from_numpy(stream.piece_starts), torch.from_numpy(stream.piece_lengths)
        positions = torch.from_numpy(stream.positions)[stream.num_singles :]
        owner = torch.arange(len(lengths)).repeat_interleave(lengths)
        self._rows, self._width = len(lengths), int(lengths.max())
        blocks = -(-int((starts + lengths).max()) // BLOCK_TOKENS)
        self._table = torch.from_numpy(table[stream.piece_rows, :blocks])
        self._padded = owner * self._width + (positions - starts[owner])
        queries = starts[:, None] + torch.arange(self._width)
        self._mask = _hide(torch.arange(blocks * BLOCK_TOKENS) > queries[:, :, None])[:, None]

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """Return what ``q`` float ``[N, num_heads, head_dim]`` of all pieces attends to: float
        ``[N, num_heads * head_dim]``.
        """
        _, heads, dim = q.shape
        keys, values = self._store.gather(layer, self._table)
        padded = q.new_zeros(self._rows * self._width, heads, dim).index_copy_(0, self._padded, q)
        out = F.scaled_dot_product_attention(
            padded.view(self._rows, self._width, heads, dim).transpose(1, 2),
            keys,
            values,
            attn_mask=self._mask,
            enable_gqa=heads != keys.shape[1],
        )
        out = out.transpose(1, 2).reshape(self._rows * self._width, heads * dim)
        return out.index_select(0, self._padded)


def _common_runs(owner: Ints, blocks: Ints) -> list[tuple[Tensor, Tensor]]:
    """Return blocks by who reads them: for each set of readers (int64 ``[R]``) its blocks (int64 ``[n]``)."""
    readers: dict[int, list[int]] = {}
    for reader, block in zip(owner.tolist(), blocks.tolist(), strict=True):
        readers.setdefault(block, []).append(reader)
    runs: dict[tuple[int, ...], list[int]] = {}
    for block, who in readers.items():
        runs.setdefault(tuple(who), []).append(block)
    return [(torch.tensor(who), torch.tensor(which)) for who, which in runs.items()]


def _of_run(q: Tensor, keys: Tensor, values: Tensor, readers: Tensor, blocks: Tensor) -> Part:
    """Return what ``readers`` int64 ``[R]`` (places in q) see in complete ``blocks`` int64 ``[n]``, which all of them read."""
    kv, group, dim = q.shape[1:]
    first, count = int(blocks[0]), len(blocks)
    if bool((blocks == torch.arange(first, first + count)).all()):
        keys, values = keys[:, first : first + count], values[:, first : first + count]
    else:
        keys, values = keys.index_select(1, blocks), values.index_select(1, blocks)
    asked = q.index_select(0, readers).transpose(0, 1).reshape(kv, -1, dim)
    scores = torch.bmm(asked, keys.reshape(kv, -1, dim).transpose(1, 2))
    greatest = scores.amax(-1)
    weights = scores.sub_(greatest[..., None]).exp_()
    shape = (kv, len(readers), group)
    out = torch.bmm(weights, values.reshape(kv, -1, dim)).view(*shape, dim)
    return _by_entry(greatest.view(shape)), _by_entry(weights.sum(-1).view(shape)), _by_entry(out)


def _by_entry(x: Tensor) -> Tensor:
    """Turn ``[num_kv_heads, E, group, ...]`` into ``[E, num_kv_heads * group, ...]``."""
    return x.transpose(0, 1).flatten(1, 2)


def _hide(hidden: Tensor) -> Tensor:
    """Return what to add to scores so that ``hidden`` (bool) keys get no weight: float32 of the same shape."""
    return torch.where(hidden, -torch.inf, 0.0)
