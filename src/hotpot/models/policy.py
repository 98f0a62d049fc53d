"""What a policy is to everybody who computes with one: token ids to hidden states, hidden states to logits, and a folder.

Owns the interface only. Two kinds implement it: :class:`hotpot.models.Decoder` (this package's own mathematics) and
:class:`hotpot.models.TransformersPolicy` (a module of transformers). Learner, critic, reference, scoring, checkpoints and
the self-test know no more of a policy than stands here.

Invariants: a token's hidden state depends on no later position of its sequence and on no other row; training and
evaluation mode compute the same (no dropout: it would be noise in every ratio).
"""

import copy
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor, nn


class PolicyConfig(Protocol):
    """The facts of a policy's shape that are the same for every kind; configurations of one kind compare by ``==``."""

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to this, exclusive; the width of the logits."""

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state."""

    @property
    def max_context_tokens(self) -> int:
        """Longest context the policy is built for."""


class PastTokens(Protocol):
    """Keys and values of tokens that were computed before, by layer; who keeps them how is its owner's."""

    def write(
        self, layer: int, rows: slice | Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Take ``keys``/``values`` float ``[B, num_kv_heads, T, head_dim]`` of ``rows`` at ``positions`` int64 ``[B, T]``."""

    def read(self, layer: int, rows: slice | Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return ``length`` keys and values of each of ``rows``: float ``[B, num_kv_heads, length, head_dim]`` each."""


class Policy(nn.Module, ABC):
    """A causal language model as the rest of Hotpot sees it. Parameters keep the names of the kind it is.

    ``implementation`` is the kind's name in a recipe. ``packs``: whether ``attend`` and ``positions`` are followed exactly,
    so that several sequences can stand in one row.
    ``caches``: whether it takes a ``cache``, so that a shared prefix is computed once.

    How a learner computes with it: ``precision`` is what the matrix products of its layers are of, float32 or, under
    torch's autocast, bfloat16; weights and logits are float32 in either. With ``gradient_checkpointing`` a pass with
    gradient keeps each layer's input only and computes what is inside again when the gradient is taken (arXiv:1604.06174):
    less memory, about a third more work, the same bits; ``checkpoints`` says whether this kind can. With ``exact`` a
    token's result does not hang on its company, bit for bit (:mod:`hotpot.models.exact`); ``can_be_exact`` says whether this
    kind can, in float32 on one thread.
    """

    implementation: ClassVar[Literal["hotpot", "transformers"]]
    config: PolicyConfig
    packs: bool
    caches: bool
    precision: torch.dtype = torch.float32
    gradient_checkpointing: bool = False
    checkpoints: bool = False
    exact: bool = False
    can_be_exact: bool = False

    @abstractmethod
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
        """Return the hidden state of every token, float ``[B, T, hidden_size]``.

        ``tokens``, ``positions`` int64 ``[B, T]``. Without ``cache`` and ``attend`` attention is causal over the row.
        ``attend`` bool ``[B, 1, T, S]`` says which keys each token sees (needs ``packs``). With ``cache`` (needs
        ``caches``) the new keys and values are first written to ``rows`` (a slice or int64 ``[B]``) at ``positions``, and
        the S keys are those that it reads for these rows. ``wanted`` int64 ``[K]`` numbers tokens in ``[B * T]``: their
        hidden states alone are returned, float ``[K, hidden_size]``.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits float32 ``[..., vocab_size]`` of hidden states float ``[..., hidden_size]``."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors as transformers reads them; each file appears whole or not at all."""

    def outer_name(self, name: str) -> str:
        """Return what the folder that :meth:`save` writes calls the parameter (or module) ``name``."""
        return name

    def duplicate(self) -> Self:
        """Return a policy of the same kind with weights of its own, equal to these."""
        return copy.deepcopy(self)
