"""Files of a model folder, each whole or not at all: written beside its place, synced, renamed into it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor


def write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``."""
    partial = _partial(path)
    partial.write_bytes(data)
    settle(partial, path)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write ``values`` to ``path`` as JSON, keys sorted."""
    write_bytes(path, json.dumps(values, indent=2, sort_keys=True).encode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` to ``path`` as safetensors. No two of them may share memory."""
    partial = _partial(path)
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
        partial,
        metadata={"format": "pt"},
    )
    settle(partial, path)


def settle(partial: Path, final: Path) -> None:
    """Sync ``partial`` and put it in the place of ``final``."""
    with partial.open("rb") as handle:
        os.fsync(handle.fileno())
    partial.replace(final)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")
