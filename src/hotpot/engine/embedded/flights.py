"""A request on its way through the engine, from submission to its answer.

Owns what has to be said of it at the end: what it sampled, under which weights, how long it waited, how often it was
preempted. Knows no model, no memory and no queue.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hotpot.types import EngineReport, FinishReason, Generation, GenerationRequest, VersionSpan

NAME, PRECISION, DEVICE = "embedded", "float32", "cpu"
"""What this engine says of itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """What a request has sampled so far: ``tokens`` int32 ``[m]``, log-probabilities float32 ``[m]`` of both kinds."""

    tokens: NDArray[np.int32]
    behaviour: NDArray[np.float32]
    model: NDArray[np.float32]


NOTHING = Progress(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32))


@dataclass(slots=True, eq=False)
class Flight:
    """A request in the engine, with what has to be said of it at the end. Times in seconds of one monotonic clock.

    ``row``: -1 while it waits. ``sampled``: what it had when it was preempted last. ``reused``: of its prompt, when it was
    admitted last without having sampled.
    """

    request: GenerationRequest
    submitted_s: float
    row: int = -1
    admitted_s: float | None = None
    reused: int = 0
    preemptions: int = 0
    sampled: Progress = NOTHING
    spans: list[VersionSpan] = field(default_factory=list)

    @property
    def context(self) -> NDArray[np.int32]:
        """Prompt and sampled tokens, int32 ``[n]``; of a request that runs: as it was when it was placed."""
        prompt = self.request.prompt
        return np.concatenate([prompt, self.sampled.tokens]) if len(self.sampled.tokens) else prompt

    def close_span(self, count: int, policy_version: int, checksum: str) -> None:
        """Note that these weights sampled what was sampled since the last span; ``count`` tokens are sampled by now."""
        length = count - sum(span.length for span in self.spans)
        if length and self.spans and self.spans[-1].policy_version == policy_version:
            length += self.spans.pop().length
        if length:
            self.spans.append(VersionSpan(policy_version=policy_version, checksum=checksum, length=length))

    def answer(self, done: Progress, *, now_s: float, num_threads: int) -> Generation:
        """Return the answer, ``done`` being all that was sampled."""
        request, admitted_s = self.request, now_s if self.admitted_s is None else self.admitted_s
        return Generation(
            request_id=request.request_id,
            tokens=done.tokens,
            behaviour_logprobs=done.behaviour,
            model_logprobs=done.model,
            finish=_finish(request, done.tokens),
            versions=tuple(self.spans),
            report=EngineReport(
                engine=NAME,
                precision=PRECISION,
                device=DEVICE,
                num_threads=num_threads,
                sampling=request.sampling,
                reused_tokens=self.reused,
                queue_s=admitted_s - self.submitted_s,
                generate_s=now_s - admitted_s,
                num_preemptions=self.preemptions,
            ),
        )


def _finish(request: GenerationRequest, tokens: NDArray[np.int32]) -> FinishReason:
    if int(tokens[-1]) in request.stop_tokens:
        return FinishReason.STOP
    return FinishReason.MAX_TOKENS if len(tokens) == request.max_tokens else FinishReason.MAX_CONTEXT
