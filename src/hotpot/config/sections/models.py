"""The policy, and the warm start that makes a small one."""

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from hotpot.config.sections.base import PositiveFloat, PositiveInt, Section


class ModelSection(Section):
    """The policy."""

    path: Path | None = None
    """Folder in the format of transformers (config.json, safetensors, tokenizer, chat template)."""
    implementation: Literal["auto", "hotpot", "transformers"] = "auto"
    """Who computes it: Hotpot's own decoder where it has all that config.json asks for, else the module of transformers;
    or always that one."""


class WarmstartSection(Section):
    """Supervised warm start of a small policy on the environment's demonstrator (``hotpot model warmstart``)."""

    hidden_size: PositiveInt = 128
    """Width of the model; a multiple of num_heads."""
    num_layers: PositiveInt = 2
    """Decoder layers."""
    num_heads: PositiveInt = 4
    """Attention heads."""
    num_kv_heads: PositiveInt = 1
    """Key/value heads; divides num_heads. One makes generation faster: attention reads a quarter of the cache."""
    intermediate_size: PositiveInt = 384
    """Width of the feed-forward layer."""
    rope_theta: PositiveFloat = 1000.0
    """Base of the rotary embedding; 1,000 learns to copy over short contexts several times faster than 10,000."""
    initializer_range: PositiveFloat = 0.06
    """Standard deviation of the initial weights."""
    max_context_tokens: PositiveInt = 512
    """Longest context the model is built for."""
    steps: PositiveInt = 900
    """Optimiser steps."""
    batch_size: PositiveInt = 8
    """Demonstrations in an optimiser step."""
    learning_rate: PositiveFloat = 1.5e-3
    """Peak learning rate: up over a tenth of the steps, level, down over the last quarter to a tenth."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient norm is clipped to this."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"warmstart.hidden_size = {self.hidden_size} is not a multiple of 2 x warmstart.num_heads = "
                f"{2 * self.num_heads}: the rotary embedding turns pairs in each head; change either"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"warmstart.num_kv_heads = {self.num_kv_heads} does not divide warmstart.num_heads = {self.num_heads}; "
                "change either"
            )
        return self
