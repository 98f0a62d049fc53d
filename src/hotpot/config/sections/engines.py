"""Engines behind HTTP, and the choice among all kinds of engine."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hotpot.config.sections.base import NonNegativeInt, PositiveFloat, PositiveInt, Section
from hotpot.config.sections.rollout import EngineSection


class RemoteSection(Section):
    """What engines behind HTTP have in common: the guards in front of a server that is not ours."""

    max_concurrency: PositiveInt = 64
    """Requests that are out at once."""
    max_tokens_in_flight: PositiveInt = 65536
    """Tokens of all requests that are out (prompt and what they may sample); further ones wait. At most what the server's
    key/value cache holds, where it says so (vLLM); else keep it below that, or it preempts. At least
    rollout.max_context_tokens."""
    request_timeout_s: PositiveFloat = 120.0
    """Longest time for one try at a request."""
    retries: NonNegativeInt = 6
    """Further tries where the server answers 429 or 5xx, or the connection is lost, with growing pauses and jitter."""
    recoveries: NonNegativeInt = 3
    """Times in a row that the server may be waited for or started again, its weights verified, before the run ends."""
    publish_tolerance: PositiveFloat | None = None
    """Largest difference in nats between what the server and the published weights say of probe tokens; left out: 0.001
    in float32, 0.25 in bfloat16, 0.05 in float16."""


class VllmEngineSection(RemoteSection):
    """A vLLM server, started and ended with the engine, or one that runs already."""

    kind: Literal["vllm"] = "vllm"
    """A vLLM server."""
    url: str | None = None
    """Address of a server that runs already, on a machine with the same disk; left out: one is started."""
    model: str = "policy"
    """Name under which the server serves the model."""
    python: Path = Path(".venv-vllm/bin/python")
    """Python of the environment that vLLM is installed in (`make setup-vllm`)."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """What it computes in."""
    kv_cache_bytes: PositiveInt = 1 << 30
    """Memory for its key/value cache."""
    threads: PositiveInt = 1
    """Threads it computes with on a CPU."""
    eager: bool = True
    """Compute without compiling anything first: starts in a minute less on a CPU, and needs no C++ compiler; give a GPU
    false."""
    arguments: tuple[str, ...] = ()
    """Further arguments of `vllm serve`."""
    start_timeout_s: PositiveFloat = 300.0
    """Longest time for a start; at most supervision.stop_after_s."""
    in_flight: Literal["finish", "continue"] = "finish"
    """Requests under way when weights are published: they finish under the old ones, or go on under the new ones."""


class OpenAIEngineSection(RemoteSection):
    """A server that speaks OpenAI's completions and returns token ids and log-probabilities."""

    kind: Literal["openai"] = "openai"
    """An OpenAI-compatible server."""
    url: str = "http://127.0.0.1:8000"
    """Address of the server."""
    model: str = "policy"
    """Name under which the server serves the model."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """What it computes in, as its owner says."""
    weights: Literal["fixed", "vllm", "sglang"] = "fixed"
    """How the server loads a folder of weights; ``fixed``: it can't, so nothing can be trained through it."""
    salted: bool = False
    """Whether it takes cache_salt, which keeps prefixes cached under other weights out."""


AnyEngineSection = Annotated[
    EngineSection | VllmEngineSection | OpenAIEngineSection, Field(discriminator="kind")
]
"""The engine of a recipe, tagged by ``kind``."""
