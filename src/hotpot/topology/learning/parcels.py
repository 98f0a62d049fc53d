"""Records between the main loop and the learner's process: a tree in JSON, and the arrays behind it as they are.

Owns how they are spelled and which records there are. Knows no process and no memory. Nothing is pickled: what is not
listed here is refused, so bytes can't become anything else.

Invariant: what is unpacked equals what was packed, arrays and floating-point numbers bit for bit (a NaN outside an
array may change its sign, which says nothing), and its arrays can be written to. ::

    8 bytes: length of the tree │ the tree │ zeros up to a multiple of 64 │ array │ …  (each at a multiple of 64)
"""

import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotpot.errors import HotpotError, LearnerError
from hotpot.experience import TrainingSequence
from hotpot.learner import (
    Agreement,
    CulpritSequence,
    CulpritToken,
    Finding,
    GroupStatistics,
    Halving,
    LearnedSequence,
    Member,
    NonFiniteError,
    OptimizerStep,
    UpdateResult,
)
from hotpot.learner.losses.policy_loss import LossStatistics
from hotpot.learner.update.terms import Kernels, UpdateTerms
from hotpot.topology.learning.protocol import Learned, Work

ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Save:
    """A checkpoint to write: what :meth:`hotpot.learner.Learner.save` is given."""

    folder: Path
    files: Mapping[str, bytes]
    run: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Done:
    """An update that was learned, and which of the two buffers has its weights."""

    learned: Learned
    buffer: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saved:
    """A checkpoint that was written."""

    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Failure:
    """An error of the learner: its class, its words, where it came from, and how far the update had come, if it says so."""

    kind: str
    message: str
    trace: str
    result: UpdateResult | None


_RECORDS: dict[str, type[Any]] = {
    record.__name__: record
    for record in (
        Agreement, CulpritSequence, CulpritToken, Done, Failure, Finding, GroupStatistics, Halving, Kernels, Learned,
        LearnedSequence, LossStatistics, Member, OptimizerStep, Save, Saved, TrainingSequence, UpdateResult, UpdateTerms,
        Work,
    )
}  # fmt: skip

_FIELDS = {name: tuple(field.name for field in fields(record)) for name, record in _RECORDS.items()}


def pack(record: Any) -> list[bytes | memoryview]:
    """Return the bytes of ``record``, in parts; arrays are not copied. Raises :class:`TypeError` where it can't be spelled."""
    arrays = _Arrays()
    tree = json.dumps(_encode(record, arrays)).encode()
    front = len(tree).to_bytes(8, "little") + tree
    return [front, bytes(-len(front) % ALIGNMENT), *arrays.parts]


def unpack(data: bytearray) -> Any:
    """Return the record in ``data``; its arrays lie there."""
    size = int.from_bytes(data[:8], "little")
    base = 8 + size
    return _decode(json.loads(data[8:base].decode()), data, base + -base % ALIGNMENT)


class _Arrays:
    """Arrays one behind the other."""

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = []
        self._size = 0

    def add(self, data: bytes | memoryview) -> int:
        """Take ``data``; return where it begins."""
        begin, padding = self._size, -len(data) % ALIGNMENT
        self.parts += [data, bytes(padding)]
        self._size += len(data) + padding
        return begin


def _encode(value: Any, arrays: _Arrays) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError(f"an array of type {value.dtype} has no bytes of its own")
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        return {"a": [value.dtype.str, list(value.shape), arrays.add(raw)]}
    if is_dataclass(value):
        name = type(value).__name__
        if _RECORDS.get(name) is not type(value):
            raise TypeError(f"{name} is not a record that the learner's process knows")
        return {"r": [name, *(_encode(getattr(value, field), arrays) for field in _FIELDS[name])]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return {"t": [_encode(one, arrays) for one in value]}
    if isinstance(value, list):
        return [_encode(one, arrays) for one in value]
    if isinstance(value, Mapping):
        return {"m": [[key, _encode(one, arrays)] for key, one in value.items()]}
    if isinstance(value, bytes):
        return {"b": [len(value), arrays.add(value)]}
    if isinstance(value, Path):
        return {"p": str(value)}
    raise TypeError(f"{type(value).__name__} can't be given to the learner's process")


def _decode(tree: Any, data: bytearray, base: int) -> Any:
    if isinstance(tree, list):
        return [_decode(one, data, base) for one in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, told),) = tree.items()
    match kind:
        case "a":
            return np.ndarray(tuple(told[1]), np.dtype(told[0]), data, base + told[2])
        case "r":
            values = (_decode(one, data, base) for one in told[1:])
            return _RECORDS[told[0]](**dict(zip(_FIELDS[told[0]], values, strict=True)))
        case "t":
            return tuple(_decode(one, data, base) for one in told)
        case "m":
            return {key: _decode(one, data, base) for key, one in told}
        case "b":
            return bytes(data[base + told[1] : base + told[1] + told[0]])
        case _:
            return Path(told)


def describe(error: Exception) -> Failure:
    """Return what is told of ``error``, by the first of its classes that :func:`revive` knows."""
    known = _errors()
    return Failure(
        kind=next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in known),
        message=str(error),
        trace="".join(traceback.format_exception(error)),
        result=error.result if isinstance(error, NonFiniteError) else None,
    )


def revive(failure: Failure) -> Exception:
    """Return the error that ``failure`` tells of, with the trace of its process as a note."""
    error: Exception
    if failure.result is not None:
        error = NonFiniteError(failure.message, failure.result)
    else:
        error = _errors().get(failure.kind, LearnerError)(failure.message)
    error.add_note(f"In the learner's process:\n{failure.trace}")
    return error


def _errors() -> dict[str, type[Exception]]:
    """Return the errors that arrive as themselves: Hotpot's own, want of memory, and what torch and the system raise."""
    found: dict[str, type[Exception]] = {
        cls.__name__: cls
        for cls in (Exception, RuntimeError, MemoryError, OSError, torch.OutOfMemoryError, HotpotError)
    }
    waiting: list[type[Exception]] = [HotpotError]
    while waiting:
        for cls in waiting.pop().__subclasses__():
            if "__init__" not in vars(cls):
                found[cls.__name__] = cls
            waiting.append(cls)
    return found
