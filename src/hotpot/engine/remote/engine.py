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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hotpot.engine.gate import RequestGate
from hotpot.engine.remote import probes
from hotpot.engine.remote.admission import Admission
from hotpot.engine.remote.calls import Answered, Asker, Broken, Calls, Failed, Outcome
from hotpot.engine.remote.checking import (
    TAKEN_BACK,
    check_answer,
    check_logprobs,
    check_stretches,
    needs_scores,
    to_generation,
)
from hotpot.engine.remote.hosts import Host
from hotpot.engine.remote.weights import Served, WeightStore, score
from hotpot.engine.remote.wire import Answer, ScoringWire, Wire, WireError
from hotpot.errors import EngineError
from hotpot.models import Weights
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

STEP_S = 0.25
"""Longest time that a step waits for an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a remote engine: requests, tokens, seconds and tries."""

    max_context_tokens: int
    max_concurrency: int
    request_timeout_s: float
    recoveries: int
    tolerance: float
    keep_in_flight: bool


@dataclass(slots=True, eq=False)
class _Flight:
    request: GenerationRequest
    submitted_s: float
    epoch: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    answer: Answer
    finish: FinishReason
    scores: tuple[float, ...] | None


class RemoteEngine:
    """Implements :class:`hotpot.engine.Engine` over a wire and a host. Made by ``making``.

    ``on_close`` is called once, at the end. ``served`` is put on the host, where it takes weights, and verified before the
    constructor returns.
    """

    def __init__(
        self,
        *,
        wire: Wire,
        host: Host,
        calls: Calls,
        store: WeightStore,
        served: Served,
        url: str,
        model: str,
        vocab_size: int,
        sampling: Mapping[Purpose, SamplingParams],
        admission: Admission,
        limits: Limits,
        on_close: Callable[[], None],
    ) -> None:
        self.gate = RequestGate(sampling, vocab_size=vocab_size, max_context_tokens=limits.max_context_tokens)
        self.host = host
        self.url = url
        self._store = store
        self._wire = wire
        self._calls = calls
        self._served = served
        self._known = {served.label: served}
        self._model = model
        self._vocab_size = vocab_size
        self._admission = admission
        self._limits = limits
        self._on_close = on_close
        self._flights: dict[str, _Flight] = {}
        self._outcomes: deque[Outcome] = deque()
        self._ready: list[Generation] = []
        self._epoch = 0
        self._recoveries = 0
        self._checks = 0
        self._closed = False
        scored = [purpose for purpose, params in sampling.items() if needs_scores(params)]
        if scored and (limits.keep_in_flight or not hasattr(wire, "scoring_call")):
            raise EngineError(
                f"{scored[0].value} samples from {sampling[scored[0]]}, where the raw model's log-probability is another number "
                "than the server's: with engine.in_flight = 'finish' the vllm kind asks for it, others can't; sample at "
                "temperature 1 without filters"
            )
        if host.takes_weights:
            host.put(served.folder, served.label, keep=False)
        self._verify(served, None)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; see :meth:`hotpot.engine.Engine.submit`."""
        self._check_open()
        self.gate.check(request)
        if request.request_id in self._flights:
            raise EngineError(
                f"request {request.request_id!r} is in flight already; give each request in flight its own id"
            )
        self._admission.offer(request.request_id, request.prompt.size + self._asked(request))
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
        former = self._served
        if policy_version <= former.policy_version:
            raise EngineError(
                f"policy version {policy_version} does not grow: {former.policy_version} is being served; "
                "versions are never reused, take the next one"
            )
        made = self._store.make(weights, policy_version)
        self._admission.hold()
        try:
            if not self._limits.keep_in_flight:
                self._drain()
            self._replace(made, former)
        finally:
            self._admission.release()
        self._served = made
        self._known[made.label] = made
        return PublishReport(
            policy_version=policy_version, checksum=made.checksum, seconds=time.perf_counter() - started
        )

    def info(self) -> EngineInfo:
        """Return what the engine serves right now, and its limits."""
        self._check_open()
        facts = self.host.facts
        return EngineInfo(
            engine=facts.engine,
            precision=facts.precision,
            device=facts.device,
            num_threads=facts.num_threads,
            policy_version=self._served.policy_version,
            checksum=self._served.checksum,
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
            self._store.close()

    def retake(self) -> None:
        """Put this engine's weights on the host again, after somebody borrowed it."""
        self.host.put(self._served.folder, self._served.label, keep=self._limits.keep_in_flight)
        self._verify(self._served, None)

    # ---- requests ----

    def _asked(self, request: GenerationRequest) -> int:
        """Return how many tokens the server is asked for."""
        return min(request.max_tokens, self._limits.max_context_tokens - request.prompt.size)

    def _send(self) -> None:
        for request_id in self._admission.admit():
            flight = self._flights[request_id]
            flight.epoch = self._epoch
            self._calls.send(request_id, self._epoch, self._work(flight.request, self._served.label))

    def _work(self, request: GenerationRequest, salt: str) -> Callable[[Asker], _Result]:
        wire, asked = self._wire, self._asked(request)

        def work(asker: Asker) -> _Result:
            answer = wire.read(asker.ask(wire.call(request, max_tokens=asked, salt=salt)))
            if answer.finish == TAKEN_BACK:
                raise Broken("the server gave the request up", lost=True)
            finish = check_answer(request, answer, model=self._model, max_tokens=asked)
            if answer.stretches is not None:
                check_stretches(answer.stretches, len(answer.tokens))
            scores = _scores(wire, asker, request, answer, salt) if needs_scores(request.sampling) else None
            return _Result(answer=answer, finish=finish, scores=scores)

        return work

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
                    f"request {outcome.request_id!r} can't be answered by {self.host.facts.engine}: {outcome.cause}"
                )
            if isinstance(outcome, Answered):
                versions = self._versions(outcome.value.answer)
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

    def _versions(self, answer: Answer) -> tuple[VersionSpan, ...] | None:
        """Return who sampled the tokens; None where some weights among them were never verified."""
        if answer.stretches is None:
            return (self._served.span(len(answer.tokens)),)
        known = [self._known.get(stretch.label) for stretch in answer.stretches]
        spans = [
            one.span(stretch.end - stretch.start)
            for one, stretch in zip(known, answer.stretches, strict=True)
            if one
        ]
        return tuple(spans) if len(spans) == len(known) else None

    def _generation(
        self, flight: _Flight, outcome: Answered, versions: tuple[VersionSpan, ...]
    ) -> Generation:
        result: _Result = outcome.value
        facts, request = self.host.facts, flight.request
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

    def _replace(self, made: Served, former: Served) -> None:
        """Put ``made`` on the host and verify it; where that fails put ``former`` back and raise."""
        keep = self._limits.keep_in_flight
        try:
            self.host.put(made.folder, made.label, keep=keep)
            self._verify(made, former)
        except EngineError as error:
            self._store.take_back()
            try:
                self.host.revive(former.folder)
                if self.host.takes_weights:
                    self.host.put(former.folder, former.label, keep=keep)
                self._verify(former, None)
            except EngineError as second:
                raise EngineError(
                    f"policy version {made.policy_version} was not published: {error}. Nor could version "
                    f"{former.policy_version} be served again: {second}"
                ) from error
            raise EngineError(
                f"policy version {made.policy_version} was not published: {error}. Version {former.policy_version} goes on "
                "serving"
            ) from error

    def _recover(self, cause: str) -> None:
        """Bring the server back with the weights it is to serve. Raises :class:`EngineError` naming ``cause``."""
        self._epoch += 1
        self._recoveries += 1
        if self._recoveries > self._limits.recoveries:
            raise EngineError(
                f"{self.host.facts.engine} failed {self._recoveries} times in a row, the last time: {cause}; "
                f"{len(self._flights)} requests have no answer"
            )
        try:
            self.host.revive(self._served.folder)
            if self.host.takes_weights and self.host.label() != self._served.label:
                self.host.put(self._served.folder, self._served.label, keep=self._limits.keep_in_flight)
            self._verify(self._served, None)
        except EngineError as error:
            raise EngineError(f"{cause}. It did not come back: {error}") from error

    def _verify(self, served: Served, former: Served | None) -> None:
        """Raise :class:`EngineError` unless the host says of its own samples what ``served`` says."""
        self._checks += 1
        requests = probes.probe_requests(
            vocab_size=self._vocab_size,
            max_context_tokens=self._limits.max_context_tokens,
            salt=self._checks,
        )
        salt = f"{served.label}-probe-{self._checks}"
        works: list[Callable[[Asker], Any]] = [self._work(request, salt) for request in requests]
        try:
            with ThreadPoolExecutor(len(works), thread_name_prefix="engine-probe") as threads:
                answers = [result.answer for result in threads.map(self._calls.now, works)]
        except (Broken, WireError) as error:
            raise EngineError(f"a probe got no answer that can be used: {error}") from error
        for answer in answers:
            labels = {stretch.label for stretch in answer.stretches or ()}
            if answer.stretches is not None and labels != {served.label}:
                raise EngineError(f"it says that it serves {sorted(labels)}, not {served.label!r}")
        problem = probes.verdict(
            [
                score(served, former, request.prompt, answer.tokens, answer.logprobs)
                for request, answer in zip(requests, answers, strict=True)
            ],
            tolerance=self._limits.tolerance,
        )
        if problem:
            raise EngineError(
                f"{self.host.facts.engine} does not serve version {served.policy_version}: {problem}"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; make a new one")


def _scores(
    wire: Wire, asker: Asker, request: GenerationRequest, answer: Answer, salt: str
) -> tuple[float, ...]:
    scoring: ScoringWire = wire  # type: ignore[assignment]  # the constructor has seen to it
    payload = asker.ask(scoring.scoring_call(request, answer.tokens, salt=salt))
    scores, stretches = scoring.read_scores(payload, answer.tokens)
    check_logprobs(scores, answer.tokens)
    if {one.label for one in stretches} != {one.label for one in answer.stretches or ()}:
        raise Broken("the weights changed between a request and its scores", lost=True)
    return scores
