"""The shape of a decoder of the Llama/Qwen family, and how transformers spells it in config.json.

Owns :class:`DecoderConfig` and its two translations. Reads and writes no file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotpot.errors import ModelFilesError

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder. ``head_dim`` 0 means hidden_size / num_heads."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 0
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_context_tokens: int = 2048
    tie_embeddings: bool = True
    qk_norm: bool = False
    attention_bias: bool = False
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.head_dim == 0:
            if self.hidden_size % self.num_heads:
                raise ModelFilesError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}; change either"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise ModelFilesError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; change either"
            )
        if self.head_dim % 2:
            raise ModelFilesError(f"head_dim {self.head_dim} is odd; the rotary embedding needs pairs")


def config_to_dict(config: DecoderConfig) -> dict[str, Any]:
    """Return ``config`` as the config.json of transformers."""
    model_type = "qwen3" if config.qk_norm else "qwen2" if config.attention_bias else "llama"
    return {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_context_tokens,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "initializer_range": config.initializer_range,
        "hidden_act": "silu",
        "mlp_bias": False,
        "bos_token_id": None,
        "dtype": "float32",
    }


def config_from_dict(values: Mapping[str, Any], *, source: str) -> DecoderConfig:
    """Return the shape described by a config.json of transformers.

    Raises :class:`ModelFilesError` where the architecture is none of Llama, Qwen2, Qwen3, or uses a part this decoder
    does not have (rope scaling, sliding windows, other activations).
    """
    model_type = values.get("model_type")
    if model_type not in _ARCHITECTURES:
        raise ModelFilesError(
            f"{source}: model_type {model_type!r} is not one of {sorted(_ARCHITECTURES)}; convert the model, or choose another"
        )
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    unsupported = {
        "rope type": rope.get("rope_type", rope.get("type", "default")) not in ("default", None),
        "sliding window": bool(values.get("use_sliding_window")),
        "activation": values.get("hidden_act", "silu") != "silu",
        "mlp bias": bool(values.get("mlp_bias")),
    }
    for part, present in unsupported.items():
        if present:
            raise ModelFilesError(
                f"{source}: this decoder has no such {part} as config.json asks for; choose another model"
            )
    try:
        return DecoderConfig(
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_layers=values["num_hidden_layers"],
            num_heads=values["num_attention_heads"],
            num_kv_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
            head_dim=values.get("head_dim") or 0,
            rope_theta=float(rope.get("rope_theta") or values.get("rope_theta") or 10000.0),
            rms_norm_eps=values.get("rms_norm_eps", 1e-6),
            max_context_tokens=values.get("max_position_embeddings", 2048),
            tie_embeddings=values.get("tie_word_embeddings", False),
            qk_norm=model_type == "qwen3",
            attention_bias=model_type == "qwen2" or bool(values.get("attention_bias")),
            initializer_range=values.get("initializer_range", 0.02),
        )
    except KeyError as missing:
        raise ModelFilesError(
            f"{source}: config.json has no {missing}; it is not a whole model folder"
        ) from None
