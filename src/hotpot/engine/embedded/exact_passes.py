"""The passes of an engine in deterministic mode, over the slots of its cache.

Owns the two copies of the weights and the way from slots to :class:`.exact.Past`. The arithmetic is :mod:`.exact`'s.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name torch's own documentation uses

from hotpot.engine.embedded.cache import SlotCache
from hotpot.engine.embedded.exact import ExactBuffer, Ints, Read, Write, exact_logits
from hotpot.engine.embedded.rows import RowTable
from hotpot.engine.embedded.stream import Stream
from hotpot.engine.embedded.weights import load
from hotpot.models import DecoderConfig, PolicyConfig, Weights
from hotpot.models.exact import LANES, padding
from hotpot.models.rotary import rotary_table


class ExactPasses:
    """The decoder in the exact arithmetic; implements :class:`.passes.Passes`."""

    def __init__(self, config: DecoderConfig, num_slots: int, max_context_tokens: int) -> None:
        self.config: PolicyConfig = config
        self.remembers = True
        self._rotary = rotary_table(config)
        self._serving, self._standby = ExactBuffer(config), ExactBuffer(config)
        self._cache = SlotCache(config, num_slots, max_context_tokens)
        self._past = SlotPast(self._cache)

    def load(self, weights: Weights) -> str:
        """See :meth:`.passes.Passes.load`."""
        return load(self._standby, weights)

    def flip(self) -> None:
        """See :meth:`.passes.Passes.flip`."""
        self._serving, self._standby = self._standby, self._serving

    def logits(self, rows: RowTable, stream: Stream) -> Tensor:
        """See :meth:`.passes.Passes.logits`."""
        self._cache.reserve(int(stream.positions.max()) + 1)
        tokens = torch.from_numpy(rows.tokens[stream.slots, stream.positions].astype(np.int64))
        return exact_logits(self._serving.weights, self._rotary, tokens, stream, self._past)

    def copy(self, source: int, targets: Tensor, length: int) -> None:
        """See :meth:`.passes.Passes.copy`."""
        self._cache.reserve(length + 1)
        self._cache.copy(source, targets, length)

    def clear(self, slots: Tensor) -> None:
        """See :meth:`.passes.Passes.clear`."""
        self._cache.clear(slots)


class SlotPast:
    """Keys and values by slot; implements :class:`.exact.Past`."""

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache

    def writer(self, slots: Ints, positions: Ints) -> Write:
        """See :meth:`.exact.Past.writer`."""
        flat = self._cache.flat_index(torch.from_numpy(slots), torch.from_numpy(positions))
        return lambda layer, keys, values: self._cache.write(layer, flat, keys, values)

    def reader(self, slots: Ints, length: int) -> Read:
        """See :meth:`.exact.Past.reader`: slots in a row are read where they lie."""
        cache, index = self._cache, torch.from_numpy(slots)
        size = min(length + padding(length, LANES), cache.capacity)
        in_a_row = int(slots[-1]) - int(slots[0]) + 1 == len(slots)

        def read(layer: int) -> tuple[Tensor, Tensor]:
            if in_a_row:
                found = cache.view(layer, int(slots[0]), int(slots[-1]) + 1, size)
            else:
                found = cache.gather(layer, index, size)
            keys, values = (one.view(len(slots), cache.num_kv_heads, size, -1) for one in found)
            if missing := padding(size, LANES):
                return F.pad(keys, (0, 0, 0, missing)), F.pad(values, (0, 0, 0, missing))
            return keys, values

        return read
