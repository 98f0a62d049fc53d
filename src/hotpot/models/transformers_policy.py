"""A module of transformers as a policy: any causal language model it knows, seen through :class:`hotpot.models.Policy`.

Owns the way from our arguments to the module's and back. What the module really does with them is measured once, by
:mod:`hotpot.models.probe`, and stands in ``packs`` and ``caches``; nothing here is asked of it that the probe refuted.

::

    tokens, positions, attend ──► base model (embeddings, layers, last norm) ──► hidden states
    hidden states ──► the model's own forward, its base model replaced by what it gave ──► logits

The second line is why no architecture's head is written down here: scaling, soft-capping or a bias behind the last
norm are computed by the module's own code.

Invariant: the module stays in evaluation mode, whatever is asked for: dropout would be noise in every ratio.
Imported only where such a model is loaded: transformers takes seconds to import.
"""

import copy
import inspect
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from hotpot.errors import ModelFilesError
from hotpot.models.disk import settle
from hotpot.models.policy import PastTokens, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig:
    """Shape of a module of transformers; ``settings`` is its whole configuration as canonical JSON, so that two
    policies of one shape compare equal and no others do."""

    architecture: str
    vocab_size: int
    hidden_size: int
    max_context_tokens: int
    settings: str


class TransformersPolicy(Policy):
    """A policy that transformers computes. Parameters are named as in ``module``, which is float32.

    ``packs`` and ``caches`` are for :func:`hotpot.models.probe.probe` to find out; until then neither is taken for granted.
    """

    implementation = "transformers"
    config: TransformersConfig
    module: PreTrainedModel

    def __init__(self, module: PreTrainedModel, config: TransformersConfig) -> None:
        super().__init__()
        self.module = module
        self.config = config
        self.packs = self.caches = False
        self.checkpoints = bool(_layers(module))
        super().train(mode=False)

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 - torch's signature
        """Stay in evaluation mode: no dropout on either side of a ratio."""
        del mode
        return super().train(mode=False)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        *,
        cache: PastTokens | None = None,
        rows: slice | Tensor | None = None,
        attend: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states, see :meth:`hotpot.models.Policy.forward`.

        Without ``attend`` the positions must be those of the columns, as a module may count for itself.
        """
        width, context = tokens.shape[1], self.config.max_context_tokens
        if attend is None and wanted is not None and width > context:
            # Padding beyond what the model knows: never read, and some modules can't compute it.
            wanted = wanted // width * context + wanted % width
            tokens, positions = tokens[:, :context], positions[:, :context]
        given: dict[str, Any] = {"input_ids": tokens}
        if "position_ids" in self._accepts:
            given["position_ids"] = positions
        if attend is not None:
            given["attention_mask"] = _added(attend)
        if cache is not None:
            if rows is None or attend is None:
                raise ValueError("a cache needs rows and attend")
            given[self._cache_name] = _Past(cache, rows, positions, attend.shape[-1])
        if "use_cache" in self._accepts:
            given["use_cache"] = cache is not None
        again = self.gradient_checkpointing and torch.is_grad_enabled()
        with _kept_by_their_input(_layers(self.module) if again else ()):
            hidden: Tensor = self.module.base_model(**given).last_hidden_state
        return hidden if wanted is None else hidden.flatten(0, 1).index_select(0, wanted)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits float32 ``[..., vocab_size]`` of hidden states: everything the module does behind its base model."""
        head = copy.copy(self.module)
        head._modules = dict(self.module._modules)
        head._modules[self.module.base_model_prefix] = _Given(hidden.reshape(1, -1, hidden.shape[-1]))
        out: Tensor = head(inputs_embeds=hidden.reshape(1, -1, hidden.shape[-1])).logits
        return out.reshape(*hidden.shape[:-1], out.shape[-1]).float()

    def outer_name(self, name: str) -> str:
        """Return the module's own name of a parameter; see :meth:`hotpot.models.Policy.outer_name`."""
        return name.removeprefix("module.")

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors; see :meth:`hotpot.models.Policy.save`."""
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as scratch:
            # One file: a checkpoint is settled file by file, and an index would be one more that can be torn.
            with quiet():
                self.module.save_pretrained(scratch, max_shard_size="1000TB")
            for name in ("config.json", "model.safetensors"):
                settle(Path(scratch) / name, folder / name)

    @cached_property
    def _accepts(self) -> frozenset[str]:
        """What the base model's forward pass can be told by name."""
        return frozenset(inspect.signature(self.module.base_model.forward).parameters)

    @property
    def _cache_name(self) -> str:
        name = next((name for name in ("cache", "past_key_values") if name in self._accepts), "")
        if not name:
            raise ModelFilesError(f"{self.config.architecture} takes no cache; do not give it one")
        return name


@contextmanager
def quiet() -> Iterator[None]:
    """Let transformers say nothing and draw no bars; what is wrong is raised."""
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(50)  # critical
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers of ``module`` that transformers says can be computed again for the gradient."""
    return [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)]


@contextmanager
def _kept_by_their_input(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Let ``layers`` keep what enters them only, and be computed again for the gradient, where they are called inside.

    The module's own switch leaves the cache out, and so the shared prefix, and works in training mode alone.
    """
    for layer in layers:
        vars(layer)["forward"] = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


class _Given(nn.Module):
    """Stands where a base model stands and gives hidden states that are known already."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    @property
    def decoder(self) -> Self:
        """The part that some modules call (OPT)."""
        return self

    def forward(self, *_: Any, **__: Any) -> "_Answer":
        return _Answer(self._hidden)


class _Answer:
    """A base model's output of which only the hidden states are there; the rest reads as None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Past(Cache):
    """Our :class:`PastTokens` behind the one call that attention layers of transformers make on their cache."""

    def __init__(self, past: PastTokens, rows: slice | Tensor, positions: Tensor, length: int) -> None:
        super().__init__(layers=[])
        self._past, self._rows, self._positions, self._length = past, rows, positions, length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        del args, kwargs
        self._past.write(layer_idx, self._rows, self._positions, key_states, value_states)
        return self._past.read(layer_idx, self._rows, self._length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        del layer_idx
        return self._length - self._positions.shape[1]


def _added(attend: Tensor) -> Tensor:
    """Return ``attend`` bool as what is added to scores: every attention of transformers adds a mask of floats."""
    return torch.zeros(attend.shape).masked_fill_(~attend, torch.finfo(torch.float32).min)
