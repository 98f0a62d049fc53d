"""The decoder's mathematics so that a token's result does not hang on its company, bit for bit: float32, one thread.

Owns the one layer that engine and learner both compute with in deterministic mode, its attention, and the
log-probabilities. Knows no cache and no batch: whoever calls it says what a query may see.

A matrix kernel chooses its order of summation by the shape of the whole product. What was measured of torch's kernels on
processors of x86 (docs/logprobs.md), and what is made of it:

====================  ==============================================  ===========================================
operation             a row's bits hang on                            here
====================  ==============================================  ===========================================
linear layer          fewer than 4 rows                               rows padded to a multiple of ``ROWS``
SiLU                  elements beyond the last 16                     the same; gate and up projection apart
queries x keys        fewer than 4 rows, fewer than 16 keys           ``QUERY_ROWS``; keys a multiple of ``LANES``
softmax               a number of keys that is no multiple of 8       the same; what is hidden weighs exactly 0
weights x values      how many keys are summed, above 192             at most ``KEYS`` summed at once, from position 0
norms, log-softmax    nothing                                         -
====================  ==============================================  ===========================================

Invariants: key i of a query is the token at position i of its context; a hidden key adds exactly nothing, so padding
behind a context (of finite numbers) changes no bit, and neither do company, order, the cut of a prompt into pieces, or
keys that were kept from earlier passes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name torch's own documentation uses

from hotpot.errors import HotpotError
from hotpot.models.decoder_config import DecoderConfig
from hotpot.models.rotary import rotate

ROWS = 16
"""Rows of a linear layer and of what is computed element by element come in multiples of this."""
QUERY_ROWS = 4
"""Fewest rows of a product of queries and keys."""
LANES = 16
"""Keys come in multiples of this."""
KEYS = 128
"""Keys whose values are summed by one product; the sums are added in order of position."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From queries, keys and values float ``[N, heads, head_dim]`` of a layer's tokens to what the wanted ones of them attend
to: float ``[M, num_heads * head_dim]``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """A linear map, float32 ``[out, in]``, and its bias ``[out]``."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """One layer's weights by the decoder's names; norms float32 ``[size]``."""

    input_norm: Tensor
    q: Projection
    k: Projection
    v: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Projection
    post_norm: Tensor
    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExactWeights:
    """A decoder's weights, not copied: what is written into the tensors they came from is what computes."""

    config: DecoderConfig
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


def exact_weights(config: DecoderConfig, named: Mapping[str, Tensor]) -> ExactWeights:
    """Return the weights ``named`` as :class:`hotpot.models.Decoder` names them."""

    def projection(name: str) -> Projection:
        return Projection(weight=named[f"{name}.weight"], bias=named.get(f"{name}.bias"))

    def layer(at: str) -> LayerWeights:
        return LayerWeights(
            input_norm=named[f"{at}.input_layernorm.weight"],
            q=projection(f"{at}.self_attn.q_proj"),
            k=projection(f"{at}.self_attn.k_proj"),
            v=projection(f"{at}.self_attn.v_proj"),
            q_norm=named.get(f"{at}.self_attn.q_norm.weight"),
            k_norm=named.get(f"{at}.self_attn.k_norm.weight"),
            o=projection(f"{at}.self_attn.o_proj"),
            post_norm=named[f"{at}.post_attention_layernorm.weight"],
            gate=projection(f"{at}.mlp.gate_proj"),
            up=projection(f"{at}.mlp.up_proj"),
            down=projection(f"{at}.mlp.down_proj"),
        )

    embedding = named["embed_tokens.weight"]
    return ExactWeights(
        config=config,
        embedding=embedding,
        layers=tuple(layer(f"layers.{index}") for index in range(config.num_layers)),
        norm=named["norm.weight"],
        head=embedding if config.tie_embeddings else named["lm_head.weight"],
    )


def fits(config: DecoderConfig) -> bool:
    """Return whether a decoder of this shape computes exactly: heads of 6 and 10 were found not to, multiples of 4 to."""
    return config.head_dim % 4 == 0


def require_one_thread() -> None:
    """Raise :class:`HotpotError` where products are computed by several threads: their shares would decide the bits."""
    if (threads := torch.get_num_threads()) != 1:
        raise HotpotError(
            f"exact arithmetic holds on one thread, and torch computes with {threads}; call use_threads(1), as a run with "
            "run.deterministic = true does"
        )


