"""The work both sides do: a model folder, prompts of the order desk, a reward that reads a completion's text, and sizes.

Owns what must be the same. Knows neither side.
"""

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

from hotpot.config.load import load_recipe
from hotpot.envs import load_environment
from hotpot.models import PolicyTokenizer
from hotpot.topology.warmstart import warmstart
from hotpot.types import Message, Role, Split, ToolSpec

RECIPE = "recipes/order_desk.toml"
SEED = 301
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "initializer_range": 0.0416,
}
"""Shape of SmolLM2-135M (arXiv:2502.02737)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What an agent is told first."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One iteration: ``samples`` completions of ``length`` tokens for each of ``tasks`` prompts, learned once in
    ``minibatches`` optimiser steps. ``openings`` are what all prompts are rendered from; each iteration has the next ones."""

    folder: Path
    openings: tuple[Opening, ...]
    tasks: int
    samples: int
    length: int
    minibatches: int
    learning_rate: float = 1e-5

    @property
    def completions(self) -> int:
        """Completions of an iteration."""
        return self.tasks * self.samples


def reward(text: str) -> float:
    """Return a number in [0, 1) that nearly any two texts differ in, so that every group can be learned from."""
    return zlib.crc32(text.encode()) / 2**32


def make_openings(count: int) -> tuple[Opening, ...]:
    """Return the openings of ``count`` tasks of the order desk: system prompt, tools and request, as in a run."""
    environment = load_environment("order_desk", {})
    system = Message(role=Role.SYSTEM, content=environment.system_prompt())
    found = []
    for index in range(count):
        world = environment.make()
        try:
            observation = world.reset(environment.task(Split.TRAIN, SEED, index), index)
        finally:
            world.close()
        found.append(Opening(messages=(system, *observation.messages), tools=observation.tools))
    return tuple(found)


def make_tiny(folder: Path) -> None:
    """Write the decoder of the recipe, imitated for a few steps only: neither side's speed hangs on what it can do."""
    warmstart(load_recipe(Path(RECIPE), [f"run.seed={SEED}", "run.threads=1", "warmstart.steps=40"]), folder)


def make_smollm2(folder: Path, tiny: Path) -> None:
    """Write a model of SmolLM2-135M's shape with random weights, as transformers does, and ``tiny``'s tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(SEED)
    LlamaForCausalLM(LlamaConfig(**SMOLLM2)).save_pretrained(folder)
    for name, data in padded_tokenizer(PolicyTokenizer.load(tiny), SMOLLM2["vocab_size"]).files().items():
        (folder / name).write_bytes(data)


def padded_tokenizer(tokenizer: PolicyTokenizer, vocab_size: int) -> PolicyTokenizer:
    """Return ``tokenizer`` with further tokens that have a text and that no text is encoded as, ``vocab_size`` in all."""
    files = dict(tokenizer.files())
    parts = json.loads(files["tokenizer.json"])
    parts["model"]["vocab"] |= {f"w{index}": index for index in range(tokenizer.vocab_size, int(vocab_size))}
    files["tokenizer.json"] = json.dumps(parts, ensure_ascii=False).encode()
    return PolicyTokenizer(files)
