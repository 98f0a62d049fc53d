"""A model folder for a server of another make, and what a policy says of the tokens such a server sampled.

Owns two things an inference server is held to: the folder it loads (written, read back and compared), and the
log-probabilities it must agree with. Knows no server.
"""

import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file

from hotpot.errors import ModelFilesError
from hotpot.models.disk import write_json, write_tensors
from hotpot.models.policy import Policy

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save_served(folder: Path, policy: Policy) -> None:
    """Write ``policy`` without a tokenizer as a folder in which no two layers share a tensor, and read it back.

    A head that is tied to the embedding is written out, with ``tie_word_embeddings`` false: it is the same model, and a
    server that packs each layer's weights for its own kernels reloads the head too (vLLM's CPU build else keeps the old one).

    Raises :class:`ModelFilesError` where the folder does not hold, bit for bit, what was given.
    """
    folder.mkdir(parents=True, exist_ok=True)
    policy.save(folder)
    config = json.loads((folder / _CONFIG).read_text())
    if config.get("tie_word_embeddings") and (tensors := _read(folder)).keys() >= {_EMBEDDING}:
        write_tensors(folder / _WEIGHTS, tensors | {_HEAD: tensors[_EMBEDDING].clone()})
        write_json(folder / _CONFIG, config | {"tie_word_embeddings": False})
    found = _read(folder)
    for name, tensor in policy.state_dict().items():
        outer = policy.outer_name(name)
        if outer in found and not torch.equal(found[outer], tensor):
            raise ModelFilesError(f"{folder / _WEIGHTS}: {outer} is not what was written; look at the disk")


@torch.inference_mode()
def next_token_logprobs(policy: Policy, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return what ``policy`` says behind each token, softmax at temperature 1: float32 ``[n, vocab_size]``.

    ``tokens`` int32 ``[n]``; row t is the distribution of token t + 1.
    """
    row = torch.from_numpy(tokens.astype(np.int64))[None]
    hidden = policy(row, torch.arange(row.shape[1])[None])
    found: NDArray[np.float32] = policy.logits(hidden)[0].log_softmax(dim=-1).numpy()
    return found


def _read(folder: Path) -> dict[str, torch.Tensor]:
    try:
        return dict(load_file(folder / _WEIGHTS))
    except (SafetensorError, OSError) as error:
        raise ModelFilesError(
            f"{folder / _WEIGHTS} cannot be read back ({error}); look at the disk"
        ) from None
