"""Who computes an engine's passes: the packed decoder of this package, or any policy's own module.

Owns all of them behind one interface. Each has two copies of the weights, one that serves and one that is filled, and what of
earlier tokens it remembers. Knows no requests beyond the arrays of their rows.

``PackedPasses``   packed weights and a cache of our own (:mod:`.forward`)
``ExactPasses``    the decoder in the exact arithmetic, slower: for deterministic mode (:mod:`.exact`)
``ModulePasses``   a policy's module. Where it takes a cache, keys and values lie in slots as above, and a pass is two calls:
                   the tokens of generating requests, and the pieces of prompts, padded. Where it does not (a sliding
                   window, a recurrent layer, linear biases) nothing is remembered: whole contexts are computed again for
                   every token, right-padded to the longest. That costs a context's length times as much.

Invariant: after a publish a module without a cache conditions on what the new weights make of the earlier tokens, one with
a cache on what the old ones made of them; either way a token is what the serving weights sampled, and reported so.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotpot.engine.embedded.attention import StreamAttention
from hotpot.engine.embedded.cache import SlotCache
from hotpot.engine.embedded.exact_passes import ExactPasses
from hotpot.engine.embedded.forward import forward, rotary_table
from hotpot.engine.embedded.rows import RowTable
from hotpot.engine.embedded.stream import Stream
from hotpot.engine.embedded.weights import PackedWeights, load
from hotpot.errors import EngineError
from hotpot.models import DecoderConfig, Policy, PolicyConfig, Weights
from hotpot.models.exact import fits


class Passes(Protocol):
    """Computes the passes of an engine. ``remembers``: whether tokens of earlier passes need not be computed again."""

    config: PolicyConfig
    remembers: bool

    def load(self, weights: Weights) -> str:
        """Fill the copy that does not serve and return its checksum; see :func:`.weights.load`."""

    def flip(self) -> None:
        """Let the two copies change places."""

    def logits(self, rows: RowTable, stream: Stream) -> Tensor:
        """Compute one pass; return logits float32 ``[M, vocab_size]`` of the stream's wanted tokens."""

    def copy(self, source: int, targets: Tensor, length: int) -> None:
        """Let slots ``targets`` int64 ``[B]`` remember the first ``length`` tokens of slot ``source`` too."""

    def clear(self, slots: Tensor) -> None:
        """Forget what lies in ``slots`` int64 ``[B]``: NaN there would reach later users even through a mask."""


def make_passes(
    model: DecoderConfig | Policy,
    *,
    num_slots: int,
    max_context_tokens: int,
    budget: int,
    exact: bool = False,
) -> Passes:
    """Return what computes ``model``; ``budget`` bounds the padded tokens of a call that remembers nothing.

    ``exact``: bit for bit as a learner in the exact arithmetic. Raises :class:`EngineError` where the model is not one
    that can be computed so.
    """
    if exact:
        if isinstance(model, Policy) or not fits(model):
            raise EngineError(
                "exact passes are for Hotpot's own decoder, with heads whose size is a multiple of 4; serve this model "
                "without exact"
            )
        return ExactPasses(model, num_slots, max_context_tokens)
    if isinstance(model, Policy):
        return ModulePasses(model, num_slots, max_context_tokens, budget)
    return PackedPasses(model, num_slots, max_context_tokens)


class PackedPasses:
    """The decoder's mathematics with packed weights; implements :class:`Passes`."""

    def __init__(self, config: DecoderConfig, num_slots: int, max_context_tokens: int) -> None:
        self.config: PolicyConfig = config
        self.remembers = True
        self._table = rotary_table(config, max_context_tokens)
        self._serving, self._standby = PackedWeights(config), PackedWeights(config)
        self._cache = SlotCache(config, num_slots, max_context_tokens)

    def load(self, weights: Weights) -> str:
        """See :meth:`Passes.load`."""
        return load(self._standby, weights)

    def flip(self) -> None:
        """See :meth:`Passes.flip`."""
        self._serving, self._standby = self._standby, self._serving

    def logits(self, rows: RowTable, stream: Stream) -> Tensor:
        """See :meth:`Passes.logits`."""
        self._cache.reserve(int(stream.positions.max()) + 1)
        return forward(
            self._serving,
            self._table,
            torch.from_numpy(rows.tokens[stream.slots, stream.positions].astype(np.int64)),
            torch.from_numpy(stream.positions),
            StreamAttention(self._cache, stream),
        )

    def copy(self, source: int, targets: Tensor, length: int) -> None:
        """See :meth:`Passes.copy`."""
        self._cache.reserve(length + 1)
        self._cache.copy(source, targets, length)

    def clear(self, slots: Tensor) -> None:
        """See :meth:`Passes.clear`."""
        self._cache.clear(slots)


