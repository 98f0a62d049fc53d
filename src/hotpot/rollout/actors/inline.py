"""Calls made at once by whoever begins them: no threads, and an order that follows from the calls alone.

Owns the open environments. An environment that hangs hangs the run; :class:`ThreadActors` and :class:`ProcessActors`
are for those.
"""

import time
from collections.abc import Callable

from hotpot.config import ActorsSection
from hotpot.errors import EnvironmentFailure
from hotpot.rollout.actors.calls import ActorState, Call, CallKind, Reply
from hotpot.rollout.actors.desk import Desk
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
        self._roster = Roster.of(settings)
        self._progress = {actor: 0 for actor, _ in self._roster}
        self._seats: dict[str, Seat] = {}
        self._desk = Desk()

    def begin(self, call: Call) -> None:
        """Make the call; what came of it waits for :meth:`ready`. Raises ValueError where it is not the call's turn."""
        self._desk.enter(call)
        gone = self._roster.gone(call.actor_id)
        if gone is not None and call.kind is not CallKind.CLOSE:
            self._desk.answer(failed(call, gone))
            return
        seat = self._seats.get(call.attempt_id) or Seat(call.attempt_id, call.actor_id)
        if call.kind is CallKind.CLOSE:
            self._seats.pop(call.attempt_id, None)
        else:
            self._seats[call.attempt_id] = seat
        self._desk.answer(seat.perform(call, self._makers, self._seconds))
        if gone is None:
            self._progress[call.actor_id] += 1

    def ready(self, timeout_s: float) -> list[Reply]:
        """Return the replies to all calls begun since, in their order. Where there is none, none comes by waiting; but whoever
        would wait has nothing else to do, and sleeps so long.
        """
        replies = self._desk.take()
        if not replies and timeout_s > 0:
            time.sleep(timeout_s)
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

    def _close(self, attempts: list[str]) -> None:
        for attempt in attempts:
            try:
                self._seats.pop(attempt).close()
            except EnvironmentFailure:
                continue
