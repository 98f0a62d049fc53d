"""Asking an engine a short question and comparing answers: how a publish is verified where no checksum is reported.

Owns the question (one prompt, a few tokens, fixed random numbers) and the comparison. Knows only the protocol. An engine
that is asked must serve nobody else meanwhile, or its other answers are lost.
"""

import numpy as np
from numpy.typing import NDArray

from hotpot.engine.protocol import Engine
from hotpot.errors import EngineError
from hotpot.types import Generation, GenerationRequest, Purpose, SampleKey, SamplingParams

PROBE_TOKENS = 8
"""Tokens of an answer."""

_MAX_STEPS = 10_000


def probe_request(
    number: int, prompt: NDArray[np.int32], sampling: SamplingParams, *, max_context_tokens: int
) -> GenerationRequest:
    """Return question ``number`` (each its own session): up to :data:`PROBE_TOKENS` tokens after ``prompt`` int32 ``[n]``."""
    return GenerationRequest(
        request_id=f"probe:{number}",
        session_id=f"probe:{number}",
        prompt=prompt,
        stop_tokens=(),
        max_tokens=min(PROBE_TOKENS, max_context_tokens - len(prompt)),
        purpose=Purpose.TRAINING,
        sampling=sampling,
        key=SampleKey(seed=0, issue=0, sample=0, step=0),
        sender="probe",
    )


def ask(engine: Engine, request: GenerationRequest) -> Generation:
    """Return the engine's answer to ``request``.

    Raises :class:`EngineError` where it gives none in many steps, or answers something else.
    """
    engine.submit(request)
    for _ in range(_MAX_STEPS):
        for answer in engine.step():
            if answer.request_id != request.request_id:
                raise EngineError(
                    f"the engine answered {answer.request_id!r} while only {request.request_id!r} was asked; probe an "
                    "engine that serves nobody else"
                )
            return answer
    raise EngineError(
        f"the engine gave no answer to {request.request_id!r} in {_MAX_STEPS} steps; look at the engine"
    )


def same(one: Generation, other: Generation) -> bool:
    """Return whether two answers are the same, bit for bit: the same weights without rounding in between."""
    return bool(
        np.array_equal(one.tokens, other.tokens) and np.array_equal(one.model_logprobs, other.model_logprobs)
    )


def gaps(
    answer: Generation, tokens: NDArray[np.int32], model_logprobs: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Return |difference| in nats, float64 ``[k]``, between the raw log-probabilities of ``answer`` and those of ``tokens``
    int32 ``[n]`` over the k first tokens that are the same: behind the first other token the contexts differ.
    """
    count = min(len(answer.tokens), len(tokens))
    differ = np.flatnonzero(answer.tokens[:count] != tokens[:count])
    count = int(differ[0]) if len(differ) else count
    found: NDArray[np.float64] = np.abs(
        answer.model_logprobs[:count].astype(np.float64) - model_logprobs[:count]
    )
    return found
