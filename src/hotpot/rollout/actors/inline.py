"""Calls made at once by whoever begins them: no threads, and an order that follows from the calls alone.

Owns the open environments. An environment that hangs hangs the run; :class:`ThreadActors` and :class:`ProcessActors`
are for those.
"""

import time
from collections.abc import Callable

from hotpot.config import ActorsSection
from hotpot.errors import EnvironmentFailure
from hotpot.rollout.actors.calls import ActorState, Call, CallKind, Reply
from hotpot.rollout.actors.roster import Roster
from hotpot.rollout.actors.seats import Makers, Seat, failed


class InlineActors:
    """Implements :class:`Actors` where :meth:`begin` is called.

    Parameters
    ----------
    makers: what makes each environment, by its name in the mix.
    seconds: the clock that calls are timed by.
    """

    def __init__(
        self, makers: Makers, settings: ActorsSection, *, seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self._makers = makers
        self._seconds = seconds
        self._roster = Roster(settings)
        self._progress = {actor: 0 for actor, _ in self._roster}
        self._seats: dict[str, Seat] = {}
        self._replies: list[Reply] = []
        self._untaken: set[str] = set()

    def begin(self, call: Call) -> None:
        """Make the call; what came of it waits for :meth:`ready`. Raises ValueError for an attempt opened twice."""
        if call.kind is CallKind.OPEN and call.attempt_id in self._seats:
            raise ValueError(f"attempt {call.attempt_id} is open already; close it first")
        seat = self._seats.get(call.attempt_id)
        gone = self._roster.gone(call.actor_id)
        if call.kind is CallKind.CLOSE:
            self._forget(call.attempt_id)
        else:
            self._untaken.add(call.attempt_id)
            if gone is not None:
                self._replies.append(failed(call, gone))
                return
        if seat is None:
            seat = Seat(call.actor_id)
            if call.kind is CallKind.OPEN:
                self._seats[call.attempt_id] = seat
        self._replies.append(seat.perform(call, self._makers, self._seconds))
        if gone is None:
            self._progress[call.actor_id] += 1

    def ready(self, timeout_s: float) -> list[Reply]:  # noqa: ARG002 (what is not there will not come by waiting)
        """Return the replies to all calls begun since, in their order."""
        replies, self._replies, self._untaken = self._replies, [], set()
        return replies

    def assign(self, group: str) -> str:
        """Return the actor of ``group`` whose turn it is."""
        return self._roster.deal(group)

    def states(self) -> list[ActorState]:
        """Return how each actor stands: none has ever a call under way."""
        return [
            ActorState(
                actor_id=actor, actor_group=group, progress=self._progress[actor], calls=0, since_s=None
            )
            for actor, group in self._roster
        ]

    def replace(self, actor_id: str, reason: str) -> str:
        """Close the environments of an actor and go on under a fresh id."""
        fresh = self._roster.replace(actor_id, reason)
        self._close([name for name, seat in self._seats.items() if seat.actor_id == actor_id])
        del self._progress[actor_id]
        self._progress[fresh] = 0
        return fresh

    def close(self) -> None:
        """Close what is open; that an environment can't be closed is no one's concern any more."""
        self._close(list(self._seats))
        self._replies.clear()

    def _forget(self, attempt: str) -> None:
        """Drop the reply that ``attempt`` has not taken, and leave its seat to whoever closes it."""
        self._seats.pop(attempt, None)
        if attempt in self._untaken:
            self._untaken.discard(attempt)
            self._replies = [
                one for one in self._replies if one.attempt_id != attempt or one.kind is CallKind.CLOSE
            ]

    def _close(self, attempts: list[str]) -> None:
        for attempt in attempts:
            try:
                self._seats.pop(attempt).close()
            except EnvironmentFailure:
                continue
