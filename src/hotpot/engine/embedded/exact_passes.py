"""The passes of an engine in deterministic mode, over the blocks of its store.

Owns the two copies of the weights and the way from blocks to :class:`.exact.Past`. The arithmetic is :mod:`.exact`'s.
"""

import numpy as np
import torch
from torch import Tensor

from hotpot.engine.embedded.blocks import BLOCK_TOKENS
from hotpot.engine.embedded.exact import ExactBuffer, Ints, Read, Write, exact_logits
from hotpot.engine.embedded.rows import RowTable
from hotpot.engine.embedded.store import BlockStore
from hotpot.engine.embedded.stream import Stream
from hotpot.engine.embedded.weights import load
from hotpot.models import DecoderConfig, PolicyConfig, Weights
from hotpot.models.exact import LANES
from hotpot.models.rotary import rotary_table

assert BLOCK_TOKENS % LANES == 0, "keys are read by whole blocks, and come in multiples of LANES"


class ExactPasses:
    """The decoder in the exact arithmetic; implements :class:`.passes.Passes`."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config: PolicyConfig = config
        self.remembers = True
        self.shapes = [(config.num_kv_heads, config.head_dim)] * config.num_layers
        self.store = BlockStore(self.shapes, 0)
        self._rotary = rotary_table(config)
        self._serving, self._standby = ExactBuffer(config), ExactBuffer(config)

    def load(self, weights: Weights) -> str:
        """See :meth:`.passes.Passes.load`."""
        return load(self._standby, weights)

    def flip(self) -> None:
        """See :meth:`.passes.Passes.flip`."""
        self._serving, self._standby = self._standby, self._serving

    def logits(self, rows: RowTable, table: Ints, stream: Stream) -> Tensor:
        """See :meth:`.passes.Passes.logits`."""
        tokens = torch.from_numpy(rows.tokens[stream.rows, stream.positions].astype(np.int64))
        return exact_logits(self._serving.weights, self._rotary, tokens, stream, BlockPast(self.store, table))


class BlockPast:
    """Keys and values in blocks, ``table`` int64 ``[rows, n]``; implements :class:`.exact.Past`."""

    def __init__(self, store: BlockStore, table: Ints) -> None:
        self._store, self._table = store, table

    def writer(self, rows: Ints, positions: Ints) -> Write:
        """See :meth:`.exact.Past.writer`."""
        places = self._store.places(self._table, rows, positions)
        return lambda layer, keys, values: self._store.write(layer, places, keys, values)

    def reader(self, rows: Ints, length: int) -> Read:
        """See :meth:`.exact.Past.reader`."""
        blocks = torch.from_numpy(self._table[rows, : -(-length // BLOCK_TOKENS)])
        return lambda layer: self._store.gather(layer, blocks)
