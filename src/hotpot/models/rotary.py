"""The rotary embedding (arXiv:2104.09864), halves convention: its angles, and how heads are turned by them."""

import torch
from torch import Tensor

from hotpot.models.decoder_config import DecoderConfig


def rotary_table(config: DecoderConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of every position, float32 ``[max_context_tokens, head_dim]`` each."""
    frequency = config.rope_theta ** (
        -torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    )
    angles = torch.arange(config.max_context_tokens, dtype=torch.float32)[:, None] * frequency
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn ``x`` float ``[..., head_dim]`` by ``rotary``: cosines and sines that broadcast to it."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
