"""Who computes an engine's passes: the packed decoder of this package, or any policy's own module.

Owns all of them behind one interface. Each has two copies of the weights, one that serves and one that is filled, and the keys
and values of earlier tokens, in blocks. Knows no requests beyond the arrays of their rows.

``PackedPasses``   packed weights and attention of our own (:mod:`.forward`)
``ExactPasses``    the decoder in the exact arithmetic, slower: for deterministic mode (:mod:`.exact`)
``ModulePasses``   a policy's module. Where it takes a cache, its keys and values lie in the same blocks, and a pass is two calls:
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
from hotpot.engine.embedded.blocks import BLOCK_TOKENS
from hotpot.engine.embedded.exact_passes import ExactPasses
from hotpot.engine.embedded.forward import forward, rotary_table
from hotpot.engine.embedded.rows import RowTable
from hotpot.engine.embedded.store import BlockStore, Shape
from hotpot.engine.embedded.stream import Stream
from hotpot.engine.embedded.weights import PackedWeights, load
from hotpot.errors import EngineError
from hotpot.models import DecoderConfig, Policy, PolicyConfig, Weights
from hotpot.models.exact import fits

Ints = NDArray[np.int64]


class Passes(Protocol):
    """Computes the passes of an engine.

    ``remembers``: whether tokens of earlier passes need not be computed again. ``shapes``: of the keys and values that each
    layer keeps. ``store``: where they lie; the engine makes it, once it knows how many blocks there are.
    """

    config: PolicyConfig
    remembers: bool
    shapes: list[Shape]
    store: BlockStore

    def load(self, weights: Weights) -> str:
        """Fill the copy that does not serve and return its checksum; see :func:`.weights.load`."""

    def flip(self) -> None:
        """Let the two copies change places."""

    def logits(self, rows: RowTable, table: Ints, stream: Stream) -> Tensor:
        """Compute one pass; return logits float32 ``[M, vocab_size]`` of the stream's wanted tokens.

        ``table`` int64 ``[rows, n]``: the blocks of each row's context.
        """


def make_passes(
    model: DecoderConfig | Policy, *, max_context_tokens: int, budget: int, exact: bool = False
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
        return ExactPasses(model)
    if isinstance(model, Policy):
        return ModulePasses(model, budget)
    return PackedPasses(model, max_context_tokens)


class PackedPasses:
    """The decoder's mathematics with packed weights; implements :class:`Passes`."""

    def __init__(self, config: DecoderConfig, max_context_tokens: int) -> None:
        self.config: PolicyConfig = config
        self.remembers = True
        self.shapes = [(config.num_kv_heads, config.head_dim)] * config.num_layers
        self.store = BlockStore(self.shapes, 0)
        self._table = rotary_table(config, max_context_tokens)
        self._serving, self._standby = PackedWeights(config), PackedWeights(config)

    def load(self, weights: Weights) -> str:
        """See :meth:`Passes.load`."""
        return load(self._standby, weights)

    def flip(self) -> None:
        """See :meth:`Passes.flip`."""
        self._serving, self._standby = self._standby, self._serving

    def logits(self, rows: RowTable, table: Ints, stream: Stream) -> Tensor:
        """See :meth:`Passes.logits`."""
        return forward(
            self._serving,
            self._table,
            torch.from_numpy(rows.tokens[stream.rows, stream.positions].astype(np.int64)),
            torch.from_numpy(stream.positions),
            StreamAttention(self.store, table, stream),
        )


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

    def __init__(self, policy: Policy, budget: int) -> None:
        self.config = policy.config
        self.remembers = policy.caches
        self._serving, self._standby = ModuleWeights(policy), ModuleWeights(policy)
        self.shapes = _shapes(policy) if self.remembers else []
        self.store = BlockStore(self.shapes, 0)
        self._budget = budget

    def load(self, weights: Weights) -> str:
        """See :meth:`Passes.load`."""
        return load(self._standby, weights)

    def flip(self) -> None:
        """See :meth:`Passes.flip`."""
        self._serving, self._standby = self._standby, self._serving

    def logits(self, rows: RowTable, table: Ints, stream: Stream) -> Tensor:
        """See :meth:`Passes.logits`."""
        policy = self._serving.policy
        if not self.remembers:
            return policy.logits(self._again(policy, rows, stream.wanted_rows))
        hidden: list[Tensor] = []
        if stream.num_singles:
            starts = stream.positions[: stream.num_singles]
            singles = stream.rows[: stream.num_singles]
            hidden.append(self._go_on(policy, rows, table[singles], singles, starts, np.ones_like(starts)))
        if stream.piece_rows.size:
            pieces = stream.piece_rows
            hidden.append(
                self._go_on(policy, rows, table[pieces], pieces, stream.piece_starts, stream.piece_lengths)
            )
        return policy.logits(torch.cat(hidden)[torch.from_numpy(stream.wanted)])

    def _go_on(
        self, policy: Policy, rows: RowTable, table: Ints, which: Ints, starts: Ints, lengths: Ints
    ) -> Tensor:
        """Compute ``lengths`` tokens of each of rows ``which`` from ``starts`` on; return their hidden states end to end."""
        width, longest = int(lengths.max()), int((starts + lengths).max())
        columns = np.arange(width)
        real = columns < lengths[:, None]
        places = np.where(real, starts[:, None] + columns, 0)
        tokens = np.where(real, rows.tokens[which[:, None], places], 0).astype(np.int64)
        positions = torch.from_numpy(places)
        attend = torch.arange(longest) <= positions[:, :, None]
        hidden: Tensor = policy(
            torch.from_numpy(tokens),
            positions,
            cache=PastBlocks(self.store, table, places, real),
            rows=torch.arange(len(which)),
            attend=attend[:, None],
            wanted=torch.from_numpy(np.flatnonzero(real)),
        )
        return hidden

    def _again(self, policy: Policy, rows: RowTable, which: Ints) -> Tensor:
        """Compute the whole contexts of rows ``which``; return the hidden state of the last token of each."""
        lengths = rows.length[which]
        found = [torch.zeros(0, self.config.hidden_size)]
        for part in _within(lengths, self._budget):
            width = int(lengths[part].max())
            columns = np.arange(width)
            tokens = np.where(columns < lengths[part][:, None], rows.tokens[which[part], :width], 0)
            last = np.arange(len(which[part])) * width + lengths[part] - 1
            found.append(
                policy(
                    torch.from_numpy(tokens.astype(np.int64)),
                    torch.arange(width).expand(len(tokens), -1),
                    wanted=torch.from_numpy(last),
                )
            )
        return torch.cat(found)


