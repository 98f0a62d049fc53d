"""Identifiers and hashes: how every id is spelled, in one place.

Inside a run an *issue* number counts how often the task sampler has issued a task; it never repeats. From it::

    group     "g17"        the episodes of one issued task that share a baseline
    episode   "17.3"       sample 3 of issue 17
    attempt   "17.3.0"     try 0 at that episode
    trajectory "17.3.0"    the root trajectory of that attempt; a fork adds "/1", "/2", ...

Evaluation uses the same spelling behind "v<evaluation number>:". Records of other programs have ids of their own, spelled
otherwise. A refused record that is accepted later gets a new attempt: "+1", "+2", ... behind the id of the refused one. Ids carry no time and no randomness, so two runs
with one seed have the same ids; across runs the pair (run_id, id) is the key.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def canonical_json(value: Any, *, ascii_only: bool = False) -> str:
    """Return ``value`` as JSON with sorted keys and no spaces: equal values give equal text.

    ``ascii_only`` escapes all other letters, which carries even such as UTF-8 can't.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=ascii_only, allow_nan=False)


def sha256_hex(data: bytes | str) -> str:
    """Return the SHA-256 of ``data`` (text as UTF-8) in hexadecimal."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def task_id(env: str, content: str) -> str:
    """Return the id of a task: a hash over the environment's name and the task's canonical content."""
    return "t-" + sha256_hex(f"{env}\n{content}")[:20]


def group_id(issue: int, *, evaluation: int | None = None) -> str:
    """Return the id of the group of episodes that share task issue ``issue``."""
    return f"{_prefix(evaluation)}g{issue}"


def episode_id(issue: int, sample: int, *, evaluation: int | None = None) -> str:
    """Return the id of sample ``sample`` of task issue ``issue``."""
    return f"{_prefix(evaluation)}{issue}.{sample}"


def attempt_id(issue: int, sample: int, attempt: int, *, evaluation: int | None = None) -> str:
    """Return the id of try number ``attempt`` at an episode; also the id of its root trajectory."""
    return f"{_prefix(evaluation)}{issue}.{sample}.{attempt}"


_OWN_ATTEMPT = re.compile(r"(v[0-9]+:)?[0-9]+\.[0-9]+\.[0-9]+")


def is_own_attempt(text: str) -> bool:
    """Whether ``text`` is spelled as the run's own sampler spells attempts, so that it may hand it out one day."""
    return _OWN_ATTEMPT.fullmatch(text) is not None


def first_try(text: str) -> str:
    """Return the id that a trajectory of the run's own would have, had the first try at its episode brought it.

    A try again meets the same random numbers and is the same experience, so what is drawn by id is drawn by this one.
    Other ids stay as they are.
    """
    attempt, slash, fork = text.partition("/")
    return f"{attempt.rpartition('.')[0]}.0{slash}{fork}" if is_own_attempt(attempt) else text


def again(attempt: str, number: int) -> str:
    """Return the id of attempt ``number`` (from 1) to have the refused ``attempt``, itself one of them or not, accepted."""
    head, plus, tail = attempt.rpartition("+")
    return f"{head if plus and tail.isdigit() else attempt}+{number}"


def prefix_hash(tokens: NDArray[np.int32], *, extends: str = "") -> str:
    """Return the next link of a hash chain over chunks of tokens: ``prefix_hash(b, extends=prefix_hash(a))`` is that of
    the chunks ``a``, ``b``.

    ``tokens`` is int32 ``[n]``. The starting value is the empty string. Equal links mean equal chunks in equal order,
    so the chain is a fingerprint of the *steps*: the same tokens in other chunks, or as one, have another hash. A link
    says nothing of where the tokens came from; whoever uses it as proof hashes what was really handed out.
    """
    digest = hashlib.sha256(extends.encode())
    digest.update(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    return digest.hexdigest()[:32]


def batch_hash(parts: Iterable[NDArray[Any]]) -> str:
    """Return a hash over arrays in order (dtype, shape and bytes): equal batches, equal hashes, on any machine."""
    digest = hashlib.sha256()
    for part in parts:
        array = np.ascontiguousarray(part)
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:32]


def _prefix(evaluation: int | None) -> str:
    return "" if evaluation is None else f"v{evaluation}:"
