"""The policy's forward pass: a compact decoder of the Llama/Qwen family. The learner computes with it.

It defines the mathematics: the embedded engine computes the same with packed weights and a cache of its own
(:mod:`hotpot.engine.embedded.forward`), and tests hold the two to each other. Owns the mathematics from token ids to
logits, and a plain key/value cache. Knows nothing of sampling,
losses or files. Parameter names are those of transformers (without the leading ``model.``), so weights travel
unchanged. Sources: RMSNorm (arXiv:1910.07467), rotary embedding (arXiv:2104.09864), SwiGLU (arXiv:2002.05202),
grouped-query attention (arXiv:2305.13245), q/k norm as in Qwen3 (arXiv:2505.09388).

Invariants: a token's hidden state depends on no later position of its row and on no other row; without a cache,
right-padding changes nothing before it.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name torch's own documentation uses
from torch.utils.checkpoint import checkpoint

from hotpot.models.decoder_config import DecoderConfig, config_to_dict
from hotpot.models.disk import write_json, write_tensors
from hotpot.models.elementwise import Rotary, rms_norm, rotate, swiglu
from hotpot.models.exact import Projection, exact_weights, fits, linear
from hotpot.models.exact_rows import Grid, exact_hidden_states
from hotpot.models.policy import PastTokens, Policy
from hotpot.models.rotary import rotary_table


class KeyValueCache:
    """Keys and values of past tokens: per layer float ``[slots, num_kv_heads, capacity, head_dim]``.

    A row of the first axis belongs to one context; position p of a context lies at index p. Entries past a row's
    length hold garbage and must be masked by the caller.
    """

    def __init__(
        self, config: DecoderConfig, slots: int, capacity: int, *, dtype: torch.dtype = torch.float32
    ) -> None:
        shape = (slots, config.num_kv_heads, capacity, config.head_dim)
        self.slots, self.capacity = slots, capacity
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_layers)]

    def write(
        self, layer: int, rows: slice | Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Store ``keys``/``values`` float ``[B, num_kv_heads, T, head_dim]`` of ``rows`` at ``positions`` int64 ``[B, T]``."""
        index = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        self.keys[layer][index[:, None], :, positions] = keys.transpose(1, 2)
        self.values[layer][index[:, None], :, positions] = values.transpose(1, 2)

    def read(self, layer: int, rows: slice | Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the first ``length`` keys and values of ``rows``: a view for a slice, a copy for an index tensor."""
        return self.keys[layer][rows][:, :, :length], self.values[layer][rows][:, :, :length]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` float ``[..., size]``."""
        return rms_norm(x.to(self.weight.dtype), self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        positions: Tensor,
        cache: PastTokens | None,
        rows: slice | Tensor | None,
        attend: Tensor | None,
    ) -> Tensor:
        """Attend; shapes as in :meth:`Decoder.forward`."""
        config = self.config
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, config.num_heads, config.head_dim)
        k = self.k_proj(x).view(batch, length, config.num_kv_heads, config.head_dim)
        v = self.v_proj(x).view(batch, length, config.num_kv_heads, config.head_dim).transpose(1, 2)
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q.transpose(1, 2), rotary), rotate(k.transpose(1, 2), rotary)
        if cache is not None:
            if rows is None or attend is None:
                raise ValueError("a cache needs rows and attend")
            cache.write(self.layer, rows, positions, k, v)
            k, v = cache.read(self.layer, rows, attend.shape[-1])
        grouped = config.num_kv_heads != config.num_heads
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attend, is_causal=attend is None, enable_gqa=grouped
        )
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


class FeedForward(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` float ``[..., hidden_size]`` to the same shape."""
        out: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return out


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        positions: Tensor,
        cache: PastTokens | None,
        rows: slice | Tensor | None,
        attend: Tensor | None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Apply attention and feed-forward, each with its residual; shapes as in :meth:`Decoder.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, positions, cache, rows, attend)
        if wanted is not None:
            x = x.flatten(0, 1).index_select(0, wanted)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(Policy):
    """A policy of the Llama/Qwen family: it packs, and it takes a cache."""

    implementation = "hotpot"
    config: DecoderConfig
    packs = caches = checkpoints = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.can_be_exact = fits(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        cos, sin = rotary_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.cos: Tensor
        self.sin: Tensor

    def initialize(self, seed: int) -> None:
        """Draw every weight from N(0, initializer_range), zero the biases; the same seed gives the same weights."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                if name.endswith("norm.weight"):
                    parameter.fill_(1.0)
                elif name.endswith("bias"):
                    parameter.zero_()
                else:
                    parameter.normal_(0.0, self.config.initializer_range, generator=generator)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        *,
        cache: PastTokens | None = None,
        rows: slice | Tensor | None = None,
        attend: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states, see :meth:`hotpot.models.Policy.forward`.

        Only ``wanted`` tokens pass the last layer's feed-forward.
        """
        again = self.gradient_checkpointing and torch.is_grad_enabled()
        if self.exact:
            weights = exact_weights(self.config, dict(self.named_parameters()))
            grid = Grid(positions=positions, cache=cache, rows=rows, attend=attend)
            return exact_hidden_states(
                weights, (self.cos, self.sin), tokens, grid, wanted, checkpointing=again
            )
        x = self.embed_tokens(tokens)
        rotary = (self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1))
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            given = (x, rotary, positions, cache, rows, attend, wanted if index == last else None)
            x = _kept_by_its_input(layer, *given) if again else layer(*given)
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits float32 ``[..., vocab_size]`` of hidden states float ``[..., hidden_size]``."""
        weight = self.embed_tokens.weight if self.config.tie_embeddings else self.lm_head.weight
        if self.exact:
            flat = linear(hidden.reshape(-1, hidden.shape[-1]), Projection(weight=weight))
            return flat.view(*hidden.shape[:-1], -1)
        return F.linear(hidden, weight).float()

    def outer_name(self, name: str) -> str:
        """Return the name that transformers gives the parameter (or module) ``name``."""
        return name if name.startswith("lm_head.") else f"model.{name}"

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors; see :meth:`hotpot.models.Policy.save`."""
        write_json(folder / "config.json", config_to_dict(self.config))
        state = self.state_dict()
        write_tensors(folder / "model.safetensors", {self.outer_name(name): state[name] for name in state})


def _kept_by_its_input(layer: nn.Module, *given: object) -> Tensor:
    """Return what ``layer`` makes of ``given``; it is computed again for the gradient. No layer draws random numbers."""
    out: Tensor = checkpoint(layer, *given, use_reentrant=False, preserve_rng_state=False)
    return out
