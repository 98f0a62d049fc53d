"""Memory that the main loop and the learner's process both see: records one at a time, weights in two buffers, progress.

Owns where bytes lie. Knows neither learning nor who is at which end. The memory has no name anywhere: it goes with the last
process that holds it, however that ends.

Invariants: a box holds one record at most, and whoever takes it empties it; of the two buffers of weights the one that was
written last is left alone by the next writing.
"""

import json
import math
import mmap
import os
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hotpot.errors import LearnerError
from hotpot.models import Weights
from hotpot.topology.learning.parcels import ALIGNMENT, pack, unpack

_PAGE = 4096


def nameless(name: str) -> int:
    """Return the descriptor of memory without a name that a child can be given; ``name`` is what the system shows of it."""
    make = getattr(os, "memfd_create", None)
    if make is not None:
        return int(make(name))
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Box:
    """Holds one record on its way from one process to the other. Whoever puts knows that the last was taken."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def put(self, record: Any) -> None:
        """Put ``record``; nothing waits. Raises :class:`OSError` where memory is out."""
        with open(self._descriptor, "wb", closefd=False) as file:
            file.seek(0)
            file.writelines(pack(record))
            file.truncate()

    def take(self) -> Any:
        """Take the record out. Raises :class:`LearnerError` where there is none."""
        data = bytearray(os.fstat(self._descriptor).st_size)
        with open(self._descriptor, "rb", closefd=False) as file:
            file.seek(0)
            if not data or file.readinto(data) != len(data):
                raise LearnerError("between the learner's process and its parent there is no whole record")
        os.ftruncate(self._descriptor, 0)
        return unpack(data)


class Progress:
    """A number that one process raises, and when it last did, on the monotonic clock, which processes share."""

    def __init__(self, descriptor: int) -> None:
        os.ftruncate(descriptor, 16)
        view = memoryview(mmap.mmap(descriptor, 16))
        self._counts, self._times = view.cast("q"), view.cast("d")

    def count(self) -> None:
        """Say that one more thing was done."""
        self._counts[0] += 1
        self._times[1] = time.monotonic()

    def read(self) -> tuple[int, float]:
        """Return the number and the time."""
        return self._counts[0], self._times[1]


class WeightBuffers:
    """Two copies of a model's weights, behind a list of what lies where."""

    def __init__(self, layout: Mapping[str, Any], memory: mmap.mmap) -> None:
        self._layout, self._memory = layout, memory

    @classmethod
    def make(cls, descriptor: int, weights: Weights) -> "WeightBuffers":
        """Lay out memory for ``weights``. Raises :class:`OSError` where there is not enough."""
        tensors, size = [], 0
        for name, tensor in weights.items():
            tensors.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size])
            size += math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
        text = json.dumps({"size": size, "tensors": tensors}).encode()
        begin = math.ceil((8 + len(text)) / _PAGE) * _PAGE
        # Asked for now: memory that is missing when it is written to would end the process.
        os.posix_fallocate(descriptor, 0, begin + 2 * size)
        os.pwrite(descriptor, len(text).to_bytes(8, "little") + text, 0)
        return cls.find(descriptor)

    @classmethod
    def find(cls, descriptor: int) -> "WeightBuffers":
        """Return the buffers that were laid out in ``descriptor``."""
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        size = int.from_bytes(memory[:8], "little")
        layout = json.loads(memory[8 : 8 + size])
        return cls({**layout, "begin": math.ceil((8 + size) / _PAGE) * _PAGE}, memory)

    def write(self, buffer: int, weights: Weights) -> None:
        """Copy ``weights`` into a buffer, 0 or 1."""
        places = self.read(buffer)
        for name, tensor in weights.items():
            places[name].copy_(tensor)

    def read(self, buffer: int) -> dict[str, Tensor]:
        """Return the weights in a buffer; they lie there, and stay mapped as long as one of them is held."""
        begin = self._layout["begin"] + buffer * self._layout["size"]
        return {
            name: self._tensor(getattr(torch, dtype), shape, begin + offset)
            for name, dtype, shape, offset in self._layout["tensors"]
        }

    def _tensor(self, dtype: torch.dtype, shape: list[int], offset: int) -> Tensor:
        if not (count := math.prod(shape)):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(shape)
