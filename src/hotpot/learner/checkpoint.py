"""A learner on disk: an ordinary model folder, further modules, the optimiser's moments and the learner's counters.

Owns ``learner/optimizer.safetensors``, ``learner/NAME.safetensors`` of each further module (a critic) and
``learner.json``; ``adapter/`` is :mod:`hotpot.learner.adapters`'s, and the weights are those with the adapters merged; the rest is :mod:`hotpot.models`'s, which takes every ``*.safetensors`` beside ``config.json`` for
weights, hence the sub-folder. ``learner.json`` is the checkpoint's manifest: written last, with the checksums of all
tensors, so a folder whose writing was cut, or that mixes two checkpoints, is refused. Under ``run`` it keeps what the run
says of itself at that point, which this module carries and does not read. No file is pickled. Reading changes nothing
unless all of it is good.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hotpot.errors import ModelFilesError
from hotpot.experience.crashpoints import reach
from hotpot.learner.adapters import FOLDER, Adapters
from hotpot.learner.parts import Parts
from hotpot.learner.precision import Precision
from hotpot.models import checksum, load_policy, save_model

FORMAT = 2
"""Version of ``learner.json`` and of the names in ``learner/optimizer.safetensors``. Version 1 had no ``run``."""

STATE = "learner.json"
MOMENTS = "learner/optimizer.safetensors"

_MOMENTS = ("exp_avg", "exp_avg_sq")

_OPTIONAL = {"modules", "adapter", "precision"}
"""Entries of ``learner.json`` that stand there only where there is something to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Last update learned, optimiser steps taken so far, the trajectories named by each step skipped in a row, the running
    scales as plain values, and the gradient norms that the next ones are measured against, oldest first."""

    update: int
    optimizer_steps: int
    skipped_in_a_row: tuple[tuple[str, ...], ...]
    scales: Mapping[str, Any] = field(default_factory=dict)
    norms: tuple[float, ...] = ()


def write(
    folder: Path,
    parts: Parts,
    counters: Counters,
    tokenizer_files: Mapping[str, bytes],
    run: Mapping[str, Any] | None = None,
) -> None:
    """Write weights, tokenizer, moments and counters to ``folder``; each file appears whole or not at all.

    What the optimiser steps beside the policy may have taken other steps than it, so the count of each of these
    parameters is kept with its moments. ``run`` (JSON values) is kept in the manifest for :func:`read_manifest`.
    """
    policy, adapters, modules = parts.published(), parts.adapters, parts.modules
    # An old learner.json beside new tensors would be refused, but one beside half-new ones must not exist at all.
    (folder / STATE).unlink(missing_ok=True)
    save_model(folder, policy, tokenizer_files)
    if adapters is not None:
        adapters.write(folder / FOLDER)
    reach("checkpoint_weights")
    moments = _moments(parts)
    (folder / MOMENTS).parent.mkdir(exist_ok=True)
    _save(moments, folder / MOMENTS)
    for name, module in modules.items():
        _save(module.state_dict(), _module_file(folder, name))
    reach("checkpoint_moments")
    state = {
        "format": FORMAT,
        "run": dict(run or {}),
        **asdict(counters),
        "weights_checksum": checksum(policy.state_dict()),
        "optimizer_checksum": checksum(moments),
        **({"modules": _checksums(modules)} if modules else {}),
        **({} if adapters is None else {"adapter": _adapter(adapters)}),
        **({} if parts.precision == "float32" else {"precision": parts.precision}),
    }
    partial = folder / f"{STATE}.partial"
    partial.write_text(json.dumps(state, indent=2, sort_keys=True))
    _settle(partial, folder / STATE)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return what ``folder`` was written with: counters, checksums and, under ``run``, what :func:`write` was given.

    Raises :class:`ModelFilesError` where it is missing or damaged.
    """
    return _state(folder)


def precision_of(folder: Path) -> Precision:
    """Return the precision that the learner in ``folder`` computed in. Raises as :func:`read_manifest`."""
    return "bfloat16" if _state(folder).get("precision") == "bfloat16" else "float32"


def read(folder: Path, parts: Parts) -> Counters:
    """Load ``folder`` into ``parts``; return the counters.

    Raises :class:`ModelFilesError` where a file is missing, truncated, damaged or of a model of another shape, where
    other modules were written than are asked for, and where adapters lie on another base.
    """
    state, modules, adapters = _state(folder), parts.modules, parts.adapters
    written = state.get("modules", {})
    if set(written) != set(modules):
        raise ModelFilesError(
            f"{folder} holds {sorted(written) or 'nothing'} beside the policy, the learner has "
            f"{sorted(modules) or 'nothing'}; set learner.critic as it was when this checkpoint was written"
        )
    _check_base(folder, state.get("adapter"), adapters)
    loaded = load_policy(folder, parts.policy.implementation)
    if loaded.config != parts.policy.config:
        raise ModelFilesError(
            f"{folder} holds a model of another shape ({loaded.config}) than the learner's ({parts.policy.config}); "
            "start from the model this checkpoint belongs to"
        )
    adapted = {} if adapters is None else adapters.read(folder / FOLDER)
    moments = _read_tensors(folder / MOMENTS)
    further = {name: _read_tensors(_module_file(folder, name)) for name in modules}
    for name, tensors, expected in (
        ("weights", loaded.state_dict(), state["weights_checksum"]),
        ("optimizer", moments, state["optimizer_checksum"]),
        *((("adapter", adapted, state["adapter"]["checksum"]),) if adapters is not None else ()),
        *((name, tensors, written[name]) for name, tensors in further.items()),
    ):
        if checksum(tensors) != expected:
            raise ModelFilesError(
                f"the {name} in {folder} are not those {STATE} was written with; use another checkpoint"
            )
    counters = Counters(
        update=state["update"],
        optimizer_steps=state["optimizer_steps"],
        skipped_in_a_row=tuple(tuple(names) for names in state["skipped_in_a_row"]),
        scales=state["scales"],
        norms=tuple(state["norms"]),
    )
    _check_shapes(folder, modules, further)
    _put(parts, moments, folder, counters.optimizer_steps)
    if adapters is None:
        parts.policy.load_state_dict(loaded.state_dict())
    else:
        adapters.put(adapted)
    for name, module in modules.items():
        module.load_state_dict(further[name])
    return counters


