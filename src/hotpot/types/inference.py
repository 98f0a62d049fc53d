"""What goes into an engine and comes out of it: token ids in, token ids and log-probabilities out."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class Purpose(StrEnum):
    """What an episode is run for. Each purpose has its own frozen sampling parameters."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    EVALUATION_GREEDY = "evaluation_greedy"


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # a stop token was sampled (it is the last token)
    MAX_TOKENS = "max_tokens"
    MAX_CONTEXT = "max_context"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The distribution to sample from. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 filter nothing.

    Order of transformations: repetition penalty (on the logits of every token already in the context, CTRL,
    arXiv:1909.05858), temperature, top-k, top-p, renormalise.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 means off), got {self.top_k}")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be > 0, got {self.repetition_penalty}")

    @property
    def filtered(self) -> bool:
        """Whether the distribution is more than a temperature-scaled softmax."""
        return self.top_p < 1 or self.top_k > 0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleKey:
    """The counter that, with a token's position in the step, fixes the random number that samples it.

    Never depends on the attempt or the batch: the same (seed, issue, sample, step, position) draws the same number
    wherever and with whomever it runs. The number is exact; the distribution it is applied to is rounded differently
    in other company (products over a batch), so a token can differ where the number falls on a boundary.
    """

    seed: int
    issue: int
    sample: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerationRequest:
    """One model call. ``prompt`` is int32 ``[n]``: every token of the context so far, exactly.

    ``request_id`` is unique among requests in flight. ``session_id`` names the trajectory: an engine may keep what it
    computed for it, but must compare the tokens before reusing anything. ``sender`` says in words who asks (environment
    and actor), for messages of refusals; nothing else reads it.
    """

    request_id: str
    session_id: str
    prompt: NDArray[np.int32]
    stop_tokens: tuple[int, ...]
    max_tokens: int
    purpose: Purpose
    sampling: SamplingParams
    key: SampleKey
    sender: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOverride:
    """A request that was refused for its sampling parameters: whose it was, what it asked for, what is frozen."""

    request_id: str
    session_id: str
    sender: str
    purpose: Purpose
    asked: SamplingParams
    frozen: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """``length`` consecutive sampled tokens that one policy version sampled, with its weights' checksum."""

    policy_version: int
    checksum: str
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What the engine really did for one generation, as it states it.

    ``reused_tokens``: of the prompt, those whose keys and values were not computed for this request. ``num_preemptions``: times
    it had to give its memory back and wait.
    """

    engine: str
    precision: str
    device: str
    num_threads: int
    sampling: SamplingParams
    reused_tokens: int
    queue_s: float
    generate_s: float
    num_preemptions: int = 0

    @property
    def device_kind(self) -> str:
        """The device without its number: ``cuda`` of ``cuda:1``."""
        return self.device.partition(":")[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation:
    """The answer to one request.

    ``tokens`` int32 ``[m]``; ``behaviour_logprobs`` float32 ``[m]``: log-probability of each sampled token under the
    distribution it was *sampled from* (after penalty, temperature, top-k, top-p; 0 where greedy);
    ``model_logprobs`` float32 ``[m]``: under the raw model (softmax of the logits at temperature 1, nothing filtered).
    ``versions`` cover the tokens in order; their lengths sum to ``m``.
    """

    request_id: str
    tokens: NDArray[np.int32]
    behaviour_logprobs: NDArray[np.float32]
    model_logprobs: NDArray[np.float32]
    finish: FinishReason
    versions: tuple[VersionSpan, ...]
    report: EngineReport


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What one publish did."""

    policy_version: int
    checksum: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine serves right now, and its hard limits."""

    engine: str
    precision: str
    device: str
    num_threads: int
    policy_version: int
    checksum: str
    max_context_tokens: int
    max_concurrency: int

    @property
    def device_kind(self) -> str:
        """The device without its number: ``cuda`` of ``cuda:1``."""
        return self.device.partition(":")[0]
