"""Model folders in the format of transformers: config.json, model.safetensors, tokenizer files.

Owns reading and writing them, whole or not at all. A folder written here loads in transformers unchanged.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hotpot.errors import ModelFilesError
from hotpot.models.decoder import Decoder, DecoderConfig

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


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


def save_model(folder: Path, decoder: Decoder, tokenizer_files: Mapping[str, bytes]) -> None:
    """Write ``decoder`` and its tokenizer as a model folder. Each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in tokenizer_files.items():
        _write(folder / name, data)
    config = config_to_dict(decoder.config)
    _write(folder / "config.json", json.dumps(config, indent=2, sort_keys=True).encode())
    tensors = {_outer(name): tensor.detach().contiguous() for name, tensor in decoder.state_dict().items()}
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    with partial.open("rb") as handle:
        os.fsync(handle.fileno())
    partial.replace(folder / "model.safetensors")


def load_decoder(folder: Path) -> Decoder:
    """Read a decoder from a model folder, in float32.

    Raises :class:`ModelFilesError` where the folder is missing, truncated, or of another architecture.
    """
    if not (folder / "config.json").is_file():
        raise ModelFilesError(
            f"no model at {folder} (no config.json); make one with `hotpot model warmstart RECIPE --out {folder}`"
        )
    try:
        values = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ModelFilesError(
            f"{folder / 'config.json'} is not JSON ({error}); the folder is damaged, make it again"
        ) from None
    decoder = Decoder(config_from_dict(values, source=str(folder)))
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ModelFilesError(
            f"{folder} has no .safetensors file; other weight formats are not read (pickle is unsafe)"
        )
    state: dict[str, torch.Tensor] = {}
    for shard in shards:
        try:
            state.update(load_file(shard))
        except (SafetensorError, OSError) as error:
            raise ModelFilesError(
                f"{shard} is truncated or damaged ({error}); use another checkpoint"
            ) from None
    state = {name.removeprefix("model."): tensor.float() for name, tensor in state.items()}
    if decoder.config.tie_embeddings:
        state.pop("lm_head.weight", None)
    shapes = {name: tensor.shape for name, tensor in decoder.state_dict().items()}
    missing, unexpected = sorted(shapes.keys() - state.keys()), sorted(state.keys() - shapes.keys())
    misshapen = sorted(name for name in shapes.keys() & state.keys() if shapes[name] != state[name].shape)
    if missing or unexpected or misshapen:
        raise ModelFilesError(
            f"{folder}: weights do not match config.json; missing {missing[:3]}, unexpected {unexpected[:3]}, "
            f"of another shape {misshapen[:3]}; the folder mixes two models"
        )
    decoder.load_state_dict(state)
    return decoder


def _outer(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    partial.replace(path)
