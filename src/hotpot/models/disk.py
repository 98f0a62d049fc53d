"""Files of a model folder, and model folders, whole or not at all: written beside their place, renamed into it."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from hotpot.errors import ModelFilesError


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


def check_new_folder(out: Path, *, overwrite: bool) -> None:
    """Refuse a model folder that can't be written, before the work that is to go into it.

    Raises :class:`ModelFilesError` where ``out`` is something else, exists without ``overwrite``, or can't be made.
    """
    if out.exists() and not (out / "config.json").is_file():
        raise ModelFilesError(f"{out} exists and is no model folder; it will not be replaced, choose another")
    if out.exists() and not overwrite:
        raise ModelFilesError(f"{out} exists; choose another folder, or give --overwrite")
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ModelFilesError(
            f"{out} can't be made: {above} is no folder, or can't be written; choose another folder"
        )


def replace_folder(out: Path, save: Callable[[Path], None]) -> None:
    """Let ``save`` write a model folder beside ``out``, and put it in the place of ``out``."""
    partial = _partial(out)
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.parent.mkdir(parents=True, exist_ok=True)
        save(partial)
        if out.exists():
            shutil.rmtree(out)
        partial.replace(out)
    except OSError as error:
        raise ModelFilesError(
            f"{out} can't be written: {error}; check space, or choose another folder"
        ) from error
