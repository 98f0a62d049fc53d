"""How the tokens of one pass see the key/value cache.

Owns the three shapes attention takes here. Knows no weights and no requests::

    stream  =  singles (one query a slot)  +  pieces of prompts (many queries a slot)
                 │ OneQuery                     │ ManyQueries
                 └──────────── every layer but the last ────────────┘
               wanted tokens (one query a slot)
                 │ OneQuery
                 └──────────── the last layer

Keys and values of the whole stream are written first, so that a token sees itself and its own piece.
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name torch's own documentation uses

from hotpot.engine.embedded.cache import SlotCache
from hotpot.engine.embedded.stream import Stream

_BLOCK = 16


class StreamAttention:
    """Attention of one pass; its masks and indices serve every layer."""

    def __init__(self, cache: SlotCache, stream: Stream) -> None:
        self._cache = cache
        slots, positions = torch.from_numpy(stream.slots), torch.from_numpy(stream.positions)
        self._flat = cache.flat_index(slots, positions)
        self._num_singles = stream.num_singles
        self._pieces = ManyQueries(cache, stream) if stream.piece_slots.size else None
        singles = OneQuery(cache, slots[: stream.num_singles], positions[: stream.num_singles])
        self.wanted: Tensor | None = None
        self._singles = self._last = singles
        if self._pieces is not None:
            self.wanted = torch.from_numpy(stream.wanted)
            self._last = OneQuery(cache, slots[self.wanted], positions[self.wanted])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the stream's keys and values float ``[N, num_kv_heads, head_dim]``; return what its queries float
        ``[N, num_heads, head_dim]`` attend to: float ``[N, num_heads * head_dim]``.
        """
        self._cache.write(layer, self._flat, k, v)
        if self._pieces is None:
            return self._singles(layer, q)
        pieces = self._pieces(layer, q[self._num_singles :])
        if not self._num_singles:
            return pieces
        return torch.cat([self._singles(layer, q[: self._num_singles]), pieces])

    def finish(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Like a call, for queries float ``[M, num_heads, head_dim]`` of the ``wanted`` tokens only (None: all)."""
        self._cache.write(layer, self._flat, k, v)
        return self._last(layer, q)


class OneQuery:
    """One query a slot, by batched products over a range of slots, read where they lie.

    ``slots`` int64 ``[B]`` ascending, ``positions`` int64 ``[B]`` of their queries.
    """

    def __init__(self, cache: SlotCache, slots: Tensor, positions: Tensor) -> None:
        self._cache = cache
        self._slots = slots
        count = len(slots)
        if not count:
            return
        first, last = int(slots[0]), int(slots[-1]) + 1
        self._length = min(-(-(int(positions.max()) + 1) // _BLOCK) * _BLOCK, cache.capacity)
        # Slots inside the range that have no query are computed and thrown away while they are few.
        self._in_place = last - first <= 2 * count
        self._range = (first, last)
        self._inside: Tensor | None = None
        if self._in_place and last - first > count:
            self._inside = slots - first
            positions = torch.zeros(last - first, dtype=torch.int64).index_copy_(0, self._inside, positions)
        self._mask = _hide(torch.arange(self._length) > positions[:, None])[:, None]

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """Return what ``q`` float ``[B, num_heads, head_dim]`` attends to: float ``[B, num_heads * head_dim]``."""
        cache, (count, heads, dim) = self._cache, q.shape
        if not count:
            return q.new_zeros(0, heads * dim)
        if self._in_place:
            keys, values = cache.view(layer, *self._range, self._length)
            if self._inside is not None:
                q = q.new_zeros(self._range[1] - self._range[0], heads, dim).index_copy_(0, self._inside, q)
        else:
            keys, values = cache.gather(layer, self._slots, self._length)
        q = (q * dim**-0.5).reshape(len(keys), heads // cache.num_kv_heads, dim)
        scores = torch.bmm(q, keys.transpose(1, 2))
        scores.view(-1, heads, self._length).add_(self._mask)
        out = torch.bmm(torch.softmax(scores, -1), values).view(-1, heads * dim)
        return out if self._inside is None else out.index_select(0, self._inside)


class ManyQueries:
    """Pieces of prompts: padded to the longest, over copies of their slots' keys and values."""

    def __init__(self, cache: SlotCache, stream: Stream) -> None:
        self._cache = cache
        self._slots = torch.from_numpy(stream.piece_slots)
        starts, lengths = torch.from_numpy(stream.piece_starts), torch.from_numpy(stream.piece_lengths)
        positions = torch.from_numpy(stream.positions)[stream.num_singles :]
        owner = torch.arange(len(lengths)).repeat_interleave(lengths)
        self._rows, self._width = len(lengths), int(lengths.max())
        self._length = int((starts + lengths).max())
        self._padded = owner * self._width + (positions - starts[owner])
        queries = starts[:, None] + torch.arange(self._width)
        self._mask = _hide(torch.arange(self._length) > queries[:, :, None])[:, None]

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """Return what ``q`` float ``[N, num_heads, head_dim]`` of all pieces attends to: float
        ``[N, num_heads * head_dim]``.
        """
        cache, (_, heads, dim) = self._cache, q.shape
        keys, values = cache.gather(layer, self._slots, self._length)
        shape = (self._rows, cache.num_kv_heads, self._length, dim)
        padded = q.new_zeros(self._rows * self._width, heads, dim).index_copy_(0, self._padded, q)
        out = F.scaled_dot_product_attention(
            padded.view(self._rows, self._width, heads, dim).transpose(1, 2),
            keys.view(shape),
            values.view(shape),
            attn_mask=self._mask,
            enable_gqa=heads != cache.num_kv_heads,
        )
        out = out.transpose(1, 2).reshape(self._rows * self._width, heads * dim)
        return out.index_select(0, self._padded)


def _hide(hidden: Tensor) -> Tensor:
    """Return what to add to scores so that ``hidden`` (bool) keys get no weight: float32 of the same shape."""
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
