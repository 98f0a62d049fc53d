"""What every engine is: five calls behind one gate, whoever serves them.

Owns the interface only. An engine knows tokens, never messages, episodes or rewards.
"""

from typing import TYPE_CHECKING, Protocol

from hotpot.engine.gate import RequestGate
from hotpot.types import EngineInfo, Generation, GenerationRequest, PublishReport

if TYPE_CHECKING:
    from hotpot.models import Weights


class Engine(Protocol):
    """Token ids in; token ids, log-probabilities and a report out.

    Contract (checked for every engine by :mod:`hotpot.testing.contracts_engine`):

    - Each accepted request is answered by exactly one :class:`Generation`.
    - A request's tokens are a function of its prompt, stop tokens, limits, sampling parameters, key and the weights,
      up to rounding: products over a batch may round otherwise in other company, which moves log-probabilities in
      their last digits and, rarely, a token whose random number falls on a boundary. Bit for bit the same is only
      what follows the same sequence of calls (submit, step, publish) on the same machine with as many threads, and
      whatever the embedded engine computes in deterministic mode (:mod:`hotpot.models.exact`).
    - Sampling parameters are frozen per purpose when the engine is made; ``gate`` holds them and counts what it refused.
    - Weights change only between tokens, whole or not at all; each token's version and checksum are reported.
    """

    @property
    def gate(self) -> RequestGate:
        """What checks requests before they are taken."""

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises :class:`~hotpot.errors.SamplingOverrideError` where its sampling parameters are not the frozen ones of
        its purpose, :class:`~hotpot.errors.EngineError` where it cannot be served (empty prompt, no room in the
        context, unknown token, id already in flight) or the engine is closed. A refused request leaves no trace.
        """

    def step(self) -> list[Generation]:
        """Do a bounded piece of work and return what finished in it; ``[]`` where nothing did or nothing waits."""

    def publish(self, weights: "Weights", policy_version: int) -> PublishReport:
        """Serve a copy of ``weights`` as ``policy_version`` from the next token on.

        Raises :class:`~hotpot.errors.EngineError` where the weights do not fit or the version does not grow; the old
        weights go on serving.
        """

    def info(self) -> EngineInfo:
        """Return what the engine serves right now, and its limits."""

    def close(self) -> None:
        """Give everything back. Requests in flight are never answered; further calls except this one raise."""
