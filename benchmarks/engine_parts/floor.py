"""The floor of a round: its floating-point operations, at the speed of a large square product in the same process.

A product of an ``[m, k]`` and a ``[k, n]`` matrix is 2 m k n operations. Counted are the linear layers of each token that is
computed, attention over the tokens before it, and the head of each token that is sampled; norms, activations and sampling
are not: the floor is what cannot be saved.
"""

import statistics
import time

import torch

from hotpot.models import DecoderConfig

SQUARE = 2048
"""Rows and columns of the product, float32: large enough to be bound by arithmetic, not by memory."""


def layer_operations(config: DecoderConfig) -> int:
    """Operations of all linear layers but the head, for one token."""
    heads = config.num_heads * config.head_dim
    attention = config.hidden_size * (2 * heads + 2 * config.num_kv_heads * config.head_dim)
    return 2 * config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def head_operations(config: DecoderConfig) -> int:
    """Operations of the head, for one token."""
    return 2 * config.hidden_size * config.vocab_size


def attention_operations(config: DecoderConfig, context: int) -> int:
    """Operations of attention for one token that sees ``context`` tokens: its scores, and the sum of values."""
    return 4 * config.num_layers * config.num_heads * config.head_dim * context


def operations(config: DecoderConfig, *, computed: int, sampled: int, seen: int) -> int:
    """Operations of a round that computes ``computed`` tokens, samples ``sampled``, and whose computed tokens see
    ``seen`` tokens in sum."""
    return (
        computed * layer_operations(config)
        + sampled * head_operations(config)
        + attention_operations(config, seen)
    )


def product_speed(repeats: int = 5) -> float:
    """Return operations a second of a large square product, the median of ``repeats``, with this process's threads."""
    left, right = torch.rand(SQUARE, SQUARE), torch.rand(SQUARE, SQUARE)
    out = torch.empty(SQUARE, SQUARE)
    torch.mm(left, right, out=out)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        torch.mm(left, right, out=out)
        seconds.append(time.perf_counter() - started)
    return 2 * SQUARE**3 / statistics.median(seconds)
