"""One request as a piece of work: the calls it takes, and the checks its answers pass before they count.

Owns the order of it. Runs in the threads of :mod:`hotpot.engine.remote.calls`; holds no state, so any number may run at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

from hotpot.engine.remote.calls import Asker, Broken
from hotpot.engine.remote.checking import (
    TAKEN_BACK,
    check_answer,
    check_logprobs,
    check_stretches,
    needs_scores,
)
from hotpot.engine.remote.wire import Answer, ScoringWire, Wire
from hotpot.types import FinishReason, GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A checked answer; ``scores`` are the raw model's log-probabilities where they had to be asked for."""

    answer: Answer
    finish: FinishReason
    scores: tuple[float, ...] | None


class Questions:
    """Turns requests into work for a server that serves ``model`` over ``wire``."""

    def __init__(self, wire: Wire, *, model: str, max_context_tokens: int) -> None:
        self._wire = wire
        self._model = model
        self._max_context = max_context_tokens

    @property
    def scores(self) -> bool:
        """Whether the raw model's log-probability can be had where it is another than the one sampled from."""
        return can_score(self._wire)

    def asked(self, request: GenerationRequest) -> int:
        """Return how many tokens the server is asked for."""
        return min(request.max_tokens, self._max_context - request.prompt.size)

    def work(self, request: GenerationRequest, salt: str) -> Callable[[Asker], Result]:
        """Return what asks for ``request`` and checks the answer; ``salt`` as in :meth:`Wire.call`.

        It raises :class:`Broken` where no answer can be had, :class:`WireError` where it is not what was asked for.
        """
        wire, asked = self._wire, self.asked(request)

        def work(asker: Asker) -> Result:
            answer = wire.read(asker.ask(wire.call(request, max_tokens=asked, salt=salt)))
            if answer.finish == TAKEN_BACK:
                raise Broken("the server gave the request up", lost=True)
            finish = check_answer(request, answer, model=self._model, max_tokens=asked)
            if answer.stretches is not None:
                check_stretches(answer.stretches, len(answer.tokens))
            scores = None
            if needs_scores(request.sampling) and can_score(wire):
                scores = _scores(wire, asker, request, answer, salt)
            return Result(answer=answer, finish=finish, scores=scores)

        return work


def can_score(wire: Wire) -> TypeGuard[ScoringWire]:
    """Whether ``wire`` can ask for scores."""
    return hasattr(wire, "scoring_call")


def _scores(
    wire: ScoringWire, asker: Asker, request: GenerationRequest, answer: Answer, salt: str
) -> tuple[float, ...]:
    payload = asker.ask(wire.scoring_call(request, answer.tokens, salt=salt))
    scores, stretches = wire.read_scores(payload, answer.tokens)
    check_logprobs(scores, answer.tokens)
    if {one.label for one in stretches} != {one.label for one in answer.stretches or ()}:
        raise Broken("the weights changed between a request and its scores", lost=True)
    return scores
