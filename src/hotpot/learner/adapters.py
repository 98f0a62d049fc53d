"""Low-rank adapters: a policy that learns a small addition to each of its linear layers (LoRA, arXiv:2106.09685).

::

    base weights W (as the run began, never changed) ──┬──► policy that computes: W x + (alpha / rank) B (A x)
                                                        └──► merged: W + (alpha / rank) B A, under the policy's own names

Owns the adapters, their merging and their folder, which is peft's: it loads onto the model the run began with by
``PeftModel.from_pretrained``. Knows no loss and no optimiser. peft's modules do the arithmetic; they are injected into a
twin that shares its weights with the policy it was made of, so the latter goes on computing what it did, at no cost: it
is a reference already.

Invariants: the base weights never change; new adapters change nothing, not by a bit (B is 0); the same seed draws the
same A, and no other random state is touched. There is no dropout: a ratio of two passes would compare two random networks.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hotpot.config.sections import LearnerSection
from hotpot.errors import LearnerError, ModelFilesError, RecipeError
from hotpot.models import Policy, checksum
from hotpot.models.disk import write_json, write_tensors

FOLDER = "adapter"
"""Where a checkpoint keeps its adapters, in peft's format."""

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

_NAME = "default"
"""What peft calls the only adapter a layer has."""

_SHAPE = ("r", "lora_alpha", "target_modules")
"""Settings of peft that decide what the adapters' weights mean."""


class Adapters:
    """The adapters of ``base``, injected into :attr:`policy`; ``base`` itself is not touched.

    Raises :class:`RecipeError` where peft is missing, :class:`LearnerError` where a target is no linear layer of the model.
    """

    def __init__(self, base: Policy, settings: LearnerSection, *, seed: int) -> None:
        peft = _peft(settings)
        _check_targets(base, settings.lora_targets)
        self.base = base
        self.base_checksum = checksum(base.state_dict())
        self._config = peft.LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            target_modules=sorted(settings.lora_targets),
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        self.policy = _twin(base, {})
        with torch.random.fork_rng(devices=[]):  # what peft draws is drawn again below, from the run's seed
            peft.inject_adapter_in_model(self._config, self.policy)
        self._draw(seed)

    def merged(self) -> Policy:
        """Return a policy of the base's kind with the adapters merged into its weights, under its own names.

        What no adapter changes is shared with the base, not copied.
        """
        with torch.no_grad():
            changed = {
                f"{name}.weight": layer.get_base_layer().weight + layer.get_delta_weight(_NAME)
                for name, layer in self._layers()
                # -0.0 + 0.0 is 0.0: what has learned nothing keeps its bits.
                if bool(layer.lora_B[_NAME].weight.any())
            }
        return _twin(self.base, changed)

    def tensors(self) -> dict[str, Tensor]:
        """Return the adapters' weights by the names of peft's files; they are live."""
        return {self._file_name(name): parameter.detach() for name, parameter in self._parameters()}

    def write(self, folder: Path) -> None:
        """Write the adapters to ``folder`` as peft does; each file appears whole or not at all."""
        folder.mkdir(exist_ok=True)
        write_tensors(folder / TENSORS, self.tensors())
        write_json(folder / CONFIG, self._spelled())

    def read(self, folder: Path) -> dict[str, Tensor]:
        """Return the weights in ``folder`` for :meth:`put`; nothing is changed.

        Raises :class:`ModelFilesError` where a file is missing or damaged, or of adapters of another shape.
        """
        try:
            config, found = json.loads((folder / CONFIG).read_text()), load_file(folder / TENSORS)
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelFilesError(
                f"{folder} holds no whole adapter ({error}); use another checkpoint"
            ) from None
        own = self._spelled()
        then, now = ({name: values.get(name) for name in _SHAPE} for values in (config, own))
        shapes = {name: tensor.shape for name, tensor in self.tensors().items()}
        if then != now or {name: tensor.shape for name, tensor in found.items()} != shapes:
            raise ModelFilesError(
                f"{folder} holds adapters of {then}, the settings ask for {now}; set learner.lora_rank, lora_alpha and "
                "lora_targets as they were when this checkpoint was written"
            )
        return dict(found)

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`read` returned."""
        for name, parameter in self._parameters():
            parameter.copy_(tensors[self._file_name(name)])

    @torch.no_grad()
    def _draw(self, seed: int) -> None:
        """Draw A as peft does, uniformly within 1 / sqrt(its inputs), from ``seed``; B is 0."""
        generator = torch.Generator().manual_seed(seed)
        for _, layer in self._layers():
            down, up = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
            bound = down.shape[1] ** -0.5
            down.uniform_(-bound, bound, generator=generator)
            up.zero_()

    def _layers(self) -> Iterator[tuple[str, Any]]:
        """Yield name and module of each adapted layer, in the model's order."""
        for name, module in self.policy.named_modules():
            if hasattr(module, "lora_A") and hasattr(module, "get_delta_weight"):
                yield name, module

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, value) for name, value in self.policy.named_parameters() if value.requires_grad)

    def _file_name(self, name: str) -> str:
        return f"base_model.model.{self.base.outer_name(name).replace(f'.{_NAME}.', '.')}"

    def _spelled(self) -> dict[str, Any]:
        """Return peft's configuration as JSON values, the same for every process."""
        values: dict[str, Any] = self._config.to_dict()
        plain = {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}
        found: dict[str, Any] = json.loads(json.dumps({**plain, "inference_mode": True}))
        return found


def _peft(settings: LearnerSection) -> Any:
    try:
        import peft
    except ImportError as error:
        raise RecipeError(
            f"learner.lora_rank = {settings.lora_rank} needs the package peft ({error}); install Hotpot with its extra "
            "'lora' (pip install 'hotpot[lora]'), or set learner.lora_rank = 0"
        ) from None
    return peft


def _check_targets(policy: Policy, targets: tuple[str, ...]) -> None:
    """Raise :class:`LearnerError` where one of ``targets`` is no linear layer. The output head's matrix is used as it is."""
    linear = {
        name.rpartition(".")[2] for name, module in policy.named_modules() if isinstance(module, nn.Linear)
    } - {"lm_head"}
    unknown = sorted(set(targets) - linear)
    if unknown:
        raise LearnerError(
            f"learner.lora_targets names {', '.join(unknown)}, and the model's linear layers are "
            f"{', '.join(sorted(linear))}; name some of these"
        )


def _twin(policy: Policy, other: Mapping[str, Tensor]) -> Policy:
    """Return a policy like ``policy`` whose frozen weights lie where its own do, or are those in ``other`` by name."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(other.get(name, parameter).detach(), requires_grad=False)
        for name, parameter in policy.named_parameters()
    }
    memo |= {id(buffer): buffer for buffer in policy.buffers()}
    return copy.deepcopy(policy, memo)