class ModuleWeights:
    """One copy of a policy, filled and refilled in place."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy.duplicate().requires_grad_(requires_grad=False)

    def fill(self, weights: Weights) -> None:
        """Copy ``weights`` into the module."""
        self.policy.load_state_dict(dict(weights))

    def unpack(self) -> dict[str, Tensor]:
        """Return the weights as they stand in the module."""
        return dict(self.policy.state_dict())


class ModulePasses:
    """A policy's own module; implements :class:`Passes`."""

    def __init__(self, policy: Policy, num_slots: int, max_context_tokens: int, budget: int) -> None:
        self.config = policy.config
        self.remembers = policy.caches
        self._serving, self._standby = ModuleWeights(policy), ModuleWeights(policy)
        self._cache = PastSlots(num_slots, max_context_tokens)
        self._budget = budget

    def load(self, weights: Weights) -> str:
        """See :meth:`Passes.load`."""
        return load(self._standby, weights)

    def flip(self) -> None:
        """See :meth:`Passes.flip`."""
        self._serving, self._standby = self._standby, self._serving

    def logits(self, rows: RowTable, stream: Stream) -> Tensor:
        """See :meth:`Passes.logits`."""
        policy = self._serving.policy
        if not self.remembers:
            return policy.logits(self._again(policy, rows, stream.wanted_slots))
        hidden: list[Tensor] = []
        if stream.num_singles:
            starts = stream.positions[: stream.num_singles]
            hidden.append(
                self._go_on(policy, rows, stream.slots[: stream.num_singles], starts, np.ones_like(starts))
            )
        if stream.piece_slots.size:
            hidden.append(
                self._go_on(policy, rows, stream.piece_slots, stream.piece_starts, stream.piece_lengths)
            )
        return policy.logits(torch.cat(hidden)[torch.from_numpy(stream.wanted)])

    def copy(self, source: int, targets: Tensor, length: int) -> None:
        """See :meth:`Passes.copy`."""
        self._cache.copy(source, targets, length)

    def clear(self, slots: Tensor) -> None:
        """See :meth:`Passes.clear`."""
        self._cache.clear(slots)

    def _go_on(
        self,
        policy: Policy,
        rows: RowTable,
        slots: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> Tensor:
        """Compute ``lengths`` tokens of each of ``slots`` from ``starts`` on; return their hidden states end to end."""
        width, longest = int(lengths.max()), int((starts + lengths).max())
        columns = np.arange(width)
        real = columns < lengths[:, None]
        places = np.where(real, starts[:, None] + columns, 0)
        tokens = np.where(real, rows.tokens[slots[:, None], places], 0).astype(np.int64)
        self._cache.begin(places, real, longest)
        positions = torch.from_numpy(places)
        attend = torch.arange(longest) <= positions[:, :, None]
        hidden: Tensor = policy(
            torch.from_numpy(tokens),
            positions,
            cache=self._cache,
            rows=torch.from_numpy(slots),
            attend=attend[:, None],
            wanted=torch.from_numpy(np.flatnonzero(real)),
        )
        return hidden

    def _again(self, policy: Policy, rows: RowTable, slots: NDArray[np.int64]) -> Tensor:
        """Compute the whole contexts of ``slots``; return the hidden state of the last token of each."""
        lengths = rows.length[slots]
        found = [torch.zeros(0, self.config.hidden_size)]
        for part in _within(lengths, self._budget):
            width = int(lengths[part].max())
            columns = np.arange(width)
            tokens = np.where(columns < lengths[part][:, None], rows.tokens[slots[part], :width], 0)
            last = np.arange(len(slots[part])) * width + lengths[part] - 1
            found.append(
                policy(
                    torch.from_numpy(tokens.astype(np.int64)),
                    torch.arange(width).expand(len(tokens), -1),
                    wanted=torch.from_numpy(last),
                )
            )
        return torch.cat(found)


class PastSlots:
    """Keys and values by slot and position; implements :class:`hotpot.models.PastTokens` for one call at a time.

    Per layer float32 ``[num_slots, num_kv_heads, capacity + 1, head_dim]``, made in the shape of what the module writes
    first. Padding tokens are written to the last place, which is never read.
    """

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self._num_slots, self._capacity = num_slots, max_tokens
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._places = torch.zeros(0, 0, dtype=torch.int64)

    def begin(self, places: NDArray[np.int64], real: NDArray[np.bool_], longest: int) -> None:
        """Say where the next call's tokens belong, int64 ``[B, T]``, and which of them are ``real``."""
        assert longest <= self._capacity
        self._places = torch.from_numpy(np.where(real, places, self._capacity))

    def write(
        self, layer: int, rows: slice | Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """See :meth:`hotpot.models.PastTokens.write`; the places are those :meth:`begin` was told."""
        del positions
        index = self._index(rows)[:, None]
        for store, new in ((self._keys, keys), (self._values, values)):
            if layer not in store:
                store[layer] = _zeros((self._num_slots, new.shape[1], self._capacity + 1, new.shape[3]))
            store[layer][index, :, self._places] = new.transpose(1, 2)

    def read(self, layer: int, rows: slice | Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the first ``length`` keys and values of ``rows``, copied."""
        index = self._index(rows)
        keys, values = self._keys[layer][:, :, :length], self._values[layer][:, :, :length]
        return keys.index_select(0, index), values.index_select(0, index)

    def copy(self, source: int, targets: Tensor, length: int) -> None:
        """Put the first ``length`` entries of slot ``source`` into ``targets`` int64 ``[B]`` too."""
        for tensor in (*self._keys.values(), *self._values.values()):
            tensor[targets, :, :length] = tensor[source, :, :length]

    def clear(self, slots: Tensor) -> None:
        """Zero everything in ``slots`` int64 ``[B]``."""
        for tensor in (*self._keys.values(), *self._values.values()):
            tensor[slots] = 0.0

    def _index(self, rows: slice | Tensor) -> Tensor:
        return torch.arange(self._num_slots)[rows] if isinstance(rows, slice) else rows


def _zeros(shape: tuple[int, ...]) -> Tensor:
    # NumPy's zeros take no memory before they are touched; torch's do.
    return torch.from_numpy(np.zeros(shape, dtype=np.float32))


def _within(lengths: NDArray[np.int64], budget: int) -> list[slice]:
    """Return slices of rows, each of at most ``budget`` padded tokens, or a single row."""
    parts, start = [], 0
    for stop in range(1, len(lengths) + 1):
        if stop - start > 1 and (stop - start) * int(lengths[start:stop].max()) > budget:
            parts.append(slice(start, stop - 1))
            start = stop - 1
    return [*parts, slice(start, len(lengths))] if len(lengths) else []
