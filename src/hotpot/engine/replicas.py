"""Several engines as one: requests by session, a publish to all or to none.

::

    submit ──► gate ──► the session's replica, else the least loaded ──► replica ─┐
    step   ◄── answers, versions as the group names them ◄────────────────────────┘
    publish ─► a checked copy ──► replica 0, 1, ... ── one fails ──► those before it go back

Owns the routing, the group's version, and a copy of the weights being served (what a replica goes back to). Replicas are
alike in everything that could change what a request gets: engine, precision, kind of device, vocabulary, context, frozen
sampling parameters, weights; checked when the group is made, when one is replaced and before each publish.

Invariants: every replica serves the group's weights whenever a call returns, or the group refuses to go on and names the
replica that does not. Answers to requests name the group's versions only. One thread at a time may call it.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby

from hotpot.engine.gate import RequestGate
from hotpot.engine.protocol import Engine
from hotpot.errors import EngineError
from hotpot.models import Weights, copy_weights
from hotpot.models import checksum as checksum_of
from hotpot.types import (
    EngineInfo,
    Generation,
    GenerationRequest,
    PublishReport,
    VersionSpan,
)

MAX_SESSIONS = 65_536
"""Sessions whose replica is remembered; of more, those not heard of for longest lose at most what was computed for them."""


@dataclass(slots=True, eq=False)
class _Replica:
    """An engine, the group's version that it serves, and the requests it has.

    ``versions``: the group's version by the number that the engine has for it. The two differ only after it went back to
    earlier weights, which to an engine is a new version. ``fault`` says why it does not serve the group's weights.
    """

    engine: Engine
    serving: int
    versions: dict[int, int]
    out: dict[str, GenerationRequest] = field(default_factory=dict)
    fault: str = ""


class ReplicaGroup:
    """Implements :class:`hotpot.engine.Engine` over ``replicas``, which serve ``weights`` (copied) already.

    Raises :class:`EngineError` where there are none, or they are not alike.
    """

    def __init__(self, replicas: Sequence[Engine], weights: Weights) -> None:
        if not replicas or len({id(engine) for engine in replicas}) < len(replicas):
            raise EngineError(
                f"a group of {len(replicas)} replicas: give at least one, and each engine once only"
            )
        infos = [engine.info() for engine in replicas]
        self._like, self._checksum = infos[0], infos[0].checksum
        self._version = version = max(info.policy_version for info in infos)
        self._replicas = [
            _Replica(engine, serving=version, versions={info.policy_version: version})
            for engine, info in zip(replicas, infos, strict=True)
        ]
        self._weights = copy_weights(weights)
        gate = replicas[0].gate
        self.gate = RequestGate(
            gate.sampling, vocab_size=gate.vocab_size, max_context_tokens=gate.max_context_tokens
        )
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._ready: deque[Generation] = deque()
        self._closed = False
        for number, one in enumerate(self._replicas):
            self._check_alike(number, one.engine)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request at its session's replica, or the least loaded; see :meth:`hotpot.engine.Engine.submit`."""
        self._check_open()
        self.gate.check(request)
        if any(request.request_id in one.out for one in self._replicas):
            raise EngineError(
                f"request {request.request_id!r} is in flight already; give each request in flight its own id"
            )
        number = self._sessions.get(request.session_id)
        if number is None:
            number = min(range(len(self._replicas)), key=lambda index: len(self._replicas[index].out))
        one = self._replicas[number]
        one.engine.submit(request)
        one.out[request.request_id] = request
        self._sessions[request.session_id] = number
        self._sessions.move_to_end(request.session_id)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def step(self) -> list[Generation]:
        """Step every replica that has requests, and return what finished.

        Raises :class:`EngineError` that names the replica where one raises; what others finished comes with the next step.
        """
        self._check_open()
        for number, one in enumerate(self._replicas):
            if not one.out:
                continue
            try:
                finished = one.engine.step()
            except EngineError as error:
                raise EngineError(f"replica {number}: {error}") from error
            self._ready.extend([self._named(number, one, generation) for generation in finished])
        ready = list(self._ready)
        self._ready.clear()
        return ready

    def publish(self, weights: Weights, policy_version: int) -> PublishReport:
        """Serve a copy of ``weights`` from every replica; see :meth:`hotpot.engine.Engine.publish`.

        Raises :class:`EngineError` that names the replica which refused; those before it serve the old weights again. One
        that cannot go back is named too, and the group does nothing until :meth:`replace` gives another for it.
        """
        self._check_open()
        started = time.perf_counter()
        if policy_version <= self._version:
            raise EngineError(
                f"policy version {policy_version} does not grow: {self._version} is being served; "
                "versions are never reused, take the next one"
            )
        copied = copy_weights(weights)
        if checksum_of(weights) != checksum_of(copied):
            raise EngineError(
                "the weights changed while being copied; publish when no optimiser step is running"
            )
        for number, one in enumerate(self._replicas):
            self._check_alike(number, one.engine)
        sums: list[str] = []
        for number, one in enumerate(self._replicas):
            try:
                sums.append(self._serve(one, copied, policy_version))
                if sums[-1] != sums[0]:
                    raise EngineError(f"it reports checksum {sums[-1]}, replica 0 {sums[0]}")
            except EngineError as error:
                self._go_back(number)
                raise EngineError(
                    f"replica {number} of {len(self._replicas)} did not take policy version {policy_version}: {error}; the "
                    f"group goes on with {self._version}"
                ) from error
        self._weights, self._version, self._checksum = copied, policy_version, sums[0]
        return PublishReport(
            policy_version=policy_version, checksum=sums[0], seconds=time.perf_counter() - started
        )

    def replace(self, number: int, engine: Engine) -> None:
        """Put ``engine`` in the place of replica ``number``, which is closed; its requests are submitted again.

        Raises :class:`EngineError` where ``engine`` is not like the others or does not serve the group's weights; then the
        old one stays.
        """
        if self._closed:
            raise EngineError("the engine is closed; make a new one")
        self._check_alike(number, engine)
        old, own = self._replicas[number], engine.info().policy_version
        new = _Replica(engine, serving=self._version, versions={own: self._version})
        for request in old.out.values():
            engine.submit(request)
            new.out[request.request_id] = request
        self._replicas[number] = new
        old.engine.close()

    def info(self) -> EngineInfo:
        """Return what the group serves: concurrency is the sum, the device its kind where there are several."""
        self._check_open()
        infos = [one.engine.info() for one in self._replicas]
        devices = {info.device for info in infos}
        return replace(
            infos[0],
            device=infos[0].device if len(devices) == 1 else infos[0].device_kind,
            policy_version=self._version,
            checksum=self._checksum,
            max_concurrency=sum(info.max_concurrency for info in infos),
        )

    def close(self) -> None:
        """Close every replica."""
        self._closed = True
        with ExitStack() as stack:
            for one in self._replicas:
                stack.callback(one.engine.close)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; make a new one")
        for number, one in enumerate(self._replicas):
            if one.fault:
                raise EngineError(
                    f"replica {number} does not serve the group's weights: {one.fault}; replace it"
                )

    def _serve(self, one: _Replica, weights: Weights, version: int) -> str:
        """Publish ``weights`` on one replica as the group's ``version`` and return the checksum it reports."""
        own = max(version, one.engine.info().policy_version + 1)
        report = one.engine.publish(weights, own)
        one.versions[own] = one.serving = version
        return report.checksum

    def _go_back(self, number: int) -> None:
        """Let the replicas up to ``number`` serve the group's weights again, where they do not."""
        for one in self._replicas[: number + 1]:
            try:
                if one.serving != self._version:
                    found = self._serve(one, self._weights, self._version)
                    if found != self._checksum:
                        one.fault = f"it went back to checksum {found}, the group's is {self._checksum}"
            except EngineError as error:
                one.fault = f"it could not go back to policy version {self._version} ({error})"

    def _check_alike(self, number: int, engine: Engine) -> None:
        info, gate, reference = engine.info(), engine.gate, self._like
        found = {
            "engine": (info.engine, reference.engine),
            "precision": (info.precision, reference.precision),
            "kind of device": (info.device_kind, reference.device_kind),
            "max_context_tokens": (info.max_context_tokens, reference.max_context_tokens),
            "vocabulary": (gate.vocab_size, self.gate.vocab_size),
            "frozen sampling": (gate.sampling, self.gate.sampling),
            "weights' checksum": (info.checksum, self._checksum),
        }
        for what, (own, wanted) in found.items():
            if own != wanted:
                raise EngineError(
                    f"replica {number} has {what} {own}, the group has {wanted}: requests would get other tokens from "
                    "one than from another; make all replicas alike"
                )

    def _named(self, number: int, one: _Replica, generation: Generation) -> Generation:
        """Return an answer with the group's versions, and with the replica's number where its report is not the group's;
        the request is no longer out.
        """
        request = one.out.pop(generation.request_id, None)
        if request is None:
            raise EngineError(
                f"replica {number} answered request {generation.request_id!r}, which it does not have; mend the engine"
            )
        report, like = generation.report, self._like
        kind = (report.sampling, report.precision, report.device_kind)
        if kind != (request.sampling, like.precision, like.device_kind):
            generation = replace(
                generation, report=replace(report, engine=f"{report.engine}, replica {number}")
            )
        if all(one.versions.get(span.policy_version) == span.policy_version for span in generation.versions):
            return generation
        return replace(generation, versions=_joined(generation.versions, one.versions))


def _joined(spans: Sequence[VersionSpan], names: Mapping[int, int]) -> tuple[VersionSpan, ...]:
    """Return ``spans`` under the group's versions; neighbours that have the same become one."""
    named = [replace(span, policy_version=names[span.policy_version]) for span in spans]
    return tuple(
        VersionSpan(policy_version=version, checksum=checksum, length=sum(span.length for span in same))
        for (version, checksum), same in groupby(named, key=lambda span: (span.policy_version, span.checksum))
    )
