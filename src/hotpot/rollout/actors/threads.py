"""Calls made in threads, so that slow environments wait side by side; a call beyond its deadline is given up.

::

    begin ──job──► a thread of the actor ──reply──► outbox ──► ready
                        │ hangs                                  ▲
                        └─ deadline: left behind, counted ───────┘ failure that says where

Owns the open environments and the deadlines. One thread, the main one, calls all methods. A hung thread can't be ended:
it is left behind, and an actor with more than ``actors.max_hung`` of them takes no calls until it is replaced.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

from hotpot.config import ActorsSection
from hotpot.rollout.actors.calls import ActorState, Call, CallKind, Reply
from hotpot.rollout.actors.crew import Crew, Job, Outbox, hung_at
from hotpot.rollout.actors.desk import Desk, Held
from hotpot.rollout.actors.roster import Roster
from hotpot.rollout.actors.seats import Makers, Seat, closed, failed

_HELD_S = 0.1
"""Time between two looks at whether a broken actor takes calls again."""
CLOSE_S = 2.0
"""Longest time that closing waits for environments."""


class ThreadActors:
    """Implements :class:`Actors` with as many threads for each actor as it has calls under way at once.

    Parameters
    ----------
    makers: what makes each environment, by its name in the mix; called in threads.
    seconds: the clock that calls and deadlines are timed by; never goes back.
    roster: who is there; by default as ``settings`` say.
    notify: called by a thread whose reply is there, for whoever waits for other things than :meth:`ready` too.
    """

    def __init__(
        self,
        makers: Makers,
        settings: ActorsSection,
        *,
        seconds: Callable[[], float] = time.monotonic,
        roster: Roster | None = None,
        notify: Callable[[], None] | None = None,
    ) -> None:
        self._makers = makers
        self._settings = settings
        self._seconds = seconds
        self._notify = notify
        self._roster = roster or Roster.of(settings)
        self._outbox: Outbox = SimpleQueue()
        self._crews = {actor: self._crew(actor) for actor, _ in self._roster}
        self._seats: dict[str, Seat] = {}
        self._jobs: dict[str, Job] = {}  # by attempt: the call of it that somebody waits for
        self._begun: deque[Job] = deque()  # in order of deadlines; what has ended leaves it when it is first
        self._tickets = itertools.count()
        self._desk = Desk()
        self._held = Held(settings.call_timeout_s, seconds)

    def begin(self, call: Call) -> None:
        """Hand the call to a thread. Raises ValueError where it is not the call's turn."""
        self._desk.enter(call)
        if call.kind is CallKind.CLOSE:
            self._begin_close(call)
            return
        crew = self._crews.get(call.actor_id)
        seat = self._seats.get(call.attempt_id)
        if crew is None:
            self._desk.answer(failed(call, self._roster.gone(call.actor_id) or "it is closed"))
        elif call.kind is CallKind.OPEN:
            if crew.broken:
                self._held.put(call)
            else:
                self._open(call, crew)
        elif seat is None or crew.broken:
            why = crew.broken or f"attempt {call.attempt_id} has no environment any more"
            self._desk.answer(failed(call, why))
        else:
            crew.give(self._job(call, seat, crew))

    def ready(self, timeout_s: float) -> list[Reply]:
        """Return the replies that are there; where there is none, wait for one at most ``timeout_s`` seconds."""
        until_s = self._seconds() + timeout_s
        self._drain()
        while True:
            self._give_up_late()
            if self._held:
                self._see_to_held()
            replies = self._desk.take()
            pause_s = _HELD_S if self._held else math.inf
            left_s = min(until_s - self._seconds(), self._next_deadline_s() - self._seconds(), pause_s)
            if replies or (left_s <= 0 and self._seconds() >= until_s):
                return replies
            self._drain(max(left_s, 0.0))

    def assign(self, group: str) -> str:
        """Return the actor of ``group`` whose turn it is; one that takes calls, where there is one."""
        return self._roster.deal(group, lambda actor: not self._crews[actor].broken)

    def states(self) -> list[ActorState]:
        """Return how each actor stands."""
        return [self._crews[actor].state(group) for actor, group in self._roster]

    def replace(self, actor_id: str, reason: str) -> str:
        """Leave the threads of an actor to themselves, each to close its environment, and go on with fresh ones."""
        fresh = self._roster.replace(actor_id, reason)
        self._drain()
        crew = self._crews.pop(actor_id)
        self._crews[fresh] = self._crew(fresh)
        why = self._roster.gone(actor_id) or reason
        for job in self._retire(crew):
            del self._jobs[job.call.attempt_id]
            self._desk.answer(failed(job.call, why, seconds=self._seconds() - job.since_s))
        for call in self._held.take(lambda call: call.actor_id == actor_id):
            self._desk.answer(failed(call, why))
        return fresh

    def close(self) -> None:
        """Close what is open and end the threads, within :data:`CLOSE_S`; those that hang are left behind."""
        for crew in self._crews.values():
            self._retire(crew)
        until_s = self._seconds() + CLOSE_S
        for crew in self._crews.values():
            crew.join(until_s)

    def _open(self, call: Call, crew: Crew) -> None:
        seat = self._seats[call.attempt_id] = Seat(call.attempt_id, call.actor_id)
        crew.give(self._job(call, seat, crew))

    def _see_to_held(self) -> None:
        """Begin OPENs whose actors take calls again; give up those that have waited for too long."""
        for call in self._held.take(lambda call: not self._crews[call.actor_id].broken):
            self._open(call, self._crews[call.actor_id])
        for call in self._held.take_late():
            self._desk.answer(failed(call, self._crews[call.actor_id].broken))

    def _begin_close(self, call: Call) -> None:
        """Close behind the call under way, or at once; what is gone already counts as closed."""
        self._held.drop(call.attempt_id)
        under_way = self._jobs.pop(call.attempt_id, None)
        seat = self._seats.pop(call.attempt_id, None)
        crew = None if seat is None else self._crews.get(seat.actor_id)
        if seat is None or crew is None:
            self._desk.answer(closed(call))
            return
        closing = self._job(call, seat, crew)
        if under_way is None or not crew.close_behind(under_way, closing):
            crew.give(closing)

    def _job(self, call: Call, seat: Seat, crew: Crew) -> Job:
        now_s = self._seconds()
        job = Job(
            call=call,
            seat=seat,
            ticket=next(self._tickets),
            crew=crew,
            since_s=now_s,
            deadline_s=now_s + self._settings.call_timeout_s,
        )
        self._jobs[call.attempt_id] = job
        self._begun.append(job)
        if len(self._begun) > 2 * len(self._jobs) + 64:  # where the first is slow, many behind it have ended
            self._begun = deque(one for one in self._begun if self._waited_for(one))
        return job

    def _waited_for(self, job: Job) -> bool:
        return self._jobs.get(job.call.attempt_id) is job

    def _drain(self, timeout_s: float = 0.0) -> None:
        """Take what threads have put in the outbox; wait for the first of it. Replies no one waits for are dropped."""
        try:
            taken = self._outbox.get(timeout=timeout_s) if timeout_s else self._outbox.get_nowait()
            while True:
                job, reply = taken
                job.crew.pending.pop(job.ticket, None)
                job.crew.progress += 1
                if self._waited_for(job):
                    del self._jobs[reply.attempt_id]
                    self._desk.answer(reply)
                taken = self._outbox.get_nowait()
        except Empty:
            return

    def _next_deadline_s(self) -> float:
        while self._begun and not self._waited_for(self._begun[0]):
            self._begun.popleft()
        return self._begun[0].deadline_s if self._begun else math.inf

    def _give_up_late(self) -> None:
        while self._next_deadline_s() <= self._seconds():
            job = self._begun.popleft()
            if not job.crew.give_up(job):
                continue  # its reply is in the outbox
            call = job.call
            del self._jobs[call.attempt_id]
            self._seats.pop(call.attempt_id, None)
            seconds = self._seconds() - job.since_s
            reason = (
                f"environment {call.environment!r} hung in {call.kind} of attempt {call.attempt_id} for {seconds:.1f} s "
                f"(actors.call_timeout_s = {self._settings.call_timeout_s:g}) in {call.actor_id}: {hung_at(job.thread)}"
            )
            self._desk.answer(failed(call, reason, seconds=seconds))

    def _retire(self, crew: Crew) -> list[Job]:
        """End a crew's threads and close its environments; return the jobs somebody waits for that were given up."""
        mine = [seat for seat in self._seats.values() if seat.actor_id == crew.actor_id]
        given_up = [job for job in list(crew.pending.values()) if crew.give_up(job)]
        busy = {job.call.attempt_id for job in given_up}
        last = []
        for seat in mine:
            del self._seats[seat.attempt_id]
            if seat.attempt_id not in busy:
                call = Call(
                    kind=CallKind.CLOSE, attempt_id=seat.attempt_id, environment="", actor_id=seat.actor_id
                )
                last.append(self._unasked(call, seat, crew))
        crew.dismiss(last)
        return [job for job in given_up if self._waited_for(job)]

    def _unasked(self, call: Call, seat: Seat, crew: Crew) -> Job:
        return Job(
            call=call,
            seat=seat,
            ticket=next(self._tickets),
            crew=crew,
            since_s=self._seconds(),
            deadline_s=math.inf,
        )

    def _crew(self, actor_id: str) -> Crew:
        return Crew(
            actor_id,
            self._makers,
            self._outbox,
            max_hung=self._settings.max_hung,
            seconds=self._seconds,
            notify=self._notify,
        )
