"""Model folders in the format of transformers: config.json, model.safetensors, tokenizer files.

Owns reading and writing them, whole or not at all. A folder written here loads in transformers unchanged.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from hotpot.errors import ModelFilesError
from hotpot.models.decoder import Decoder
from hotpot.models.decoder_config import config_from_dict, not_computed
from hotpot.models.disk import write_bytes
from hotpot.models.policy import Policy

Implementation = Literal["auto", "hotpot", "transformers"]


def save_model(folder: Path, policy: Policy, tokenizer_files: Mapping[str, bytes]) -> None:
    """Write ``policy`` and its tokenizer (and other small files) as a model folder; each appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in tokenizer_files.items():
        write_bytes(folder / name, data)
    policy.save(folder)


def generation_config(stop_tokens: Sequence[int], *, pad_id: int) -> dict[str, bytes]:
    """Return generation_config.json by name: the ids at which transformers and vLLM end a generation, and no sampling
    parameters, so that both sample from the whole distribution at temperature 1."""
    told = {"do_sample": True, "eos_token_id": list(stop_tokens), "pad_token_id": pad_id}
    return {"generation_config.json": json.dumps(told, indent=2, sort_keys=True).encode()}


def load_policy(folder: Path, implementation: Implementation = "auto") -> Policy:
    """Read a policy from a model folder, in float32: the one place that says who computes which model.

    ``auto``: this package's decoder where it computes all that config.json asks for, else transformers. ``hotpot`` and
    ``transformers``: that one, or an error.
    Raises :class:`ModelFilesError` where the folder is missing, truncated, or of an architecture nobody computes.
    """
    values = read_config(folder)
    ours = implementation == "hotpot" or (implementation == "auto" and not not_computed(values))
    if ours:
        return load_decoder(folder)
    from hotpot.models.transformers_folder import load_module  # transformers takes seconds to import

    return load_module(folder, values)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a model folder. Raises :class:`ModelFilesError` where there is none, or no JSON in it."""
    if not (folder / "config.json").is_file():
        raise ModelFilesError(
            f"no model at {folder} (no config.json); make one with `hotpot model warmstart RECIPE --out {folder}`"
        )
    try:
        values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise ModelFilesError(
            f"{folder / 'config.json'} is not JSON ({error}); the folder is damaged, make it again"
        ) from None
    return values


def load_decoder(folder: Path) -> Decoder:
    """Read a decoder from a model folder, in float32.

    Raises :class:`ModelFilesError` where the folder is missing, truncated, or of another architecture.
    """
    decoder = Decoder(config_from_dict(read_config(folder), source=str(folder)))
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
