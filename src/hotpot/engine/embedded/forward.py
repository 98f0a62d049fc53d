"""The decoder's mathematics, laid out for generation: one pass over a stream of tokens.

Owns :func:`forward`. Equal to :class:`hotpot.models.Decoder` up to rounding; the tests hold it to that. Knows no
requests and no sampling.

What differs from the plain decoder, and why:

- The weights are packed (:mod:`.weights`): fewer, larger products, and the rotation one complex
  multiplication.
- Tokens of all requests form one stream without padding; only attention pads (:mod:`.attention`).
- Products of few rows with a large matrix: several threads share the matrix's rows and not those few (a third faster at 32 rows
  on two threads); one thread, and the head, take it as a batch of pieces that fit the processor's cache (a quarter faster at
  49,152 columns on one thread, two fifths on two).
- Of the last layer only keys and values are computed for every token: the rest only for those whose logits are wanted.
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name torch's own documentation uses

from hotpot.engine.embedded.attention import StreamAttention
from hotpot.engine.embedded.weights import PackedLayer, PackedWeights
from hotpot.models import DecoderConfig

_FEW_ROWS, _LARGE, _WIDE, _PIECE = 64, 250_000, 1_000_000, 1024


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
        x = x + _product(attended, layer.o)
        gate, up = _product(F.rms_norm(x, size, layer.post_norm, eps), layer.gate_up).chunk(2, dim=-1)
        x = x + _product(F.silu(gate).mul_(up), layer.down)
    return _wide(F.rms_norm(x, size, weights.norm, eps), weights.head)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x`` float ``[N, in]`` times ``weight`` float ``[out, in]``, transposed: float ``[N, out]``, in any layout."""
    if len(x) > _FEW_ROWS or weight.numel() < _LARGE:
        return F.linear(x, weight)
    if torch.get_num_threads() > 1:
        return torch.mm(weight, x.t()).t()
    return _wide(x, weight)


def _wide(x: Tensor, weight: Tensor) -> Tensor:
    """Like :func:`_product`, in rows, as a batch of products with pieces of ``weight`` that fit the processor's cache."""
    if len(x) > _FEW_ROWS or weight.numel() < _WIDE:
        return F.linear(x, weight)
    whole, rest = divmod(len(weight), _PIECE)
    pieces = weight[: whole * _PIECE].view(whole, _PIECE, x.shape[1]).transpose(1, 2)
    out = torch.bmm(x.expand(whole, -1, -1), pieces).transpose(0, 1).reshape(len(x), whole * _PIECE)
    return torch.cat([out, F.linear(x, weight[-rest:])], dim=1) if rest else out


def _project(
    config: DecoderConfig, layer: PackedLayer, x: Tensor, rotary: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries and keys, and values: float ``[N, heads, head_dim]`` each."""
    heads, both = config.num_heads, config.num_heads + config.num_kv_heads
    flat = _product(x, layer.qkv) if layer.qkv_bias is None else F.linear(x, layer.qkv, layer.qkv_bias)
    qkv = flat.contiguous().view(-1, both + config.num_kv_heads, config.head_dim)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = _norm_and_turn(config, qkv[:, :heads], layer.q_norm, rotary)
        return q, _norm_and_turn(config, qkv[:, heads:both], layer.k_norm, rotary), qkv[:, both:]
    turned = _norm_and_turn(config, qkv[:, :both], None, rotary)
    return turned[:, :heads], turned[:, heads:], qkv[:, both:]


def _project_queries(config: DecoderConfig, layer: PackedLayer, x: Tensor, rotary: Tensor) -> Tensor:
    rows = config.num_heads * config.head_dim
    bias = None if layer.qkv_bias is None else layer.qkv_bias[:rows]
    q = F.linear(x, layer.qkv[:rows], bias).view(-1, config.num_heads, config.head_dim)
    return _norm_and_turn(config, q, layer.q_norm, rotary)


def _project_keys(
    config: DecoderConfig, layer: PackedLayer, x: Tensor, rotary: Tensor
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
