"""Folders whose model transformers computes: what is refused before it is loaded, and loading it.

Owns the rules. Local files only, safetensors only, no code out of the folder, float32. Imported only where such a model
is loaded.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hotpot.errors import ModelFilesError
from hotpot.ids import canonical_json
from hotpot.models.probe import probe
from hotpot.models.transformers_policy import TransformersConfig, TransformersPolicy, quiet

UNBOUNDED_CONTEXT_TOKENS = 2**20
"""Context of a model whose configuration names none (recurrent ones, those with linear biases)."""

_OF_THE_FILE = (
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
"""Entries of a configuration that say nothing of what is computed."""


def load_module(folder: Path, values: Mapping[str, Any]) -> TransformersPolicy:
    """Read a model of transformers from ``folder``, whose config.json holds ``values``, and probe what it can do.

    Raises :class:`ModelFilesError` where transformers can't load it from these files alone, or it can't be a policy.
    """
    check_folder(folder, values)
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                dtype=torch.float32,
                output_loading_info=True,
            )
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
        raise ModelFilesError(
            f"{folder}: transformers {transformers.__version__} can't load it ({type(error).__name__}: {error}); the "
            "folder is damaged or of a later version: use another checkpoint"
        ) from error
    module, info = loaded
    missing = sorted([*info["missing_keys"], *(str(key[0]) for key in info["mismatched_keys"])])
    if missing:
        raise ModelFilesError(
            f"{folder}: weights do not match config.json; missing or of another shape {missing[:3]}; the folder mixes "
            "two models"
        )
    policy = TransformersPolicy(module, _shape(module.config, type(module).__name__))
    probe(policy, source=str(folder))
    return policy


def check_folder(folder: Path, values: Mapping[str, Any]) -> None:
    """Raise :class:`ModelFilesError` where a folder with this config.json can't or must not be loaded."""
    kind = values.get("model_type")
    problem = ""
    if (folder / "adapter_config.json").is_file():
        problem = "holds an adapter (adapter_config.json), no whole model; merge it into its model"
    elif kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and "auto_map" in values:
        problem = (
            f"has model_type {kind!r}, which comes with code of its own (auto_map); code out of a model folder is never "
            "run: choose a model that transformers has"
        )
    elif kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        problem = (
            f"has model_type {kind!r}, which is no causal language model of transformers {transformers.__version__}; "
            "choose another model, or a later transformers"
        )
    elif values.get("quantization_config"):
        problem = (
            "has quantised weights (quantization_config), which can't be trained; use the model in float"
        )
    elif not any(folder.glob("*.safetensors")):
        problem = "has no .safetensors file; other weight formats are not read (pickle is unsafe)"
    if problem:
        raise ModelFilesError(f"{folder} {problem}")


def _shape(config: PreTrainedConfig, architecture: str) -> TransformersConfig:
    told = config.to_dict()
    settings = {key: value for key, value in told.items() if key not in _OF_THE_FILE}
    text = config.get_text_config()
    return TransformersConfig(
        architecture=architecture,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        max_context_tokens=_context(text),
        settings=canonical_json(settings),
    )


def _context(config: PreTrainedConfig) -> int:
    """Return the longest context at which a token's hidden state does not hang on how long others are.

    Rotary embeddings of type "longrope" change beyond the length they were first trained at, for all rows of a pass.
    """
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if longest is None:
        return UNBOUNDED_CONTEXT_TOKENS
    rope = getattr(config, "rope_parameters", None) or {}
    first = rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    if rope.get("rope_type") == "longrope" and first:
        return min(longest, int(first))
    return longest
