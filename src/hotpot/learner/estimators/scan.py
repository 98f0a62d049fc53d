"""The backward linear recurrence under every discounted sum: x(t) = delta(t) + factor(t) * x(t + 1).

Owns its fast computation; knows nothing of rewards. A factor of 0 ends a sequence, so any number of ragged sequences
stand end to end in one array, without padding.

The array is laid out as about sqrt(n) blocks that are scanned side by side, then what each block passes to the one before
it is carried over (Blelloch, "Prefix sums and their applications", 1990): about 2 sqrt(n) steps instead of n.
"""

import math

import numpy as np
from numpy.typing import NDArray

_LOOP_BELOW = 64
"""Shorter arrays are scanned one by one: blocks would cost more than they save."""


def scan_back(delta: NDArray[np.float64], factor: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return x float64 ``[n]`` with x(n) = 0 from ``delta`` and ``factor`` float64 ``[n]``."""
    size = len(delta)
    if size < _LOOP_BELOW:
        return _one_by_one(delta, factor)
    length = math.isqrt(size - 1) + 1
    blocks = -(-size // length)
    # Row i holds the i-th place of every block, so each step below reads and writes contiguous memory.
    sums, products = np.zeros((blocks, length)), np.zeros((blocks, length))
    sums.reshape(-1)[:size] = delta
    products.reshape(-1)[:size] = factor
    sums, products = np.ascontiguousarray(sums.T), np.ascontiguousarray(products.T)
    for row in range(length - 2, -1, -1):
        sums[row] += products[row] * sums[row + 1]
        products[row] *= products[row + 1]
    carried = np.zeros(blocks)
    carried[:-1] = _one_by_one(sums[0], products[0])[1:]
    sums += products * carried
    return np.ascontiguousarray(sums.T).reshape(-1)[:size]


def _one_by_one(delta: NDArray[np.float64], factor: NDArray[np.float64]) -> NDArray[np.float64]:
    out, following = [0.0] * len(delta), 0.0
    deltas, factors = delta.tolist(), factor.tolist()
    for place in range(len(deltas) - 1, -1, -1):
        following = deltas[place] + factors[place] * following
        out[place] = following
    return np.array(out, dtype=np.float64)
