"""Draws without state: every number is a hash of (seed, issue, what it is for), so a draw can be made again anywhere.

Owns how a chance becomes a choice, and an order of N things that needs no list of them.
"""

from collections.abc import Sequence

from hotpot.ids import sha256_hex

_DIGITS = 13
_WHOLE = 16.0**_DIGITS
_ROUNDS = 4


def chance(seed: int, issue: int, purpose: str) -> float:
    """Return a number in [0, 1), uniform over issues, and independent for each ``purpose``."""
    return int(sha256_hex(f"draw\n{purpose}\n{seed}\n{issue}")[:_DIGITS], 16) / _WHOLE


def choose(weights: Sequence[float], at: float) -> int:
    """Return the index that a chance ``at`` in [0, 1) falls on, where each has ``weights[index]`` (>= 0) of the whole.

    Raises ValueError where all weights are 0.
    """
    total = sum(weights)
    if not total > 0:
        raise ValueError(f"nothing can be drawn where all weights are 0: {list(weights)}")
    left = at * total
    for index, weight in enumerate(weights):
        if left < weight:
            return index
        left -= weight
    return max(index for index, weight in enumerate(weights) if weight > 0)  # what rounding left over


def shuffled(index: int, size: int, key: str) -> int:
    """Return where ``index`` in 0..size-1 comes in the order that ``key`` gives: a bijection, in constant memory.

    A Feistel network over the next even number of bits, walked on until it falls inside (Black and Rogaway, "Ciphers
    with arbitrary finite domains", 2002).
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask, at = (1 << half) - 1, index
    while True:
        left, right = at >> half, at & mask
        for number in range(_ROUNDS):
            mixed = int(sha256_hex(f"order\n{key}\n{number}\n{right}")[:_DIGITS], 16) & mask
            left, right = right, left ^ mixed
        at = left << half | right
        if at < size:
            return at
