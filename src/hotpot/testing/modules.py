"""Small random models of transformers, for tests of policies that our own decoder does not compute.

Owns a few architectures in sizes that a test can train, with weights large enough that logits differ visibly.
"""

from pathlib import Path
from typing import Any

import torch

from hotpot.models import PolicyTokenizer

_LLAMA_LIKE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
}

KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    },
    "gemma2": {**_LLAMA_LIKE, "sliding_window": 8},
    "cohere": {**_LLAMA_LIKE, "logit_scale": 0.25},
    "llama": _LLAMA_LIKE,
    "mistral": {**_LLAMA_LIKE, "sliding_window": 12},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}
"""Settings by model_type: learned positions, rotary ones in part, soft-capping and windows, scaled logits, our own
family, a window in all layers, linear biases, no attention."""


def make_module(kind: str, *, seed: int = 0, **changes: Any) -> Any:
    """Return a causal language model of transformers of ``kind``, float32, in evaluation mode; ``changes`` are settings.

    It has dropout where the kind has any, and its weights are drawn anew from the seed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    told = {"vocab_size": 40, "max_position_embeddings": 64, **KINDS[kind], **changes}
    config = AutoConfig.for_model(kind, **told, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto: Any = AutoModelForCausalLM
        module = auto.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2, generator=generator)
    return module.eval()


def write_module(
    folder: Path, kind: str, *, seed: int = 0, tokenizer: PolicyTokenizer | None = None, **changes: Any
) -> Path:
    """Write :func:`make_module` to ``folder`` as transformers saves it, with ``tokenizer`` if given; return ``folder``."""
    from hotpot.models.transformers_policy import quiet

    with quiet():
        make_module(kind, seed=seed, **changes).save_pretrained(folder)
    if tokenizer is not None:
        for name, data in tokenizer.files().items():
            (folder / name).write_bytes(data)
    return folder
