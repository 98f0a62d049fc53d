"""The decoder's mathematics, laid out for generation: packed weights, a stream of tokens, a cache by slots.

Owns :class:`PackedWeights` (one buffer of weights in the layout below) and :func:`forward`. Equal to
:class:`hotpot.models.Decoder` up to rounding; the tests hold it to that. Knows no requests and no sampling.

What differs from the plain decoder, and why:

- Query, key and value projections are one matrix, gate and up projections another: fewer, larger products.
- Inside a head the two halves of the rotary pairs are interleaved (queries and keys alike, so their products are the
  same): the rotation is then one complex multiplication.
- Tokens of all requests form one stream without padding; only prefill attention pads.
- A decode step attends by batched products over the slots' own range of the cache, without copying it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name torch's own documentation uses

from hotpot.engine.embedded_cache import SlotCache
from hotpot.models import DecoderConfig, Weights


@dataclass(slots=True, eq=False)
class _PackedLayer:
    """Weights of one layer, float32; the name of each is the decoder's, joined where matrices are joined."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


class PackedWeights:
    """One copy of a decoder's weights in the layout of this module; filled and refilled in place."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        hidden, heads, kv, dim = (
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        pairs = torch.arange(dim).view(2, dim // 2).t().reshape(-1)
        self._interleave = pairs
        self._separate = pairs.argsort()
        rows = (heads + 2 * kv) * dim
        self.embedding = torch.empty(config.vocab_size, hidden)
        self.head = self.embedding if config.tie_embeddings else torch.empty(config.vocab_size, hidden)
        self.norm = torch.empty(hidden)
        self.layers = [
            _PackedLayer(
                input_norm=torch.empty(hidden),
                qkv=torch.empty(rows, hidden),
                qkv_bias=torch.empty(rows) if config.attention_bias else None,
                q_norm=torch.empty(dim) if config.qk_norm else None,
                k_norm=torch.empty(dim) if config.qk_norm else None,
                o=torch.empty(hidden, heads * dim),
                post_norm=torch.empty(hidden),
                gate_up=torch.empty(2 * config.intermediate_size, hidden),
                down=torch.empty(hidden, config.intermediate_size),
            )
            for _ in range(config.num_layers)
        ]

    def fill(self, weights: Weights) -> None:
        """Copy ``weights`` (names and shapes of :class:`hotpot.models.Decoder`) into this buffer."""
        for name, target, heads in self._parts():
            source = weights[name].detach()
            target.copy_(self._reorder(source, heads, self._interleave) if heads else source)

    def unpack(self) -> dict[str, Tensor]:
        """Return the weights as :meth:`fill` got them, bit for bit."""
        return {
            name: self._reorder(target, heads, self._separate) if heads else target
            for name, target, heads in self._parts()
        }

    def _parts(self) -> Iterator[tuple[str, Tensor, int]]:
        """Yield each parameter's name, its place, and the number of heads whose rows are interleaved in it."""
        config = self.config
        sizes = [config.num_heads * config.head_dim] + [config.num_kv_heads * config.head_dim] * 2
        projections = (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads), ("v_proj", 0))
        yield "embed_tokens.weight", self.embedding, 0
        if not config.tie_embeddings:
            yield "lm_head.weight", self.head, 0
        yield "norm.weight", self.norm, 0
        for index, layer in enumerate(self.layers):
            prefix = f"layers.{index}"
            yield f"{prefix}.input_layernorm.weight", layer.input_norm, 0
            yield f"{prefix}.post_attention_layernorm.weight", layer.post_norm, 0
            for (name, heads), part in zip(projections, torch.split(layer.qkv, sizes), strict=True):
                yield f"{prefix}.self_attn.{name}.weight", part, heads
            if layer.qkv_bias is not None:
                for (name, heads), part in zip(projections, torch.split(layer.qkv_bias, sizes), strict=True):
                    yield f"{prefix}.self_attn.{name}.bias", part, heads
            if layer.q_norm is not None and layer.k_norm is not None:
                yield f"{prefix}.self_attn.q_norm.weight", layer.q_norm, 1
                yield f"{prefix}.self_attn.k_norm.weight", layer.k_norm, 1
            yield f"{prefix}.self_attn.o_proj.weight", layer.o, 0
            gate, up = torch.split(layer.gate_up, config.intermediate_size)
            yield f"{prefix}.mlp.gate_proj.weight", gate, 0
            yield f"{prefix}.mlp.up_proj.weight", up, 0
            yield f"{prefix}.mlp.down_proj.weight", layer.down, 0

    def _reorder(self, rows: Tensor, heads: int, order: Tensor) -> Tensor:
        return rows.view(heads, self.config.head_dim, -1)[:, order].reshape(rows.shape)


