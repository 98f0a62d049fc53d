"""Which weights a server serves, verified: the only place that puts weights on a host.

Owns host and store, the weights being served, and the labels of all that were ever verified. Every change ends verified,
or with the former weights verified again, or with an error that says that neither is so.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from hotpot.engine.remote import probes
from hotpot.engine.remote.calls import Asker, Broken
from hotpot.engine.remote.hosts import Host
from hotpot.engine.remote.questions import Questions, Result
from hotpot.engine.remote.weights import Served, WeightStore, score
from hotpot.engine.remote.wire import Answer, WireError
from hotpot.errors import EngineError
from hotpot.models import Weights
from hotpot.types import VersionSpan

Ask = Callable[[Callable[[Asker], Result]], Result]
"""Runs a piece of work in the calling thread."""


class Serving:
    """What is on a host. ``keep``: requests under way go on under new weights."""

    def __init__(
        self,
        host: Host,
        store: WeightStore,
        served: Served,
        *,
        questions: Questions,
        ask: Ask,
        vocab_size: int,
        max_context_tokens: int,
        tolerance: float,
        keep: bool,
    ) -> None:
        self.host = host
        self.current = served
        self._store = store
        self._known = {served.label: served}
        self._questions = questions
        self._ask = ask
        self._vocab_size = vocab_size
        self._max_context = max_context_tokens
        self._tolerance = tolerance
        self._keep = keep
        self._checks = 0

    def take(self) -> None:
        """Put the current weights on the host, where it takes any, and verify them. Raises :class:`EngineError`."""
        if self.host.takes_weights:
            self.host.put(self.current.folder, self.current.label, keep=self._keep)
        self._verify(self.current, None)

    def bring_back(self) -> None:
        """Wait for the host, or start it again, until it serves the current weights. Raises :class:`EngineError`."""
        self.host.revive(self.current.folder)
        if self.host.takes_weights and self.host.label() != self.current.label:
            self.take()
        else:
            self._verify(self.current, None)

    def replace(self, weights: Weights, policy_version: int) -> Served:
        """Serve a copy of ``weights`` instead. Raises :class:`EngineError`, saying what serves then."""
        former = self.current
        made = self._store.make(weights, policy_version)
        try:
            self.host.put(made.folder, made.label, keep=self._keep)
            self._verify(made, former)
        except EngineError as error:
            self._store.take_back()
            try:
                self.host.revive(former.folder)
                self.take()
            except EngineError as second:
                raise EngineError(
                    f"policy version {policy_version} was not published: {error}. Nor could version "
                    f"{former.policy_version} be served again: {second}"
                ) from error
            raise EngineError(
                f"policy version {policy_version} was not published: {error}. Version {former.policy_version} goes on "
                "serving"
            ) from error
        self.current = self._known[made.label] = made
        return made

    def spans(self, answer: Answer) -> tuple[VersionSpan, ...] | None:
        """Return who sampled the tokens of ``answer``; None where some weights among them were never verified."""
        if answer.stretches is None:
            return (self.current.span(len(answer.tokens)),)
        known = [(self._known.get(one.label), one.end - one.start) for one in answer.stretches]
        spans = [served.span(length) for served, length in known if served is not None]
        return tuple(spans) if len(spans) == len(known) else None

    def close(self) -> None:
        """Delete the folders; the host is its owner's."""
        self._store.close()

    def _verify(self, served: Served, former: Served | None) -> None:
        """Raise :class:`EngineError` unless the host says of its own samples what ``served`` says."""
        self._checks += 1
        requests = probes.probe_requests(
            vocab_size=self._vocab_size, max_context_tokens=self._max_context, salt=self._checks
        )
        salt = f"{served.label}-probe-{self._checks}"
        works = [self._questions.work(request, salt) for request in requests]
        try:
            with ThreadPoolExecutor(len(works), thread_name_prefix="engine-probe") as threads:
                answers = [result.answer for result in threads.map(self._ask, works)]
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
            tolerance=self._tolerance,
        )
        if problem:
            name = self.host.facts.engine
            raise EngineError(f"{name} does not serve version {served.policy_version}: {problem}")
