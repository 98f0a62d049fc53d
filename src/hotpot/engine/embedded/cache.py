"""Keys and values of past tokens by slot, grown as contexts grow.

Owns the memory and its layout: per layer float32 ``[num_slots * num_kv_heads, capacity, head_dim]``, so that a range of
slots is one strided batch for a matrix product. Knows not what a slot holds or whether it is valid; entries past a
slot's length are finite garbage that the caller masks.
"""

import numpy as np
import torch
from torch import Tensor

from hotpot.models import DecoderConfig

_FIRST_CAPACITY = 256


class SlotCache:
    """Keys and values of ``num_slots`` contexts of up to ``max_tokens`` tokens."""

    def __init__(self, config: DecoderConfig, num_slots: int, max_tokens: int) -> None:
        self.num_slots, self.num_kv_heads = num_slots, config.num_kv_heads
        self._dim, self._max_tokens = config.head_dim, max_tokens
        self.capacity = min(_FIRST_CAPACITY, max_tokens)
        self._keys = [self._zeros() for _ in range(config.num_layers)]
        self._values = [self._zeros() for _ in range(config.num_layers)]

    def reserve(self, tokens: int) -> None:
        """Make room for contexts of ``tokens`` tokens; what is there stays."""
        if tokens <= self.capacity:
            return
        old = self.capacity
        while self.capacity < tokens:
            self.capacity = min(2 * self.capacity, self._max_tokens)
        for store in (self._keys, self._values):
            for layer, tensor in enumerate(store):
                store[layer] = self._zeros()
                store[layer][:, :old] = tensor

    def flat_index(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return where the tokens at ``positions`` of ``slots`` (int64 ``[N]`` both) lie: int64 ``[N * num_kv_heads]``."""
        heads = slots[:, None] * self.num_kv_heads + torch.arange(self.num_kv_heads)
        return (heads * self.capacity + positions[:, None]).view(-1)

    def write(self, layer: int, flat: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` and ``values`` float ``[N, num_kv_heads, head_dim]`` at ``flat`` (see :meth:`flat_index`)."""
        self._keys[layer].view(-1, self._dim).index_copy_(0, flat, keys.reshape(-1, self._dim))
        self._values[layer].view(-1, self._dim).index_copy_(0, flat, values.reshape(-1, self._dim))

    def copy(self, source: int, targets: Tensor, length: int) -> None:
        """Put the first ``length`` entries of slot ``source`` into ``targets`` int64 ``[B]`` too."""
        shape = (self.num_slots, self.num_kv_heads, self.capacity, self._dim)
        for tensor in (*self._keys, *self._values):
            held = tensor.view(shape)
            held[targets, :, :length] = held[source, :, :length]

    def clear(self, slots: Tensor) -> None:
        """Zero everything in ``slots`` int64 ``[B]``: NaN there would reach later users even through a mask."""
        for tensor in (*self._keys, *self._values):
            tensor.view(self.num_slots, -1)[slots] = 0.0

    def view(self, layer: int, first: int, last: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the first ``length`` entries of slots ``first`` to ``last`` (exclusive), not copied: float
        ``[(last - first) * num_kv_heads, length, head_dim]`` each.
        """
        rows = slice(first * self.num_kv_heads, last * self.num_kv_heads)
        return self._keys[layer][rows, :length], self._values[layer][rows, :length]

    def gather(self, layer: int, slots: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the first ``length`` entries of ``slots`` int64 ``[B]``, copied: float
        ``[B * num_kv_heads, length, head_dim]`` each.
        """
        shape = (self.num_slots, self.num_kv_heads, self.capacity, self._dim)
        out = (-1, length, self._dim)
        keys = self._keys[layer].view(shape)[:, :, :length].index_select(0, slots).view(out)
        values = self._values[layer].view(shape)[:, :, :length].index_select(0, slots).view(out)
        return keys, values

    def _zeros(self) -> Tensor:
        shape = (self.num_slots * self.num_kv_heads, self.capacity, self._dim)
        # NumPy's zeros take no memory before they are touched; torch's do.
        return torch.from_numpy(np.zeros(shape, dtype=np.float32))
