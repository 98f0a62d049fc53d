"""A public fake engine: the whole protocol, no model. What it "samples" is written by a script.

Use it to test whatever calls an engine (agent loops, collectors, topologies) without torch and without chance.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotpot.engine import RequestGate
from hotpot.errors import EngineError
from hotpot.types import (
    EngineInfo,
    EngineReport,
    FinishReason,
    Generation,
    GenerationRequest,
    PublishReport,
    Purpose,
    SamplingParams,
    VersionSpan,
)

Script = Callable[[NDArray[np.int32]], Iterable[int]]
"""From a prompt int32 ``[n]`` to the tokens "sampled" after it; may be endless, the engine takes what it needs."""

FAKE_LOGPROB = -0.5
"""Log-probability of every token of the fake, under both distributions (behaviour is 0 where greedy)."""


@dataclass(slots=True, eq=False)
class _Running:
    request: GenerationRequest
    script: Iterator[int]
    started_s: float
    tokens: list[int] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)


class FakeEngine:
    """Implements :class:`hotpot.engine.Engine` from a script.

    Parameters
    ----------
    script: what is sampled after a prompt. A script that ends before a stop token or a limit is an EngineError.
    sampling: frozen parameters of each purpose; by default all purposes, the greedy one greedy.
    vocab_size, max_context_tokens, max_concurrency: limits, as the real engines have them.
    tokens_per_step: tokens a request gets in one step (so that publishes can fall in flight); by default all of them.
    policy_version: version served first.
    """

    def __init__(
        self,
        script: Script,
        *,
        sampling: Mapping[Purpose, SamplingParams] | None = None,
        vocab_size: int = 512,
        max_context_tokens: int = 512,
        max_concurrency: int = 128,
        tokens_per_step: int | None = None,
        policy_version: int = 0,
    ) -> None:
        if sampling is None:
            greedy = {Purpose.EVALUATION_GREEDY: SamplingParams(temperature=0.0)}
            sampling = {purpose: SamplingParams() for purpose in Purpose} | greedy
        self.gate = RequestGate(sampling, vocab_size=vocab_size, max_context_tokens=max_context_tokens)
        self.submitted: list[GenerationRequest] = []
        self._script = script
        self._max_context = max_context_tokens
        self._max_concurrency = max_concurrency
        self._tokens_per_step = tokens_per_step
        self._version = policy_version
        self._running: dict[str, _Running] = {}
        self._closed = False

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; every accepted one is kept in ``submitted``, in order."""
        self._check_open()
        self.gate.check(request)
        if request.request_id in self._running:
            raise EngineError(
                f"request {request.request_id!r} is in flight already; give each request in flight its own id"
            )
        self.submitted.append(request)
        self._running[request.request_id] = _Running(
            request=request, script=iter(self._script(request.prompt)), started_s=time.perf_counter()
        )

    def step(self) -> list[Generation]:
        """Give the first ``max_concurrency`` requests their next tokens; return those that finished."""
        self._check_open()
        finished = []
        for running in list(itertools.islice(self._running.values(), self._max_concurrency)):
            reason = self._advance(running)
            if reason is not None:
                del self._running[running.request.request_id]
                finished.append(self._generation(running, reason))
        return finished

    def publish(self, weights: Mapping[str, Any], policy_version: int) -> PublishReport:  # noqa: ARG002
        """Serve ``policy_version``; the weights are not looked at."""
        self._check_open()
        if policy_version <= self._version:
            raise EngineError(
                f"policy version {policy_version} does not grow: {self._version} is being served; "
                "versions are never reused, take the next one"
            )
        self._version = policy_version
        return PublishReport(policy_version=policy_version, checksum=self._checksum, seconds=0.0)

    def info(self) -> EngineInfo:
        """Return what the fake says it serves."""
        self._check_open()
        return EngineInfo(
            engine="fake",
            precision="none",
            device="none",
            num_threads=1,
            policy_version=self._version,
            checksum=self._checksum,
            max_context_tokens=self._max_context,
            max_concurrency=self._max_concurrency,
        )

    def close(self) -> None:
        """Forget everything in flight."""
        self._closed = True
        self._running.clear()

    @property
    def _checksum(self) -> str:
        return f"fake-{self._version}"

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; make a new one")

    def _advance(self, running: _Running) -> FinishReason | None:
        """Append tokens, and return why the generation ended if it did."""
        request = running.request
        room = self._max_context - request.prompt.size
        before = len(running.tokens)
        reason = None
        for token in itertools.islice(running.script, self._tokens_per_step):
            running.tokens.append(token)
            if token in request.stop_tokens:
                reason = FinishReason.STOP
            elif len(running.tokens) == request.max_tokens:
                reason = FinishReason.MAX_TOKENS
            elif len(running.tokens) == room:
                reason = FinishReason.MAX_CONTEXT
            if reason is not None:
                break
        sampled = len(running.tokens) - before
        if reason is None and sampled != self._tokens_per_step:
            raise EngineError(
                f"the script ended after {len(running.tokens)} tokens of request {request.request_id!r}, with neither a "
                "stop token nor a limit reached; let it yield a stop token, or go on for ever"
            )
        self._add_span(running, sampled)
        return reason

    def _add_span(self, running: _Running, length: int) -> None:
        spans = running.spans
        if spans and spans[-1].policy_version == self._version:
            length += spans.pop().length
        spans.append(VersionSpan(policy_version=self._version, checksum=self._checksum, length=length))

    def _generation(self, running: _Running, reason: FinishReason) -> Generation:
        request, count = running.request, len(running.tokens)
        behaviour = 0.0 if request.sampling.temperature == 0 else FAKE_LOGPROB
        return Generation(
            request_id=request.request_id,
            tokens=np.array(running.tokens, dtype=np.int32),
            behaviour_logprobs=np.full(count, behaviour, dtype=np.float32),
            model_logprobs=np.full(count, FAKE_LOGPROB, dtype=np.float32),
            finish=reason,
            versions=tuple(running.spans),
            report=EngineReport(
                engine="fake",
                precision="none",
                device="none",
                num_threads=1,
                sampling=request.sampling,
                reused_tokens=0,
                queue_s=0.0,
                generate_s=time.perf_counter() - running.started_s,
            ),
        )
