"""Numbers that stand for ids, and random numbers that hang on nothing but them.

Owns the hash of an id (64 bits of BLAKE2b) and the mixing of it with a seed (SplitMix64's finaliser: Steele, Lea,
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). There is no state: which number a trajectory gets
depends on its id, the seed and the salt, never on the order of anything.
"""

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def id_keys(ids: Iterable[str]) -> NDArray[np.uint64]:
    """Return the key of each id, uint64 ``[n]``: equal ids, equal keys, in every process."""
    digests = b"".join(hashlib.blake2b(name.encode(), digest_size=8).digest() for name in ids)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)


def mixed(keys: NDArray[np.uint64], salt: int) -> NDArray[np.uint64]:
    """Return uint64 ``[n]``, uniform over all 64-bit numbers and independent between salts and keys."""
    x = keys + np.uint64(salt * _GOLDEN & _MASK)
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def salt_of(*parts: int) -> int:
    """Return a 64-bit salt that depends on all ``parts`` (a seed, an update, a pass)."""
    text = "\n".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def unit(salt: int) -> float:
    """Return the number in [0, 1) that belongs to ``salt``, 53 bits of it."""
    return (salt >> 11) * 2.0**-53
