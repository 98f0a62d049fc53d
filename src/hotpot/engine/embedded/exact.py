"""An engine's passes in the exact arithmetic: a request's bits hang on nothing but its own tokens and the weights.

Owns the layout of a pass for :mod:`hotpot.models.exact`, what it needs of a cache (:class:`Past`), and the
log-probabilities in the learner's own spelling. Knows no requests and not how a cache keeps what it holds.

Invariant: nothing of a pass is computed otherwise than the learner computes it (:mod:`hotpot.models.exact_rows`); there a
row is a sequence, here a query or a piece of a prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name torch's own documentation uses

from hotpot.engine.embedded.sampler import Sampled
from hotpot.engine.embedded.stream import Stream
from hotpot.models import Decoder, DecoderConfig, Weights
from hotpot.models.exact import (
    ROWS,
    ExactWeights,
    Projection,
    exact_weights,
    layer_output,
    linear,
    log_distribution,
    padding,
    require_one_thread,
)
from hotpot.models.exact_rows import TiledAttention
from hotpot.types import SamplingParams

Ints = NDArray[np.int64]

Write = Callable[[int, Tensor, Tensor], None]
"""Take keys and values of a layer, float32 ``[N, num_kv_heads, head_dim]``."""
Read = Callable[[int], tuple[Tensor, Tensor]]
"""Return keys and values of a layer, float32 ``[B, num_kv_heads, S, head_dim]``, copied or not."""


class Past(Protocol):
    """Keys and values of earlier tokens. Both calls are made once a pass, what they return once a layer."""

    def writer(self, rows: Ints, positions: Ints) -> Write:
        """Return what keeps a pass's tokens: int64 ``[N]`` each."""

    def reader(self, rows: Ints, length: int) -> Read:
        """Return what reads the first ``length`` tokens (or more, finite ones) of each of ``rows`` int64 ``[B]``."""


class ExactBuffer:
    """One copy of a decoder's weights under its own names, filled and refilled in place."""

    def __init__(self, config: DecoderConfig) -> None:
        with torch.device("meta"):
            shapes = {name: tensor.shape for name, tensor in Decoder(config).state_dict().items()}
        self._named = {name: torch.empty(shape) for name, shape in shapes.items()}
        self.weights = exact_weights(config, self._named)

    def fill(self, weights: Weights) -> None:
        """Copy ``weights`` here."""
        for name, target in self._named.items():
            target.copy_(weights[name])

    def unpack(self) -> dict[str, Tensor]:
        """Return the weights as :meth:`fill` got them, bit for bit."""
        return dict(self._named)


def exact_logits(
    weights: ExactWeights, rotary: tuple[Tensor, Tensor], tokens: Tensor, stream: Stream, past: Past
) -> Tensor:
    """Return logits float32 ``[M, vocab_size]`` of the wanted tokens of ``stream``.

    ``tokens`` int64 ``[N]``: the stream's; ``rotary``: see :func:`hotpot.models.rotary.rotary_table`. Raises
    :class:`~hotpot.errors.HotpotError` where torch computes with more than one thread.
    """
    require_one_thread()
    config, missing = weights.config, padding(len(tokens), ROWS)
    places = F.pad(torch.from_numpy(stream.positions), (0, missing))
    turned = (rotary[0][places].unsqueeze(1), rotary[1][places].unsqueeze(1))
    attention = _StreamAttention(past, stream)
    x = F.embedding(F.pad(tokens, (0, missing)), weights.embedding)
    for index, layer in enumerate(weights.layers):
        last = index == config.num_layers - 1
        attend = partial(attention.finish if last else attention, index)
        x = layer_output(config, layer, x, turned, attend, attention.wanted if last else None)
    x = F.rms_norm(x, (config.hidden_size,), weights.norm, config.rms_norm_eps)
    return linear(x, Projection(weight=weights.head))[: len(stream.wanted)]


