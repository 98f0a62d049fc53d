"""Counter-based random numbers: the number that samples a token is a pure function of what the token is.

Owns Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011), vectorised
over a batch, and the layout of its counter. There is no state: nothing depends on the attempt, the batch, the order
of requests or the engine.

Layout: key = the seed (64 bits), counter = (issue, sample, step, position), 32 bits each.
"""

import numpy as np
from numpy.typing import NDArray

from hotpot.types import SampleKey

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10

Words = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]
"""Four words of 32 bits each, held in uint64 so that a product keeps its high half."""


def philox(counter: Words, key: tuple[NDArray[np.uint64], NDArray[np.uint64]]) -> Words:
    """Return Philox4x32-10 of ``counter`` under ``key``; arrays of one shape, each value below 2**32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        even = c0 * _MULTIPLIERS[0]
        odd = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (odd >> _HALF) ^ c1 ^ k0, odd & _LOW, (even >> _HALF) ^ c3 ^ k1, even & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def check_key(key: SampleKey) -> None:
    """Raise :class:`ValueError` where a part of ``key`` does not fit its word of the counter."""
    for name, bits in (("seed", 64), ("issue", 32), ("sample", 32), ("step", 32)):
        value = getattr(key, name)
        if not 0 <= value < 1 << bits:
            raise ValueError(
                f"the sample key's {name} is {value}; it must be at least 0 and below 2**{bits}, "
                "since two keys must never share a random number"
            )


def uniforms(keys: list[SampleKey], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each key and position: float64 ``[len(keys), len(positions)]``, 53 bits each.

    ``positions`` int64 ``[n]`` count tokens inside the step from 0. Keys must have passed :func:`check_key`.
    """
    parts = np.array(
        [(key.seed & 0xFFFFFFFF, key.seed >> 32, key.issue, key.sample, key.step) for key in keys],
        dtype=np.uint64,
    ).reshape(-1, 5)
    shape = (len(keys), len(positions))
    low, high, issue, sample, step = (np.broadcast_to(parts[:, index, None], shape) for index in range(5))
    position = np.broadcast_to(positions.astype(np.uint64), shape)
    first, second, _, _ = philox((issue, sample, step, position), (low, high))
    # 53 bits: 32 of the first word, the upper 21 of the second.
    bits = (first << np.uint64(21)) | (second >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53


_WHOLE_REQUEST = 0xFFFFFFFF
"""The position that stands for a request as a whole; no token reaches it."""


def request_seed(key: SampleKey) -> int:
    """Return 63 bits that seed the generator of an engine whose random numbers are its own: Philox at a position of no token.

    Two keys that differ give seeds that are unrelated. ``key`` must have passed :func:`check_key`.
    """
    words = [np.array([part], dtype=np.uint64) for part in (key.issue, key.sample, key.step, _WHOLE_REQUEST)]
    low, high = (np.array([part], dtype=np.uint64) for part in (key.seed & 0xFFFFFFFF, key.seed >> 32))
    first, second, _, _ = philox((words[0], words[1], words[2], words[3]), (low, high))
    return (int(first[0]) << 31) | (int(second[0]) >> 1)