def padding(count: int, multiple: int) -> int:
    """Return how many are missing from ``count`` to a multiple of ``multiple``."""
    return -count % multiple


def linear(x: Tensor, projection: Projection) -> Tensor:
    """Map ``x`` float32 ``[N, in]`` to ``[N, out]``."""
    if missing := padding(len(x), ROWS):
        return F.linear(F.pad(x, (0, 0, 0, missing)), projection.weight, projection.bias)[:-missing]
    return F.linear(x, projection.weight, projection.bias)


def layer_output(
    config: DecoderConfig,
    weights: LayerWeights,
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    attend: Attend,
    wanted: Tensor | None = None,
) -> Tensor:
    """Return one layer's output for ``x`` float32 ``[N, hidden_size]``, N a multiple of ``ROWS``.

    ``rotary``: cosines and sines float32 ``[N, 1, head_dim]``. ``wanted`` int64 ``[M]``, M a multiple of ``ROWS``: only
    these tokens pass the feed-forward, in this order, and ``attend`` answers for these only.
    """
    size, eps = (config.hidden_size,), config.rms_norm_eps
    heads = (len(x), -1, config.head_dim)
    normed = F.rms_norm(x, size, weights.input_norm, eps)
    q, k = linear(normed, weights.q).view(heads), linear(normed, weights.k).view(heads)
    if weights.q_norm is not None and weights.k_norm is not None:
        q = F.rms_norm(q, (config.head_dim,), weights.q_norm, eps)
        k = F.rms_norm(k, (config.head_dim,), weights.k_norm, eps)
    v = linear(normed, weights.v).view(heads)
    attended = attend(rotate(q, rotary), rotate(k, rotary), v)
    x = (x if wanted is None else x[wanted]) + linear(attended, weights.o)
    normed = F.rms_norm(x, size, weights.post_norm, eps)
    return x + linear(F.silu(linear(normed, weights.gate)) * linear(normed, weights.up), weights.down)


def attention(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """Return what queries attend to: float32 ``[B, T, num_heads, head_dim]``.

    ``q`` float32 ``[B, T, num_heads, head_dim]``; ``keys``, ``values`` float32 ``[B, num_kv_heads, S, head_dim]``, S a
    multiple of ``LANES``, key i at position i of its context; ``hidden`` float32 ``[B or 1, T, S]``: minus infinity where a
    query does not see a key, else 0. Every query sees a key.
    """
    batch, count, heads, dim = q.shape
    kv_heads, length = keys.shape[1:3]
    group = heads // kv_heads
    # Queries of one key/value head are the rows of one product.
    rows = (q * dim**-0.5).view(batch, count, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(batch * kv_heads, group * count, dim)
    scores = _product(torch.bmm, rows, keys.reshape(-1, length, dim).transpose(1, 2))
    scores.view(batch, kv_heads, group, count, length).add_(hidden[:, None, None])
    mixed = _product(_mix, torch.softmax(scores, -1), values.reshape(-1, length, dim))
    out = mixed.view(batch, kv_heads, group, count, dim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, count, heads, dim)


def log_distribution(logits: Tensor, temperature: float) -> Tensor:
    """Return the logarithm of softmax(logits / temperature), float32 ``[M, vocab_size]``."""
    return (logits if temperature == 1.0 else logits / temperature).log_softmax(dim=-1)


def _mix(weights: Tensor, values: Tensor) -> Tensor:
    """Return ``weights`` float32 ``[N, R, S]`` times ``values`` float32 ``[N, S, head_dim]``."""
    out = torch.bmm(weights[:, :, :KEYS], values[:, :KEYS])
    for start in range(KEYS, weights.shape[-1], KEYS):
        part = slice(start, start + KEYS)
        out = torch.baddbmm(out, weights[:, :, part], values[:, part])
    return out


def _product(multiply: Callable[[Tensor, Tensor], Tensor], rows: Tensor, other: Tensor) -> Tensor:
    """Return ``multiply(rows, other)``, computed with at least ``QUERY_ROWS`` of ``rows`` float ``[N, R, K]``."""
    missing = QUERY_ROWS - rows.shape[1]
    if missing <= 0:
        return multiply(rows, other)
    return multiply(F.pad(rows, (0, 0, 0, missing)), other)[:, :-missing].contiguous()
