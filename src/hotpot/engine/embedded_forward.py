"""The decoder's mathematics, laid out for generation: packed weights, and one pass over a stream of tokens.

Owns :class:`PackedWeights` (one buffer of weights in the layout below) and :func:`forward`. Equal to
:class:`hotpot.models.Decoder` up to rounding; the tests hold it to that. Knows no requests and no sampling.

What differs from the plain decoder, and why:

- Query, key and value projections are one matrix, gate and up projections another: fewer, larger products.
- Inside a head the two halves of the rotary pairs are interleaved (queries and keys alike, so their products are the
  same): the rotation is then one complex multiplication.
- Tokens of all requests form one stream without padding; only attention pads (:mod:`.embedded_attention`).
- Of the last layer only keys and values are computed for every token: the rest only for those whose logits are wanted.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name torch's own documentation uses

from hotpot.engine.embedded_attention import StreamAttention
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


def rotary_table(config: DecoderConfig, length: int) -> Tensor:
    """Return e^(i * position * frequency): complex64 ``[length, 1, head_dim / 2]`` (arXiv:2104.09864)."""
    frequency = config.rope_theta ** (
        -torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    )
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequency
    return torch.complex(angles.cos(), angles.sin())[:, None]


def forward(
    weights: PackedWeights, table: Tensor, tokens: Tensor, positions: Tensor, attention: StreamAttention
) -> Tensor:
    """Return logits float32 ``[M, vocab_size]`` of the stream's tokens that ``attention`` wants.

    ``tokens``, ``positions`` int64 ``[N]``; ``table`` from :func:`rotary_table`.
    """
    config = weights.config
    size, eps = (config.hidden_size,), config.rms_norm_eps
    rotary = table[positions]
    x = F.embedding(tokens, weights.embedding)
    for index, layer in enumerate(weights.layers):
        normed = F.rms_norm(x, size, layer.input_norm, eps)
        if index < config.num_layers - 1:
            attended = attention(index, *_project(config, layer, normed, rotary))
        elif attention.wanted is None:
            attended = attention.finish(index, *_project(config, layer, normed, rotary))
        else:
            k, v = _project_keys(config, layer, normed, rotary)
            x, normed = x[attention.wanted], normed[attention.wanted]
            q = _project_queries(config, layer, normed, rotary[attention.wanted])
            attended = attention.finish(index, q, k, v)
        x = x + F.linear(attended, layer.o)
        gate, up = F.linear(F.rms_norm(x, size, layer.post_norm, eps), layer.gate_up).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, layer.down)
    return F.linear(F.rms_norm(x, size, weights.norm, eps), weights.head)


def _project(
    config: DecoderConfig, layer: _PackedLayer, x: Tensor, rotary: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries and keys, and values: float ``[N, heads, head_dim]`` each."""
    heads, both = config.num_heads, config.num_heads + config.num_kv_heads
    qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(-1, both + config.num_kv_heads, config.head_dim)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = _norm_and_turn(config, qkv[:, :heads], layer.q_norm, rotary)
        return q, _norm_and_turn(config, qkv[:, heads:both], layer.k_norm, rotary), qkv[:, both:]
    turned = _norm_and_turn(config, qkv[:, :both], None, rotary)
    return turned[:, :heads], turned[:, heads:], qkv[:, both:]


def _project_queries(config: DecoderConfig, layer: _PackedLayer, x: Tensor, rotary: Tensor) -> Tensor:
    rows = config.num_heads * config.head_dim
    bias = None if layer.qkv_bias is None else layer.qkv_bias[:rows]
    q = F.linear(x, layer.qkv[:rows], bias).view(-1, config.num_heads, config.head_dim)
    return _norm_and_turn(config, q, layer.q_norm, rotary)


def _project_keys(
    config: DecoderConfig, layer: _PackedLayer, x: Tensor, rotary: Tensor
) -> tuple[Tensor, Tensor]:
    rows = config.num_heads * config.head_dim
    bias = None if layer.qkv_bias is None else layer.qkv_bias[rows:]
    kv = F.linear(x, layer.qkv[rows:], bias).view(-1, 2 * config.num_kv_heads, config.head_dim)
    keys = _norm_and_turn(config, kv[:, : config.num_kv_heads], layer.k_norm, rotary)
    return keys, kv[:, config.num_kv_heads :]


def _norm_and_turn(config: DecoderConfig, x: Tensor, norm: Tensor | None, rotary: Tensor) -> Tensor:
    """Apply the head norm, if there is one, and the rotary embedding to ``x`` float ``[N, heads, head_dim]``."""
    if norm is not None:
        x = F.rms_norm(x, (config.head_dim,), norm, config.rms_norm_eps)
    pairs = x.reshape(*x.shape[:-1], config.head_dim // 2, 2)
    return torch.view_as_real(torch.view_as_complex(pairs) * rotary).flatten(-2)
