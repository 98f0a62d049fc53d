"""Model folders in the format of transformers: config.json, model.safetensors, tokenizer files.

Owns reading and writing them, whole or not at all. A folder written here loads in transformers unchanged.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from hotpot.errors import ModelFilesError
from hotpot.models.decoder import Decoder
from hotpot.models.decoder_config import config_from_dict
from hotpot.models.disk import write_bytes
from hotpot.models.policy import Policy


def save_model(folder: Path, policy: Policy, tokenizer_files: Mapping[str, bytes]) -> None:
    """Write ``policy`` and its tokenizer as a model folder. Each file appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in tokenizer_files.items():
        write_bytes(folder / name, data)
    policy.save(folder)


def load_policy(folder: Path) -> Policy:
    """Read a policy from a model folder, in float32.

    Raises :class:`ModelFilesError` where the folder is missing, truncated, or of another architecture.
    """
    return load_decoder(folder)


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
