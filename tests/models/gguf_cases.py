"""GGUF files for tests: a decoder of ours written as llama.cpp would."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize

from hotpot.models import Decoder
from hotpot.models.gguf_file import _OF_A_LAYER, _OF_THE_MODEL

TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *"0123456789abcdefgh",
    "Ġ",
    "Ċ",
    "ĠĠ",
    "ĊĊ",
    "ab",
    "Ġab",
]
MERGES = ["Ġ Ġ", "Ċ Ċ", "a b", "Ġ ab"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
)


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a projection with the two halves of each head interleaved, as llama.cpp keeps a Llama's."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(weight.shape)


def write_gguf(
    path: Path,
    decoder: Decoder,
    family: str,
    *,
    settings: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    quantised: bool = False,
    split: str = "smollm",
) -> None:
    """Write ``decoder`` as a GGUF file; ``settings`` and ``tensors`` are added to what is in it."""
    config = decoder.config
    writer = GGUFWriter(path, family)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_context_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_license("apache-2.0")
    for name, value in (settings or {}).items():
        writer.add_float32(name, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in {**_tensors(decoder, family), **(tensors or {})}.items():
        if quantised and tensor.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(decoder: Decoder, family: str) -> dict[str, np.ndarray]:
    theirs = {ours: name for name, ours in _OF_THE_MODEL.items()}
    of_a_layer = {ours: name for name, ours in _OF_A_LAYER.items()}
    heads = {"attn_q.weight": decoder.config.num_heads, "attn_k.weight": decoder.config.num_kv_heads}
    found = {}
    for name, tensor in decoder.state_dict().items():
        values, part = tensor.numpy(), ""
        if name.startswith("layers."):
            _, layer, ours = name.split(".", 2)
            part = of_a_layer[ours]
            theirs[name] = f"blk.{layer}.{part}"
        if family == "llama" and part in heads:
            values = interleaved(values, heads[part])
        found[theirs[name]] = values
    return found
