"""From what a server says of a request to a :class:`hotpot.types.Generation`, or to an error that says what does not fit.

Owns every check on an answer, and which distribution its log-probabilities belong to. Pure.

A server gives one log-probability a token, of the distribution it sampled from. Where that is the raw model's (temperature
1, nothing filtered) it is both of ours. Greedy, the behaviour log-probability is 0 by definition and the server's is the raw
model's. Elsewhere the raw model's comes from a second call (``scores``): it cannot be computed from the first.
"""

import math
from collections.abc import Sequence

import numpy as np

from hotpot.engine.remote.wire import Answer, Stretch, WireError
from hotpot.types import (
    EngineReport,
    FinishReason,
    Generation,
    GenerationRequest,
    SamplingParams,
    VersionSpan,
)

_ROUNDING = 1e-3
"""A log-probability may be above 0 by this much of rounding."""

_FLOOR = -9999.0
"""What vLLM writes in the place of NaN and minus infinity."""

TAKEN_BACK = "abort"
"""The finish reason of a request that the server gave up, not the model."""


def needs_scores(sampling: SamplingParams) -> bool:
    """Whether the raw model's log-probability is another number than the one the server gives."""
    return sampling.filtered or sampling.temperature not in {0.0, 1.0}


def check_answer(request: GenerationRequest, answer: Answer, *, model: str, max_tokens: int) -> FinishReason:
    """Return why the generation ended; ``max_tokens`` is what the server was asked for.

    Raises :class:`WireError` naming the first thing that is not as asked.
    """
    tokens, count = answer.tokens, len(answer.tokens)
    if answer.model != model:
        raise WireError(f"the answer is of model {answer.model!r}, {model!r} was asked")
    if answer.prompt_tokens != request.prompt.size:
        raise WireError(f"the server read {answer.prompt_tokens} prompt tokens of {request.prompt.size}")
    if not 0 < count <= max_tokens:
        raise WireError(f"{count} tokens came back, 1 to {max_tokens} were asked for")
    check_logprobs(answer.logprobs, tokens)
    stopped = [at for at, token in enumerate(tokens) if token in request.stop_tokens]
    if stopped and stopped[0] != count - 1:
        raise WireError(f"sampling went on behind stop token {tokens[stopped[0]]}")
    if answer.finish == "stop" and stopped:
        return FinishReason.STOP
    if answer.finish == "length" and count == max_tokens:
        if stopped:
            return FinishReason.STOP
        return FinishReason.MAX_TOKENS if count == request.max_tokens else FinishReason.MAX_CONTEXT
    raise WireError(
        f"finish reason {answer.finish!r} does not fit {count} of {max_tokens} tokens, the last of them {tokens[-1]} "
        f"(stop tokens {list(request.stop_tokens)})"
    )


def check_logprobs(logprobs: Sequence[float], tokens: Sequence[int]) -> None:
    """Raise :class:`WireError` unless there is one finite log-probability a token."""
    if len(logprobs) != len(tokens):
        raise WireError(f"{len(logprobs)} log-probabilities for {len(tokens)} tokens")
    for at, value in enumerate(logprobs):
        if not math.isfinite(value) or value <= _FLOOR or value > _ROUNDING:
            raise WireError(f"the log-probability of token {at} (id {tokens[at]}) is {value}")


def check_stretches(stretches: Sequence[Stretch], count: int) -> None:
    """Raise :class:`WireError` unless ``stretches`` cover tokens 0 to ``count`` in order."""
    at = 0
    for stretch in stretches:
        if stretch.start != at or stretch.end <= stretch.start:
            raise WireError(f"weight versions {list(stretches)} do not cover {count} tokens in order")
        at = stretch.end
    if at != count:
        raise WireError(f"weight versions cover {at} of {count} tokens")


def to_generation(
    request: GenerationRequest,
    answer: Answer,
    finish: FinishReason,
    *,
    scores: Sequence[float] | None,
    versions: tuple[VersionSpan, ...],
    report: EngineReport,
) -> Generation:
    """Return the generation of a checked answer. ``scores`` are the raw model's where :func:`needs_scores`."""
    said = np.minimum(np.array(answer.logprobs, dtype=np.float32), np.float32(0))
    raw = said if scores is None else np.minimum(np.array(scores, dtype=np.float32), np.float32(0))
    greedy = request.sampling.temperature == 0
    return Generation(
        request_id=request.request_id,
        tokens=np.array(answer.tokens, dtype=np.int32),
        behaviour_logprobs=np.zeros_like(said) if greedy else said,
        model_logprobs=raw.copy() if raw is said else raw,
        finish=finish,
        versions=versions,
        report=report,
    )