def with_exact_logprobs(
    drawn: Sampled, logits: Tensor, groups: Sequence[tuple[SamplingParams, NDArray[np.intp]]]
) -> Sampled:
    """Return ``drawn`` with log-probabilities as the learner computes them, of ``logits`` float32 ``[M, vocab_size]``.

    Those of a filtered distribution are the sampler's: no learner computes them.
    """
    tokens = torch.from_numpy(drawn.tokens)[:, None]
    model = log_distribution(logits, 1.0).gather(-1, tokens)[:, 0].numpy()
    behaviour = drawn.behaviour_logprobs.copy()
    for params, rows in groups:
        if params.temperature == 0 or params.filtered:
            continue
        if params.temperature == 1:
            behaviour[rows] = model[rows]
        else:
            own = log_distribution(logits[rows], params.temperature)
            behaviour[rows] = own.gather(-1, tokens[rows])[:, 0].numpy()
    return replace(drawn, behaviour_logprobs=behaviour, model_logprobs=model)


class _StreamAttention:
    """Attention of one pass: all keys and values are written first, so that a token sees itself and its own piece.

    ``wanted`` int64, a multiple of ``ROWS``: the tokens that pass the last layer, None where all do.
    """

    def __init__(self, past: Past, stream: Stream) -> None:
        self._count = len(stream.rows)
        self._write = past.writer(stream.rows, stream.positions)
        singles = slice(0, stream.num_singles)
        self._parts: list[tuple[slice, _Queries]] = []
        if stream.num_singles:
            one = np.ones(stream.num_singles, dtype=np.int64)
            own = _Queries(past, stream.rows[singles], stream.positions[singles], one)
            self._parts.append((singles, own))
        self.wanted: Tensor | None = None
        if stream.piece_rows.size:
            pieces = _Queries(past, stream.piece_rows, stream.piece_starts, stream.piece_lengths)
            self._parts.append((slice(stream.num_singles, self._count), pieces))
            self._wanted = torch.from_numpy(stream.wanted)
            self.wanted = F.pad(self._wanted, (0, padding(len(stream.wanted), ROWS)))
            if len(stream.wanted):
                one = np.ones(len(stream.wanted), dtype=np.int64)
                self._last = _Queries(past, stream.wanted_rows, stream.positions[stream.wanted], one)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See :data:`hotpot.models.exact.Attend`: of all tokens."""
        self._write(layer, k[: self._count], v[: self._count])
        found = [queries(layer, q[part]) for part, queries in self._parts]
        return _filled(found[0] if len(found) == 1 else torch.cat(found))

    def finish(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same of the wanted tokens only."""
        if self.wanted is None:
            return self(layer, q, k, v)
        self._write(layer, k[: self._count], v[: self._count])
        if not len(self.wanted):
            return q.new_zeros(0, q[0].numel())
        return _filled(self._last(layer, q[self._wanted]))


class _Queries:
    """Queries of ``lengths`` tokens in a row of each of ``rows``, from ``starts`` on; int64 ``[B]`` each."""

    def __init__(self, past: Past, rows: Ints, starts: Ints, lengths: Ints) -> None:
        width, length = int(lengths.max()), int((starts + lengths).max())
        columns = np.arange(width)
        self._shape = (len(rows), width)
        places = torch.from_numpy(starts[:, None] + columns)
        self._attention = TiledAttention(torch.arange(length) <= places[:, :, None])
        self._read = past.reader(rows, length)
        # Queries are padded to the longest row; what padding sees is finite, and thrown away.
        real = columns < lengths[:, None]
        self._real = None if real.all() else torch.from_numpy(np.flatnonzero(real))

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """Return what ``q`` float32 ``[N, num_heads, head_dim]`` attends to: float32 ``[N, num_heads * head_dim]``."""
        size = q.shape[1:]
        if self._real is not None:
            q = q.new_zeros(self._shape[0] * self._shape[1], *size).index_copy_(0, self._real, q)
        out = self._attention(q.view(*self._shape, *size), *self._read(layer)).flatten(0, 1).flatten(1)
        return out if self._real is None else out[self._real]


def _filled(x: Tensor) -> Tensor:
    """Return ``x`` float32 ``[N, size]`` with zeros behind it up to a multiple of ``ROWS``."""
    return F.pad(x, (0, 0, 0, padding(len(x), ROWS)))
