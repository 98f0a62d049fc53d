"""One real vLLM server for the tests of a module, and engines over it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hotpot.config.sections import OpenAIEngineSection, VllmEngineSection
from hotpot.engine.remote import RemoteEngine, make_remote_engine
from hotpot.models import Decoder, DecoderConfig
from hotpot.testing.contracts_engine import CONTRACT_SAMPLING, EngineCase

VOCAB, CONTEXT = 64, 128
PYTHON = "HOTPOT_VLLM_PYTHON"


def decoder(seed: int) -> Decoder:
    model = Decoder(
        DecoderConfig(
            vocab_size=VOCAB,
            hidden_size=128,
            intermediate_size=192,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            max_context_tokens=CONTEXT,
            initializer_range=0.1,
        )
    )
    model.initialize(seed)
    return model


def weights(number: int) -> dict[str, torch.Tensor]:
    return dict(decoder(number).named_parameters())


def vllm_python() -> Path:
    """Return the Python that vLLM is installed for; a test that needs it fails without, it never passes by."""
    named = os.environ.get(PYTHON)
    if not named or not Path(named).is_file():
        pytest.fail(f"{PYTHON} is {named!r}: run `make test-vllm`, which builds that environment first")
    return Path(named)


class Server:
    """The engine that owns the server, and others that are attached to it."""

    def __init__(self, owner: RemoteEngine, settings: VllmEngineSection) -> None:
        self.owner = owner
        self.settings = settings

    def attach(self, kind: str, **changes: Any) -> RemoteEngine:
        told: dict[str, Any] = {
            "url": self.owner.url,
            "max_concurrency": 32,
            "precision": self.settings.precision,
        } | changes
        settings = (
            VllmEngineSection(**told)
            if kind == "vllm"
            else OpenAIEngineSection(weights="vllm", salted=True, **told)
        )
        return make(settings)

    def case(self, maker: Callable[[], RemoteEngine], **changes: Any) -> EngineCase:
        return EngineCase(
            make=maker,
            weights=weights,
            overrides=lambda engine, purpose: engine.gate.overrides[purpose],
            vocab_size=VOCAB,
            max_context_tokens=CONTEXT,
            **changes,
        )


def make(settings: VllmEngineSection | OpenAIEngineSection, **changes: Any) -> RemoteEngine:
    told: dict[str, Any] = {"max_context_tokens": CONTEXT, "sampling": CONTRACT_SAMPLING} | changes
    return make_remote_engine(decoder(0), weights(0), settings=settings, **told)


@contextmanager
def serving(**changes: Any) -> Iterator[Server]:
    """Start a server; it ends with the block. A start takes half a minute, and many times that where others use the cores."""
    told = {"python": vllm_python(), "max_concurrency": 32, "start_timeout_s": 600.0, **changes}
    settings = VllmEngineSection(**told)
    owner = make(settings)
    try:
        yield Server(owner, settings)
    finally:
        owner.close()
