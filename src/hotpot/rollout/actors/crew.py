"""One actor's threads: a call goes to whichever is free, and a fresh one starts where none is.

Owns the threads, and who answers a call. A call's ticket lies in ``unanswered`` until someone takes it out: the thread
that carried it out, or the main thread that gives it up. Whoever takes it answers it, nobody else does; taking is one
operation of a dict, which no other thread can come between. A thread that finds its ticket gone closes the environment.

``main thread`` is the one that begins calls and takes replies; all public methods are its.
"""

import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import PurePath
from queue import SimpleQueue

from hotpot.rollout import boundary
from hotpot.rollout.actors.calls import ActorState, Call, CallKind, Reply
from hotpot.rollout.actors.seats import Makers, Seat, failed

_MAX_FRAMES = 12


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """A call on its way. ``closing`` is a CLOSE that came while this was under way: the same thread makes it.

    ``since_s`` when it was begun, or, from then on, when a thread began with it; ``thread`` that thread's identity, 0 before.
    """

    call: Call
    seat: Seat
    ticket: int
    crew: "Crew"
    since_s: float
    deadline_s: float
    closing: "Job | None" = None
    thread: int = 0


Outbox = SimpleQueue[tuple[Job, Reply]]


class Crew:
    """The threads of one actor.

    Parameters
    ----------
    outbox: where threads put replies; shared by the crews of a run.
    max_hung: threads that may hang; with one more the actor is broken.
    notify: called after each reply that a thread has put there, by that thread.
    """

    def __init__(
        self,
        actor_id: str,
        makers: Makers,
        outbox: Outbox,
        *,
        max_hung: int,
        seconds: Callable[[], float],
        notify: Callable[[], None] | None = None,
    ) -> None:
        self.actor_id = actor_id
        self.progress = 0
        self.pending: dict[
            int, Job
        ] = {}  # jobs whose replies the main thread has not taken; it alone touches it
        self._makers = makers
        self._outbox = outbox
        self._max_hung = max_hung
        self._seconds = seconds
        self._notify = notify
        self._unanswered: dict[int, Job] = {}
        self._hung: dict[int, Job] = {}  # given up, and their threads have not come back
        self._inbox: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_fit = 0  # threads that take a job or are on their way to the inbox; the others hang

    def give(self, job: Job) -> None:
        """Have a thread carry ``job`` out; where the machine has no more threads, its reply says so."""
        self.pending[job.ticket] = self._unanswered[job.ticket] = job
        if len(self.pending) > self._num_fit:
            thread = threading.Thread(target=self._work, name=f"{self.actor_id} calls", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                del self._unanswered[job.ticket]
                self._outbox.put((job, failed(job.call, f"{self.actor_id} has no thread left: {error}")))
                return
            self._threads.append(thread)
            self._num_fit += 1
        self._inbox.put(job)

    def close_behind(self, job: Job, closing: Job) -> bool:
        """Have ``closing`` made by the thread that carries ``job`` out, when that ends; False where it has ended."""
        self._unanswered[closing.ticket] = closing
        closing.thread, job.closing = job.thread, closing
        if self._unanswered.pop(job.ticket, None) is None:
            del self._unanswered[closing.ticket]
            return False
        del self.pending[job.ticket]
        self.pending[closing.ticket] = closing
        return True

    def give_up(self, job: Job) -> bool:
        """Take the answer to ``job`` out of its thread's hands and leave the thread behind; False where it is answered.

        The thread, should it come back, closes the environment and ends.
        """
        self._hung[job.ticket] = job
        if self._unanswered.pop(job.ticket, None) is None:
            del self._hung[job.ticket]
            return False
        del self.pending[job.ticket]
        self._num_fit -= 1
        return True

    @property
    def broken(self) -> str:
        """Why no further call should go here; empty where one may."""
        if len(self._hung) <= self._max_hung:
            return ""
        names = sorted({job.call.environment for job in self._hung.copy().values()})
        return (
            f"{self.actor_id} takes no calls: more than actors.max_hung = {self._max_hung} of its threads hang in "
            f"{', '.join(names)}"
        )

    def state(self, actor_group: str) -> ActorState:
        """Return how the actor stands; where it is broken its hung calls count as under way, so it has work."""
        broken = self.broken
        jobs = [job for ticket, job in self.pending.items() if ticket in self._unanswered]
        if broken:
            jobs += self._hung.copy().values()
        return ActorState(
            actor_id=self.actor_id,
            actor_group=actor_group,
            progress=self.progress,
            calls=len(jobs),
            since_s=min((job.since_s for job in jobs), default=None),
            broken=broken,
        )

    def dismiss(self, last: Iterable[Job]) -> None:
        """End the threads, each after what it is at; jobs of ``last`` are carried out before."""
        for job in last:
            self.give(job)
        for _ in self._threads:
            self._inbox.put(None)

    def join(self, until_s: float) -> None:
        """Wait for the threads to end, until the clock says ``until_s``."""
        for thread in self._threads:
            thread.join(max(0.0, until_s - self._seconds()))

    def _work(self) -> None:
        while (job := self._inbox.get()) is not None:
            job.thread = threading.get_ident()
            job.since_s = self._seconds()
            reply = self._perform(job) if job.ticket in self._unanswered else None
            if self._unanswered.pop(job.ticket, None) is not None and reply is not None:
                self._put(job, reply)
            elif not self._close_unasked(job):
                return

    def _close_unasked(self, job: Job) -> bool:
        """Close the environment of a job that was answered by somebody else; return whether the thread still counts."""
        closing = job.closing
        if closing is None:
            self._perform(replace(job, call=replace(job.call, kind=CallKind.CLOSE)))
            self._hung.pop(job.ticket, None)
            return False
        closing.thread = job.thread
        reply = self._perform(closing)
        if self._unanswered.pop(closing.ticket, None) is None:
            self._hung.pop(closing.ticket, None)
            return False
        self._put(closing, reply)
        return True

    def _perform(self, job: Job) -> Reply:
        try:
            return job.seat.perform(job.call, self._makers, self._seconds)
        except BaseException as error:  # noqa: BLE001 (whatever would end the thread is this call's failure)
            return failed(job.call, f"{job.call.kind} raised {boundary.words(error)}")

    def _put(self, job: Job, reply: Reply) -> None:
        self._outbox.put((job, reply))
        if self._notify is not None:
            self._notify()


def hung_at(thread: int) -> str:
    """Return where a thread stands, innermost function first, down to the boundary to the environment."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "no thread has begun with it"
    frames = traceback.extract_stack(frame)[::-1]
    inside = itertools.takewhile(lambda one: one.filename != boundary.__file__, frames)
    places = [f"{one.name} ({'/'.join(PurePath(one.filename).parts[-2:])}:{one.lineno})" for one in inside]
    return "it stands in " + " < ".join(places[:_MAX_FRAMES])