class PastBlocks:
    """The past of one call in blocks; implements :class:`hotpot.models.PastTokens`.

    ``table`` int64 ``[B, n]``: blocks of the call's rows. ``places`` int64 ``[B, T]``: positions of its tokens, those of
    them that are ``real``; padding is not written.
    """

    def __init__(self, store: BlockStore, table: Ints, places: Ints, real: NDArray[np.bool_]) -> None:
        self._store = store
        self._table = torch.from_numpy(table)
        row, column = np.nonzero(real)
        self._real = torch.from_numpy(row), torch.from_numpy(column)
        self._places = store.places(table, row, places[row, column])

    def write(
        self, layer: int, rows: slice | Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """See :meth:`hotpot.models.PastTokens.write`; the places are those of the call."""
        del rows, positions
        row, column = self._real
        self._store.write(layer, self._places, keys[row, :, column], values[row, :, column])

    def read(self, layer: int, rows: slice | Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the first ``length`` keys and values of the call's rows, copied."""
        del rows
        keys, values = self._store.gather(layer, self._table[:, : -(-length // BLOCK_TOKENS)])
        return keys[:, :, :length], values[:, :, :length]


class _Witness:
    """A past of nothing that remembers what shapes of keys and values it was given."""

    def __init__(self) -> None:
        self.shapes: dict[int, Shape] = {}
        self._given: tuple[Tensor, Tensor] = (torch.zeros(0), torch.zeros(0))

    def write(
        self, layer: int, rows: slice | Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        del rows, positions
        self.shapes[layer] = (keys.shape[1], keys.shape[3])
        self._given = keys, values

    def read(self, layer: int, rows: slice | Tensor, length: int) -> tuple[Tensor, Tensor]:
        del layer, rows, length
        return self._given


@torch.no_grad()
def _shapes(policy: Policy) -> list[Shape]:
    """Return the shape of keys and values that each layer of ``policy`` keeps, by asking it for one token."""
    witness = _Witness()
    one = torch.zeros(1, 1, dtype=torch.int64)
    policy(one, one, cache=witness, rows=torch.arange(1), attend=torch.ones(1, 1, 1, 1, dtype=torch.bool))
    return [witness.shapes[layer] for layer in range(len(witness.shapes))]


def _within(lengths: Ints, budget: int) -> list[slice]:
    """Return slices of rows, each of at most ``budget`` padded tokens, or a single row."""
    parts, start = [], 0
    for stop in range(1, len(lengths) + 1):
        if stop - start > 1 and (stop - start) * int(lengths[start:stop].max()) > budget:
            parts.append(slice(start, stop - 1))
            start = stop - 1
    return [*parts, slice(start, len(lengths))] if len(lengths) else []