class Attention:
    """How the tokens of one forward pass see the cache. One object a pass; its masks serve every layer."""

    def __init__(self, cache: SlotCache, flat: Tensor) -> None:
        self._cache = cache
        self._flat = flat

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write keys and values float ``[N, num_kv_heads, head_dim]`` of the stream, then return what the queries float
        ``[N, num_heads, head_dim]`` attend to: float ``[N, num_heads * head_dim]``.
        """
        self._cache.write(layer, self._flat, k, v)
        return self._attend(layer, q)

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        raise NotImplementedError


class DecodeAttention(Attention):
    """One query a slot. ``slots`` int64 ``[N]`` ascending, ``positions`` int64 ``[N]`` of the new tokens."""

    def __init__(self, cache: SlotCache, slots: Tensor, positions: Tensor) -> None:
        super().__init__(cache, cache.flat_index(slots, positions))
        count, first, last = len(slots), int(slots[0]), int(slots[-1]) + 1
        self._length = min(-(-(int(positions.max()) + 1) // 16) * 16, cache.capacity)
        # Slots that stand still inside the range are computed and thrown away while they are the minority.
        self._contiguous = last - first == count
        self._range = (first, last) if last - first <= 2 * count else None
        self._slots = slots
        if self._range and not self._contiguous:
            self._inside = slots - first
            spread = torch.zeros(last - first, dtype=torch.int64)
            spread[self._inside] = positions
            positions = spread
        heads = cache.num_kv_heads
        visible = torch.arange(self._length) <= positions.repeat_interleave(heads)[:, None]
        self._mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))[:, None]

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        cache, (_, heads, dim) = self._cache, q.shape
        kv_heads = cache.num_kv_heads
        if self._range is None:
            keys, values = cache.gather(layer, self._slots, self._length)
        else:
            keys, values = cache.view(layer, *self._range, self._length)
            if not self._contiguous:
                wide = q.new_zeros(self._range[1] - self._range[0], heads, dim)
                q = wide.index_copy_(0, self._inside, q)
        q = q.reshape(len(keys), heads // kv_heads, dim)
        scores = torch.baddbmm(self._mask, q, keys.transpose(1, 2), alpha=dim**-0.5)
        out = torch.bmm(torch.softmax(scores, -1), values).view(-1, heads * dim)
        if self._range is not None and not self._contiguous:
            out = out.index_select(0, self._inside)
        return out


class PrefillAttention(Attention):
    """Many queries a slot. The stream holds ``lengths[i]`` tokens of ``slots[i]`` from position ``starts[i]`` on."""

    def __init__(
        self, cache: SlotCache, slots: Tensor, starts: Tensor, lengths: Tensor, positions: Tensor
    ) -> None:
        owner = torch.arange(len(slots)).repeat_interleave(lengths)
        super().__init__(cache, cache.flat_index(slots[owner], positions))
        self._slots = slots
        self._rows, self._width = len(slots), int(lengths.max())
        self._length = int((starts + lengths).max())
        self._padded = owner * self._width + (positions - starts[owner])
        queries = starts[:, None] + torch.arange(self._width)
        visible = torch.arange(self._length) <= queries[:, :, None]
        self._mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))[:, None]

    def _attend(self, layer: int, q: Tensor) -> Tensor:
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


def rotary_table(config: DecoderConfig, length: int) -> Tensor:
    """Return e^(i * position * frequency): complex64 ``[length, 1, head_dim / 2]`` (arXiv:2104.09864)."""
    frequency = config.rope_theta ** (
        -torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    )
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    return torch.complex(angles.cos(), angles.sin())[:, None]


def forward(
    weights: PackedWeights,
    table: Tensor,
    tokens: Tensor,
    positions: Tensor,
    attention: Attention,
    wanted: Tensor | None = None,
) -> Tensor:
    """Return logits float32 ``[M, vocab_size]`` of the stream's tokens ``wanted`` int64 ``[M]`` (by default all).

    ``tokens``, ``positions`` int64 ``[N]``; ``table`` from :func:`rotary_table`.
    """
    config = weights.config
    heads, kv, dim, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
    size = (config.hidden_size,)
    rotary = table[positions]
    x = F.embedding(tokens, weights.embedding)
    for index, layer in enumerate(weights.layers):
        qkv = F.linear(F.rms_norm(x, size, layer.input_norm, eps), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(-1, heads + 2 * kv, dim)
        qk = qkv[:, : heads + kv]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = F.rms_norm(qk[:, :heads], (dim,), layer.q_norm, eps)
            k = F.rms_norm(qk[:, heads:], (dim,), layer.k_norm, eps)
            qk = torch.cat([q, k], dim=1)
        turned = torch.view_as_complex(qk.reshape(-1, heads + kv, dim // 2, 2)) * rotary
        qk = torch.view_as_real(turned).flatten(-2)
        x = x + F.linear(attention(index, qk[:, :heads], qk[:, heads:], qkv[:, heads + kv :]), layer.o)
        gate, up = F.linear(F.rms_norm(x, size, layer.post_norm, eps), layer.gate_up).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, layer.down)
    if wanted is not None:
        x = x.index_select(0, wanted)
    return F.linear(F.rms_norm(x, size, weights.norm, eps), weights.head)
