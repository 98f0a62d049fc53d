"""The engine's copies of the weights, in the layout its forward pass wants.

Owns :class:`PackedWeights` (one buffer) and :func:`load` (fill a buffer, or refuse). Knows neither versions nor which
buffer serves.

Layout: query, key and value projections are one matrix, gate and up projections another. Inside a head the two halves
of the rotary pairs are interleaved, queries and keys alike, so that their products are the same. Nothing is rounded:
what :meth:`PackedWeights.fill` got, :meth:`PackedWeights.unpack` gives back bit for bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from hotpot.errors import EngineError
from hotpot.models import DecoderConfig, Weights, checksum

_KNOWN_SETTINGS = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rope_theta",
    "rms_norm_eps",
    "max_context_tokens",
    "tie_embeddings",
    "qk_norm",
    "attention_bias",
    "initializer_range",
}
"""Fields of a decoder's configuration that the engine's forward pass follows, or that don't matter to it."""


@dataclass(slots=True, eq=False)
class PackedLayer:
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
    """One copy of a decoder's weights in the layout of this module; filled and refilled in place.

    Raises :class:`EngineError` where the configuration has a field that the engine's forward pass does not know.
    """

    def __init__(self, config: DecoderConfig) -> None:
        unknown = sorted({field.name for field in fields(config)} - _KNOWN_SETTINGS)
        if unknown:
            raise EngineError(
                f"the decoder's configuration has {', '.join(unknown)}, which the engine does not compute; teach "
                "forward.py and name it there, or the engine would sample from another model"
            )
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
            PackedLayer(
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


class Buffer(Protocol):
    """A copy of weights that is filled in place."""

    def fill(self, weights: Weights) -> None:
        """Copy ``weights`` here."""

    def unpack(self) -> dict[str, Tensor]:
        """Return them as :meth:`fill` got them, bit for bit."""


def load(buffer: Buffer, weights: Weights) -> str:
    """Copy ``weights`` into ``buffer`` and return their checksum.

    Raises :class:`EngineError` where names, shapes or types do not fit, a value is not finite, or the copy is not what
    its source was just before: something wrote to the source meanwhile.
    """
    expected = {name: tensor.shape for name, tensor in buffer.unpack().items()}
    given = {name: tensor.shape for name, tensor in weights.items()}
    if expected != given:
        wrong = sorted(n for n in expected.keys() | given.keys() if expected.get(n) != given.get(n))
        raise EngineError(
            f"the weights do not fit the engine's model: {wrong[0]} has shape {given.get(wrong[0])}, expected "
            f"{expected.get(wrong[0])} ({len(wrong)} differ); publish weights of the same model"
        )
    for name, tensor in weights.items():
        if tensor.dtype != torch.float32 or not bool(torch.isfinite(tensor).all()):
            raise EngineError(
                f"weight {name} is {tensor.dtype} or holds NaN or infinity; publish finite float32 weights "
                "(look at the last update's loss and gradient norm)"
            )
    with torch.no_grad():
        source = checksum(weights)
        buffer.fill(weights)
        copied = checksum(buffer.unpack())
    if source != copied:
        raise EngineError(
            f"the copied weights have checksum {copied}, their source {source}: they changed while being copied; "
            "publish when no optimiser step is running"
        )
    return copied
