"""Calls made in processes, one for each actor, which can be killed where an environment holds or breaks it.

::

    begin ──Asked──► child: threads, as in ThreadActors ──Answered, Beat──► ready
                        │ dies, stands still, sends garbage          ▲
                        └──────── its calls fail for that reason ────┘ until the supervisor replaces it

Owns who has which environment, and processes that are on their way out. A child makes the environments by name and
parameters, computes their versions and refuses to work where they differ from the parent's. Children are no children
of a fork: they share nothing with the run and import no torch.
"""

import itertools
import selectors
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from hotpot.config import ActorsSection
from hotpot.envs import BoundEnvironment
from hotpot.errors import EnvironmentSpecError
from hotpot.rollout.actors.calls import ActorState, Call, CallKind, Reply
from hotpot.rollout.actors.desk import Desk, Held
from hotpot.rollout.actors.roster import Roster
from hotpot.rollout.actors.seats import closed, failed
from hotpot.rollout.actors.sources import source_of
from hotpot.rollout.actors.worker import GRACE_S, Worker

_TURN_S = 0.25
"""Longest time between two looks at who is late."""


class ProcessActors:
    """Implements :class:`Actors` with a process for each actor.

    Parameters
    ----------
    environments: those of the mix, by their name in it.
    beat_s: time between two beats of a child.
    logs: folder for what children print, a file for each; None: it goes where this process' standard error goes.
    starting: called again and again while children make their environments, which has a deadline of its own.

    Raises :class:`EnvironmentSpecError` where a child can't make the environments, or makes other versions of them.
    """

    def __init__(
        self,
        environments: Mapping[str, BoundEnvironment],
        settings: ActorsSection,
        *,
        beat_s: float = 1.0,
        seconds: Callable[[], float] = time.monotonic,
        logs: Path | None = None,
        starting: Callable[[], None] = lambda: None,
    ) -> None:
        self._sources = [source_of(name, environment) for name, environment in environments.items()]
        self._settings = settings
        self._beat_s = beat_s
        self._seconds = seconds
        self._logs = logs
        self._roster = Roster.of(settings)
        self._desk = Desk()
        self._held = Held(settings.call_timeout_s, seconds)
        self._selector = selectors.DefaultSelector()
        self._workers: dict[str, Worker] = {}
        self._leaving: list[Worker] = []
        self._homes: dict[str, Worker] = {}  # by attempt: who has its environment
        self._asked: dict[str, int] = {}  # by attempt: the ticket of the call that somebody waits for
        self._tickets = itertools.count()
        try:
            for actor, _ in self._roster:
                self._workers[actor] = self._worker(actor)
            self._await_start(starting)
        except BaseException:
            self.close()
            raise

    def pids(self) -> dict[str, int]:
        """Return the process ids, by actor."""
        return {actor: worker.pid for actor, worker in self._workers.items()}

    def begin(self, call: Call) -> None:
        """Send the call to its actor. Raises ValueError where it is not the call's turn."""
        self._desk.enter(call)
        attempt = call.attempt_id
        home = self._homes.get(attempt)
        if call.kind is CallKind.CLOSE:
            self._homes.pop(attempt, None)
            self._held.drop(attempt)
            ticket = self._asked.pop(attempt, None)
            if home is None or home.dead:
                self._desk.answer(closed(call))
                return
            if ticket is not None:
                home.forget(ticket)
            self._ask(home, call)
            return
        worker = self._workers.get(call.actor_id)
        if worker is None:
            self._desk.answer(failed(call, self._roster.gone(call.actor_id) or "it is closed"))
        elif call.kind is CallKind.OPEN:
            if worker.broken:
                self._held.put(call)
            else:
                self._open(call, worker)
        elif home is not worker or worker.broken:
            why = worker.broken or f"attempt {attempt} has no environment any more"
            self._desk.answer(failed(call, why))
        else:
            self._ask(worker, call)

    def ready(self, timeout_s: float) -> list[Reply]:
        """Return the replies that are there; where there is none, wait for one at most ``timeout_s`` seconds."""
        until_s = self._seconds() + timeout_s
        self._turn(0.0)
        while True:
            replies = self._desk.take()
            left_s = until_s - self._seconds()
            if replies or left_s <= 0:
                return replies
            self._turn(min(left_s, _TURN_S))

    def assign(self, group: str) -> str:
        """Return the actor of ``group`` whose turn it is; one that takes calls, where there is one."""
        return self._roster.deal(group, lambda actor: not self._workers[actor].broken)

    def states(self) -> list[ActorState]:
        """Return how each actor stands."""
        return [self._workers[actor].state(group) for actor, group in self._roster]

    def replace(self, actor_id: str, reason: str) -> str:
        """End an actor's process, by force where it doesn't end by itself, and start a fresh one."""
        fresh = self._roster.replace(actor_id, reason)
        worker = self._workers.pop(actor_id)
        why = self._roster.gone(actor_id) or reason
        why = f"{why} ({worker.dead})" if worker.dead else why
        self._lose(worker, why)
        self._leave(worker, stacks=True)
        for call in self._held.take(lambda call: call.actor_id == actor_id):
            self._desk.answer(failed(call, why))
        self._workers[fresh] = self._worker(fresh)
        return fresh

    def close(self) -> None:
        """End all processes, by force those that don't end by themselves."""
        for worker in self._workers.values():
            self._leave(worker, stacks=False)
        self._workers.clear()
        until_s = self._seconds() + 2 * GRACE_S
        while self._leaving and self._seconds() < until_s:
            self._reap()
            time.sleep(0.01)
        self._selector.close()

    def _worker(self, actor_id: str) -> Worker:
        log = None if self._logs is None else self._logs / f"{actor_id}.log"
        worker = Worker(
            actor_id, self._sources, self._settings, beat_s=self._beat_s, seconds=self._seconds, log=log
        )
        self._selector.register(worker.channel.socket, selectors.EVENT_READ, worker)
        return worker

    def _await_start(self, starting: Callable[[], None]) -> None:
        until_s = self._seconds() + 2 * self._settings.start_timeout_s
        while not all(worker.ready for worker in self._workers.values()):
            self._turn(_TURN_S)
            starting()
            faults = [worker.dead for worker in self._workers.values() if worker.dead]
            if faults or self._seconds() >= until_s:
                raise EnvironmentSpecError(
                    faults[0] if faults else "the actors' processes did not start in time"
                )

    def _open(self, call: Call, worker: Worker) -> None:
        self._homes[call.attempt_id] = worker
        self._ask(worker, call)

    def _see_to_held(self) -> None:
        """Begin OPENs whose actors take calls again; give up those that have waited for too long."""
        for call in self._held.take(lambda call: not self._workers[call.actor_id].broken):
            self._open(call, self._workers[call.actor_id])
        for call in self._held.take_late():
            self._desk.answer(failed(call, self._workers[call.actor_id].broken))

    def _ask(self, worker: Worker, call: Call) -> None:
        ticket = next(self._tickets)
        try:
            worker.ask(ticket, call)
        except ValueError as error:  # more than a message can hold
            self._desk.answer(failed(call, f"{call.kind} can't be sent to {call.actor_id}: {error}"))
            return
        self._asked[call.attempt_id] = ticket

    def _turn(self, timeout_s: float) -> None:
        """Wait for children to say something, take it, and see to those that are late, dead or on their way out."""
        for worker in self._workers.values():
            if not worker.dead:
                writes = selectors.EVENT_WRITE if worker.channel.unsent else 0
                self._selector.modify(worker.channel.socket, selectors.EVENT_READ | writes, worker)
        self._selector.select(timeout_s)
        for worker in self._workers.values():
            was_dead = bool(worker.dead)
            for reply in worker.answers():
                del self._asked[reply.attempt_id]
                self._desk.answer(reply)
            if worker.dead and not was_dead:
                self._lose(worker, worker.dead)
                self._leave(worker, stacks=True)
        self._reap()
        if self._held:
            self._see_to_held()

    def _lose(self, worker: Worker, reason: str) -> None:
        for call in worker.given_up():
            del self._asked[call.attempt_id]
            self._desk.answer(failed(call, reason))

    def _leave(self, worker: Worker, *, stacks: bool) -> None:
        if worker in self._leaving or worker.channel.socket.fileno() < 0:
            return
        self._selector.unregister(worker.channel.socket)
        worker.end(stacks=stacks)
        self._leaving.append(worker)

    def _reap(self) -> None:
        self._leaving = [worker for worker in self._leaving if not worker.gone()]