def _moments(parts: Parts) -> dict[str, torch.Tensor]:
    state = parts.optimizer.state
    own = {
        f"{name}.{moment}": state[parameter][moment].contiguous()
        for name, parameter in parts.learning()
        if parameter in state
        for moment in _MOMENTS
    }
    return own | {
        f"{name}.{moment}": state[parameter][moment].contiguous()
        for name, parameter in _module_parameters(parts.modules)
        if parameter in state
        for moment in ("step", *_MOMENTS)
    }


def _module_parameters(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in modules.items():
        for name, parameter in module.named_parameters():
            yield f"{prefix}.{name}", parameter


def _module_file(folder: Path, name: str) -> Path:
    return folder / "learner" / f"{name}.safetensors"


def _checksums(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    return {name: checksum(module.state_dict()) for name, module in modules.items()}


def _adapter(adapters: Adapters) -> dict[str, str]:
    return {"checksum": checksum(adapters.tensors()), "base_checksum": adapters.base_checksum}


def _check_base(folder: Path, written: Mapping[str, str] | None, adapters: Adapters | None) -> None:
    """Refuse adapters where all weights learn, all weights where adapters learn, and adapters of another base."""
    if (written is None) != (adapters is None):
        holds, asked = ("all weights", "adapters") if written is None else ("adapters", "all weights")
        raise ModelFilesError(
            f"{folder} was written by a learner of {holds}, and this one is of {asked}: what was learned of the one does "
            "not carry over; set learner.lora_rank as it was, or start a new run with model.path = this folder"
        )
    if written is not None and adapters is not None and written["base_checksum"] != adapters.base_checksum:
        raise ModelFilesError(
            f"the adapters in {folder} belong on weights with checksum {written['base_checksum']}, those they were to be "
            f"put on have {adapters.base_checksum}; give the model the run began with (its first checkpoint)"
        )


def _check_shapes(
    folder: Path, modules: Mapping[str, nn.Module], found: Mapping[str, Mapping[str, Tensor]]
) -> None:
    for name, module in modules.items():
        shapes = {key: tensor.shape for key, tensor in module.state_dict().items()}
        if {key: tensor.shape for key, tensor in found[name].items()} != shapes:
            raise ModelFilesError(
                f"{_module_file(folder, name)} is of another shape than the learner's {name}; set learner.critic as it "
                "was when this checkpoint was written"
            )


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
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
    if isinstance(state, dict):
        # What a learner's state did not hold before it was written down.
        state = {"run": {}, "scales": {}, "norms": [], **state}
        state["format"] = FORMAT if state.get("format") == 1 else state.get("format")
    if not isinstance(state, dict) or set(state) - _OPTIONAL != wanted or state["format"] != FORMAT:
        raise ModelFilesError(f"{path} is not a learner's state of format {FORMAT}; use another checkpoint")
    return state


def _put(parts: Parts, moments: Mapping[str, torch.Tensor], folder: Path, steps: int) -> None:
    names = [name for name, _ in parts.learning()]
    expected = {f"{name}.{moment}" for name in names for moment in _MOMENTS} if steps else set()
    further = [name for name, _ in _module_parameters(parts.modules)]
    stepped = {name for name in further if f"{name}.step" in moments}
    expected |= {f"{name}.{moment}" for name in stepped for moment in ("step", *_MOMENTS)}
    if set(moments) != expected:
        odd = sorted(set(moments) ^ expected)[:3]
        raise ModelFilesError(f"{folder / MOMENTS} does not fit the model ({odd}); use another checkpoint")
    fresh = parts.optimizer.state_dict()
    fresh["state"] = {
        index: {
            "step": torch.tensor(float(steps)),
            **{moment: moments[f"{name}.{moment}"] for moment in _MOMENTS},
        }
        for index, name in enumerate(names)
        if steps
    } | {
        index: {moment: moments[f"{name}.{moment}"] for moment in ("step", *_MOMENTS)}
        for index, name in enumerate(further, start=len(names))
        if name in stepped
    }
    parts.optimizer.load_state_dict(fresh)


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    partial = path.with_name(f"{path.name}.partial")
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, partial)
    _settle(partial, path)


def _settle(partial: Path, final: Path) -> None:
    with partial.open("rb") as handle:
        os.fsync(handle.fileno())
    partial.replace(final)
