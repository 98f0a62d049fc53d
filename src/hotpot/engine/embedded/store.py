"""Keys and values by block: the memory itself.

Owns the tensors: per layer two of float32 ``[num_kv_heads, num_blocks, 32, head_dim]``, so that a range of blocks is one
batch for a matrix product, and blocks in a row are one long block. They are all the memory there is for keys and values, and
what nobody has touched yet takes none. Knows not what a block holds or whether it is valid; entries past a context's
end are finite garbage that the reader masks.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotpot.engine.embedded.blocks import BLOCK_TOKENS

Shape = tuple[int, int]
"""Key/value heads and their width, of one layer."""


def block_bytes(shapes: list[Shape]) -> int:
    """Return the bytes of one block over all layers."""
    return sum(2 * 4 * BLOCK_TOKENS * math.prod(shape) for shape in shapes)


class BlockStore:
    """Keys and values of ``num_blocks`` blocks over layers of ``shapes``. ``layer_bytes``: of a block in its largest layer."""

    def __init__(self, shapes: list[Shape], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.layer_bytes = max((block_bytes([shape]) for shape in shapes), default=0)
        self.keys = [_zeros(heads, num_blocks, dim) for heads, dim in shapes]
        self.values = [_zeros(heads, num_blocks, dim) for heads, dim in shapes]

    @property
    def num_bytes(self) -> int:
        """Size of the memory, touched or not."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def places(
        self, table: NDArray[np.int64], rows: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> Tensor:
        """Return where the tokens at ``positions`` of ``rows`` (int64 ``[N]`` both) lie in a head's memory: int64 ``[N]``."""
        return torch.from_numpy(
            table[rows, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
        )

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store ``keys`` and ``values`` float ``[N, num_kv_heads, head_dim]`` at ``places`` (see :meth:`places`)."""
        heads, dim = keys.shape[1:]
        # Over whole rows of a flat memory: over the second axis of three the same copy takes many times as long.
        flat = (places[:, None] + torch.arange(heads) * (self.num_blocks * BLOCK_TOKENS)).view(-1)
        self.keys[layer].view(-1, dim).index_copy_(0, flat, keys.reshape(-1, dim))
        self.values[layer].view(-1, dim).index_copy_(0, flat, values.reshape(-1, dim))

    def gather(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of blocks ``table`` int64 ``[R, n]``, copied: float ``[R, num_kv_heads, n * 32, head_dim]``."""
        rows, blocks = table.shape
        flat = table.reshape(-1)
        found = []
        for store in (self.keys[layer], self.values[layer]):
            heads, dim = store.shape[0], store.shape[-1]
            found.append(
                store.index_select(1, flat).view(heads, rows, blocks * BLOCK_TOKENS, dim).transpose(0, 1)
            )
        return found[0], found[1]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks: ``pairs`` are (source, target); all sources are read before a target is written."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs).t()
        for store in (*self.keys, *self.values):
            store.index_copy_(1, targets, store.index_select(1, sources))

    def clear(self, blocks: list[int]) -> None:
        """Zero ``blocks``: NaN there would reach later readers even through a mask."""
        if not blocks:
            return
        for store in (*self.keys, *self.values):
            store[:, blocks] = 0.0


def _zeros(heads: int, num_blocks: int, dim: int) -> Tensor:
    # NumPy's zeros take no memory before they are touched; torch's do.
    return torch.from_numpy(np.zeros((heads, num_blocks, BLOCK_TOKENS, dim), dtype=np.float32))
