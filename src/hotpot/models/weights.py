"""Weights as a mapping of names to tensors, and their checksum."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
"""Parameters by name, as :class:`hotpot.models.decoder.Decoder` spells them."""


def checksum(weights: Weights) -> str:
    """Return SHA-256 over name, dtype, shape and bytes of every tensor in sorted order, first 32 hexadecimal digits.

    Equal checksums mean equal bits: the pair (policy version, checksum) identifies what sampled a token.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous()
        digest.update(f"{name}\n{tensor.dtype}\n{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def copy_weights(weights: Weights) -> dict[str, Tensor]:
    """Return a detached copy that no optimiser step can reach."""
    return {name: tensor.detach().clone() for name, tensor in weights.items()}
