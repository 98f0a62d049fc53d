"""An engine behind HTTP: the same guards, protocol and promises as the one in this process.

::

    submit ──► gate ──► admission (tokens) ──► threads: POST, try again ──► outcomes ──► step ──► Generation
                            ▲    ▲                                              │
                            │    └── asked again: server gone, foreign weights ◄┘
    publish ──► copy, folder ──► host loads it ──► probes agree? ── no ──► the old folder again, EngineError
                                                     └─ yes ──► the new version serves

Consumes requests; produces generations; waits for the server, each wait with a deadline. One thread at a time may call it; the
threads of :mod:`hotpot.engine.remote.calls` only make HTTP calls.

Invariants: what an answer says is checked before it counts; tokens are handed out only under weights whose label (or, where
the server gives none, whose publish) was verified; an accepted request is answered, or named by an :class:`EngineError`.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hotpot.engine.gate import RequestGate
from hotpot.engine.remote.admission import Admission
from hotpot.engine.remote.calls import Answered, Calls, Failed, Outcome
from hotpot.engine.remote.checking import needs_scores, to_generation
from hotpot.engine.remote.hosts import Facts
from hotpot.engine.remote.questions import Questions, Result
from hotpot.engine.remote.serving import Serving
from hotpot.errors import EngineError
from hotpot.models import Weights
from hotpot.types import (
    EngineInfo,
    EngineReport,
    Generation,
    GenerationRequest,
    PublishReport,
    Purpose,
    SamplingParams,
    VersionSpan,
)

STEP_S = 0.25
"""Longest time that a step waits for an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a remote engine: requests, tokens, seconds and tries."""

    max_context_tokens: int
    max_concurrency: int
    request_timeout_s: float
    recoveries: int
    keep_in_flight: bool


@dataclass(slots=True, eq=False)
class _Flight:
    request: GenerationRequest
    submitted_s: float
    epoch: int = -1


class RemoteEngine:
    """Implements :class:`hotpot.engine.Engine` over a server. Made by :mod:`hotpot.engine.remote.making`.

    ``on_close`` is called once, at the end. The weights of ``serving`` are put on the server and verified before the
    constructor returns.
    """

    def __init__(
        self,
        *,
        serving: Serving,
        questions: Questions,
        calls: Calls,
        url: str,
        vocab_size: int,
        sampling: Mapping[Purpose, SamplingParams],
        admission: Admission,
        limits: Limits,
        on_close: Callable[[], None],
    ) -> None:
        self.gate = RequestGate(sampling, vocab_size=vocab_size, max_context_tokens=limits.max_context_tokens)
        self.url = url
        self.serving = serving
        self._questions = questions
        self._calls = calls
        self._admission = admission
        self._limits = limits
        self._on_close = on_close
        self._flights: dict[str, _Flight] = {}
        self._outcomes: deque[Outcome] = deque()
        self._ready: list[Generation] = []
        self._epoch = 0
        self._recoveries = 0
        self._closed = False
        scored = [purpose for purpose, params in sampling.items() if needs_scores(params)]
        if scored and (limits.keep_in_flight or not questions.scores):
            raise EngineError(
                f"{scored[0].value} samples from {sampling[scored[0]]}, where the raw model's log-probability is another number "
                "than the server's: with engine.in_flight = 'finish' the vllm kind asks for it, others can't; sample at "
                "temperature 1 without filters"
            )
        serving.take()

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; see :meth:`hotpot.engine.Engine.submit`."""
        self._check_open()
        self.gate.check(request)
        if request.request_id in self._flights:
            raise EngineError(
                f"request {request.request_id!r} is in flight already; give each request in flight its own id"
            )
        self._admission.offer(request.request_id, request.prompt.size + self._questions.asked(request))
        self._flights[request.request_id] = _Flight(request=request, submitted_s=time.perf_counter())

    def step(self) -> list[Generation]:
        """Send what fits, wait up to :data:`STEP_S` for an answer, and return what finished.

        Raises :class:`EngineError` where a request can't be answered: the server refuses it or answers what was not asked, or
        is gone and does not come back. That request is forgotten; the others go on.
        """
        self._check_open()
        self._send()
        if not self._ready and not self._outcomes and self._admission.num_out:
            self._outcomes += self._calls.collect(STEP_S)
        self._settle_all()
        self._send()
        ready, self._ready = self._ready, []
        return ready

    def publish(self, weights: Weights, policy_version: int) -> PublishReport:
        """Serve a copy of ``weights``; see :meth:`hotpot.engine.Engine.publish`.

        Requests under way finish first under the old weights (``engine.in_flight = "finish"``), or go on under the new ones.
        """
        self._check_open()
        started = time.perf_counter()
        served = self.serving.current.policy_version
        if policy_version <= served:
            raise EngineError(
                f"policy version {policy_version} does not grow: {served} is being served; "
                "versions are never reused, take the next one"
            )
        self._admission.hold()
        try:
            if not self._limits.keep_in_flight:
                self._drain()
            made = self.serving.replace(weights, policy_version)
        finally:
            self._admission.release()
        return PublishReport(
            policy_version=policy_version, checksum=made.checksum, seconds=time.perf_counter() - started
        )

    def info(self) -> EngineInfo:
        """Return what the engine serves right now, and its limits."""
        self._check_open()
        facts, served = self._facts, self.serving.current
        return EngineInfo(
            engine=facts.engine,
            precision=facts.precision,
            device=facts.device,
            num_threads=facts.num_threads,
            policy_version=served.policy_version,
            checksum=served.checksum,
            max_context_tokens=self._limits.max_context_tokens,
            max_concurrency=self._limits.max_concurrency,
        )

    @property
    def idle(self) -> bool:
        """Whether no request is in the engine."""
        return not self._flights and not self._ready

    def close(self) -> None:
        """Break off what is under way, and end the server where it is ours."""
        if self._closed:
            return
        self._closed = True
        self._calls.close()
        try:
            self._on_close()
        finally:
            self.serving.close()

    @property
    def _facts(self) -> Facts:
        return self.serving.host.facts

    # ---- requests ----

    def _send(self) -> None:
        for request_id in self._admission.admit():
            flight = self._flights[request_id]
            flight.epoch = self._epoch
            work = self._questions.work(flight.request, self.serving.current.label)
            self._calls.send(request_id, self._epoch, work)

    def _settle_all(self) -> None:
        lost = ""
        while self._outcomes:
            outcome = self._outcomes.popleft()
            flight = self._flights.get(outcome.request_id)
            if flight is None or outcome.epoch != flight.epoch:
                continue
            if isinstance(outcome, Failed) and not outcome.lost:
                self._forget(outcome.request_id)
                raise EngineError(
                    f"request {outcome.request_id!r} can't be answered by {self._facts.engine}: {outcome.cause}"
                )
            if isinstance(outcome, Answered):
                versions = self.serving.spans(outcome.value.answer)
                if versions is not None:
                    self._ready.append(self._generation(flight, outcome, versions))
                    self._forget(outcome.request_id)
                    self._recoveries = 0
                    continue
                cause = f"it answered under weights nobody verified: {outcome.value.answer.stretches}"
            else:
                cause = outcome.cause
            # Asked again, under the same random numbers. Only what was sent since the last recovery calls for another.
            lost = cause if outcome.epoch == self._epoch else lost
            self._admission.again(outcome.request_id)
        if lost:
            self._recover(lost)

    def _forget(self, request_id: str) -> None:
        self._admission.settle(request_id)
        del self._flights[request_id]

    def _generation(
        self, flight: _Flight, outcome: Answered, versions: tuple[VersionSpan, ...]
    ) -> Generation:
        result: Result = outcome.value
        facts, request = self._facts, flight.request
        report = EngineReport(
            engine=facts.engine,
            precision=facts.precision,
            device=facts.device,
            num_threads=facts.num_threads,
            sampling=request.sampling,
            reused_tokens=result.answer.reused_tokens,
            queue_s=outcome.sent_s - flight.submitted_s,
            generate_s=outcome.seconds,
        )
        return to_generation(
            request, result.answer, result.finish, scores=result.scores, versions=versions, report=report
        )

    # ---- weights ----

    def _drain(self) -> None:
        """Wait until nothing is out."""
        deadline = time.monotonic() + 2 * self._limits.request_timeout_s
        while self._admission.num_out:
            self._outcomes += self._calls.collect(STEP_S)
            self._settle_all()
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self._admission.num_out} requests are still out after {2 * self._limits.request_timeout_s:.0f} s, so "
                    f"no weights can be published; look at the server, or raise engine.request_timeout_s"
                )

    def _recover(self, cause: str) -> None:
        """Bring the server back with the weights it is to serve. Raises :class:`EngineError` naming ``cause``."""
        self._epoch += 1
        self._recoveries += 1
        if self._recoveries > self._limits.recoveries:
            raise EngineError(
                f"{self._facts.engine} failed {self._recoveries} times in a row, the last time: {cause}; "
                f"{len(self._flights)} requests have no answer"
            )
        try:
            self.serving.bring_back()
        except EngineError as error:
            raise EngineError(f"{cause}. It did not come back: {error}") from error

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; make a new one")
