"""One attempt's environment, and carrying out calls of it: whoever holds the seat makes the call and waits for it.

Owns the life of an environment from OPEN to CLOSE. Knows no threads, processes, tokens. Whatever goes wrong in the
environment comes back as a failure; only what is meant for the program itself (Ctrl-C) passes.
"""

from collections.abc import Callable, Mapping

from hotpot.envs import Environment
from hotpot.errors import EnvironmentFailure
from hotpot.rollout import boundary
from hotpot.rollout.actors.calls import Call, CallKind, Reply

Makers = Mapping[str, Callable[[], Environment]]
"""What makes a fresh environment, by the name that calls give it."""


class Seat:
    """The environment of one attempt; used by one thread at a time."""

    __slots__ = ("actor_id", "attempt_id", "environment")

    def __init__(self, attempt_id: str, actor_id: str) -> None:
        self.attempt_id = attempt_id
        self.actor_id = actor_id
        self.environment: Environment | None = None

    def perform(self, call: Call, makers: Makers, seconds: Callable[[], float]) -> Reply:
        """Make ``call`` and return what came of it; ``seconds`` is the clock that it is timed by."""
        before_s = seconds()
        observation, result, failure = None, None, None
        try:
            if call.kind is CallKind.OPEN and call.task is not None:
                self.environment = boundary.make(makers[call.environment])
                observation = boundary.reset(self.environment, call.task, call.seed)
            elif call.kind is CallKind.STEP and call.action is not None:
                result = boundary.step(self._opened(), call.action)
            else:
                self.close()
        except EnvironmentFailure as error:
            failure = error
        return Reply(
            kind=call.kind,
            attempt_id=call.attempt_id,
            seconds=seconds() - before_s,
            observation=observation,
            result=result,
            failure=failure,
        )

    def close(self) -> None:
        """Close the environment, once. Raises :class:`EnvironmentFailure` where it can't be closed."""
        environment, self.environment = self.environment, None
        if environment is not None:
            boundary.close(environment)

    def _opened(self) -> Environment:
        if self.environment is None:
            raise EnvironmentFailure(f"attempt {self.attempt_id} has no environment any more")
        return self.environment


def failed(call: Call, reason: str, *, seconds: float = 0.0) -> Reply:
    """Return the reply to a call that could not be carried out."""
    return Reply(
        kind=call.kind, attempt_id=call.attempt_id, seconds=seconds, failure=EnvironmentFailure(reason)
    )


def closed(call: Call) -> Reply:
    """Return the reply to a CLOSE where there is nothing to close."""
    return Reply(kind=call.kind, attempt_id=call.attempt_id, seconds=0.0)
