"""A learner on disk: an ordinary model folder, the optimiser's moments and the learner's counters.

Owns ``learner/optimizer.safetensors`` and ``learner.json``; the rest is :mod:`hotpot.models`'s, which takes every
``*.safetensors`` beside ``config.json`` for weights, hence the sub-folder. ``learner.json`` is the checkpoint's manifest:
written last, with the checksums of all tensors, so a folder whose writing was cut, or that mixes two checkpoints, is
refused. Under ``run`` it keeps what the run says of itself at that point, which this module carries and does not read.
No file is pickled. Reading changes nothing unless all of it is good.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hotpot.errors import ModelFilesError
from hotpot.experience.crashpoints import reach
from hotpot.models import Decoder, checksum, load_decoder, save_model

FORMAT = 2
"""Version of ``learner.json`` and of the names in ``learner/optimizer.safetensors``. Version 1 had no ``run``."""

STATE = "learner.json"
MOMENTS = "learner/optimizer.safetensors"

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Last update learned, optimiser steps taken so far, and the trajectories named by each step skipped in a row."""

    update: int
    optimizer_steps: int
    skipped_in_a_row: tuple[tuple[str, ...], ...]


def write(
    folder: Path,
    decoder: Decoder,
    optimizer: torch.optim.Optimizer,
    counters: Counters,
    tokenizer_files: Mapping[str, bytes],
    run: Mapping[str, Any] | None = None,
) -> None:
    """Write weights, tokenizer, moments and counters to ``folder``; each file appears whole or not at all.

    ``run`` (JSON values) is kept in the manifest for :func:`read_manifest`.
    """
    # An old learner.json beside new tensors would be refused, but one beside half-new ones must not exist at all.
    (folder / STATE).unlink(missing_ok=True)
    save_model(folder, decoder, tokenizer_files)
    reach("checkpoint_weights")
    moments = _moments(decoder, optimizer)
    (folder / MOMENTS).parent.mkdir(exist_ok=True)
    partial = folder / f"{MOMENTS}.partial"
    save_file(moments, partial)
    _settle(partial, folder / MOMENTS)
    reach("checkpoint_moments")
    state = {
        "format": FORMAT,
        "run": dict(run or {}),
        **asdict(counters),
        "weights_checksum": checksum(decoder.state_dict()),
        "optimizer_checksum": checksum(moments),
    }
    partial = folder / f"{STATE}.partial"
    partial.write_text(json.dumps(state, indent=2, sort_keys=True))
    _settle(partial, folder / STATE)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return what ``folder`` was written with: counters, checksums and, under ``run``, what :func:`write` was given.

    Raises :class:`ModelFilesError` where it is missing or damaged.
    """
    return _state(folder)


def read(folder: Path, decoder: Decoder, optimizer: torch.optim.Optimizer) -> Counters:
    """Load ``folder`` into ``decoder`` and ``optimizer``; return the counters.

    Raises :class:`ModelFilesError` where a file is missing, truncated, damaged or of a model of another shape.
    """
    state = _state(folder)
    loaded = load_decoder(folder)
    if loaded.config != decoder.config:
        raise ModelFilesError(
            f"{folder} holds a model of another shape ({loaded.config}) than the learner's ({decoder.config}); "
            "start from the model this checkpoint belongs to"
        )
    moments = _read_moments(folder)
    for name, tensors in (("weights", loaded.state_dict()), ("optimizer", moments)):
        if checksum(tensors) != state[f"{name}_checksum"]:
            raise ModelFilesError(
                f"the {name} in {folder} are not those {STATE} was written with; use another checkpoint"
            )
    counters = Counters(
        update=state["update"],
        optimizer_steps=state["optimizer_steps"],
        skipped_in_a_row=tuple(tuple(names) for names in state["skipped_in_a_row"]),
    )
    _put(decoder, optimizer, moments, folder, counters.optimizer_steps)
    decoder.load_state_dict(loaded.state_dict())
    return counters


def _moments(decoder: Decoder, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{moment}": optimizer.state[parameter][moment].contiguous()
        for name, parameter in decoder.named_parameters()
        if parameter in optimizer.state
        for moment in _MOMENTS
    }


def _read_moments(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / MOMENTS
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise ModelFilesError(
            f"{path} is missing, truncated or damaged ({error}); use another checkpoint"
        ) from None


def _state(folder: Path) -> dict[str, Any]:
    path = folder / STATE
    wanted = {"format", "run", *Counters.__dataclass_fields__, "weights_checksum", "optimizer_checksum"}
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelFilesError(
            f"{path} is missing, truncated or damaged ({error}); use another checkpoint"
        ) from None
    if isinstance(state, dict) and state.get("format") == 1:
        state = {**state, "format": FORMAT, "run": {}}
    if not isinstance(state, dict) or set(state) != wanted or state["format"] != FORMAT:
        raise ModelFilesError(f"{path} is not a learner's state of format {FORMAT}; use another checkpoint")
    return state


def _put(
    decoder: Decoder,
    optimizer: torch.optim.Optimizer,
    moments: Mapping[str, torch.Tensor],
    folder: Path,
    steps: int,
) -> None:
    names = [name for name, _ in decoder.named_parameters()]
    expected = {f"{name}.{moment}" for name in names for moment in _MOMENTS} if steps else set()
    if set(moments) != expected:
        odd = sorted(set(moments) ^ expected)[:3]
        raise ModelFilesError(f"{folder / MOMENTS} does not fit the model ({odd}); use another checkpoint")
    fresh = optimizer.state_dict()
    fresh["state"] = {
        index: {
            "step": torch.tensor(float(steps)),
            **{moment: moments[f"{name}.{moment}"] for moment in _MOMENTS},
        }
        for index, name in enumerate(names)
        if steps
    }
    optimizer.load_state_dict(fresh)


def _settle(partial: Path, final: Path) -> None:
    with partial.open("rb") as handle:
        os.fsync(handle.fileno())
    partial.replace(final)
