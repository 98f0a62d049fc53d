"""Who acts on what the supervisor decides: replaces the dead, rests environments that fail, ends a run that can't go on.

Owns the joining of beats, breaker and watchdog with the parts of one run. The decisions are those of
:mod:`hotpot.topology.supervision`. In serial order no decision hangs on the clock: then nobody is taken for dead, and where a
breaker opens the run ends.
"""

import time
from collections.abc import Iterable

from hotpot.config.sections import RemoteSection
from hotpot.errors import SupervisionError
from hotpot.rollout.actors import ProcessActors
from hotpot.rollout.collection import AttemptEnd
from hotpot.topology.collecting.harvest import Harvest
from hotpot.topology.collecting.lines import Line
from hotpot.topology.learning.process import LearnerProcess
from hotpot.topology.learning.protocol import Learning
from hotpot.topology.session import Session
from hotpot.topology.supervision.beats import (
    Beat,
    actor_beats,
    engine_beat,
    learner_beat,
    queue_beat,
    store_beat,
)
from hotpot.topology.supervision.breaker import EnvironmentBreaker
from hotpot.topology.supervision.supervisor import Decision, Replace, Stop, Supervisor


class Watch:
    """Watches one run's parts; :meth:`turn` is called in every turn of the loop."""

    def __init__(self, session: Session, learning: Learning, line: Line) -> None:
        recipe = session.recipe
        self._session, self._learning, self._line = session, learning, line
        self._serial, self._call_timeout_s = recipe.topology.serial, recipe.actors.call_timeout_s
        self._breaker = EnvironmentBreaker(recipe.supervision)
        self.supervisor = Supervisor(recipe.supervision)
        self._versions = {
            one.member.name: one.environment.env_version.version for one in session.environments
        }
        session.dog.silent, session.dog.children = self.supervisor.silent, self._children

    def turn(self, harvest: Harvest) -> None:
        """Look at every part, where that is due, and do what follows.

        Raises :class:`SupervisionError` where the run can't go on, with the culprit.
        """
        now_s, dog = time.monotonic(), self._session.dog
        if self._serial:
            dog.turn()
            return
        dog.turn(self.supervisor.moves)
        if not self.supervisor.due(now_s):
            return
        verdicts = self.supervisor.turn(now_s, self._beats(harvest))
        session = self._session
        session.store.record([session.event(kind, detail) for kind, detail in verdicts.events])
        for decision in verdicts.decisions:
            self._act(decision)
        self._rest(harvest, now_s)

    def ended(self, ends: Iterable[AttemptEnd]) -> None:
        """Hear how attempts ended; an environment that fails again and again is left alone for a while."""
        now_s, session = time.monotonic(), self._session
        for end in ends:
            version = self._versions[end.plan.environment]
            if end.cut:
                self._breaker.withdrawn(version, end.attempt_id)
                continue
            event = self._breaker.ended(version, end.attempt_id, now_s, failed=end.reason or None)
            if event is None:
                continue
            kind, detail = event
            session.store.record([session.event(kind, detail)])
            session.view.message(f"{kind}: {version}: {detail.get('reasons', '')}")
            if self._serial and kind == "environment_breaker_opened":
                self._stop(Stop(culprit=version, reason=self._breaker.reasons(version)))

    def _beats(self, harvest: Harvest) -> list[Beat]:
        session = self._session
        archive = session.store.archive_status()
        waiting = 0 if self._learning.busy else self._line.depth
        return [
            *actor_beats(session.rollout.actors.states(), call_timeout_s=self._call_timeout_s),
            self._engine_beat(),
            learner_beat("learner", busy=self._learning.busy, beat=self._learning.beat()),
            store_beat("store", archived=archive.archived, backlog=archive.backlog),
            queue_beat("queue", moved=harvest.groups.counts.finished, waiting=waiting),
        ]

    def _engine_beat(self) -> Beat:
        """A step of the embedded engine is a piece of work; one of a server's is only a look whether answers have come."""
        rollout, settings = self._session.rollout, self._session.recipe.engine
        if not isinstance(settings, RemoteSection):
            return engine_beat("engine", progress=rollout.counts.engine_steps, requests=rollout.num_requests)
        patience_s = settings.request_timeout_s * (settings.retries + 1)
        return engine_beat(
            "engine", progress=rollout.counts.answers, requests=rollout.num_requests, patience_s=patience_s
        )

    def _children(self) -> dict[str, int]:
        """Return the processes that are the run's, by name."""
        actors, learning = self._session.rollout.actors, self._learning
        found = actors.pids() if isinstance(actors, ProcessActors) else {}
        return found | ({"learner": learning.pid} if isinstance(learning, LearnerProcess) else {})

    def _rest(self, harvest: Harvest, now_s: float) -> None:
        """Say which environments may begin; one attempt of such as have rested."""
        held = set()
        for name, version in self._versions.items():
            leave = self._breaker.leave(version, now_s)
            if leave != "any":
                held.add(name)
            if leave == "one" and (attempt_id := harvest.let_through(name)) is not None:
                kind, detail = self._breaker.trial(version, attempt_id)
                self._session.store.record([self._session.event(kind, detail)])
        self._session.rollout.held = held
        verdict = self._breaker.verdict(self._versions.values())
        if verdict is not None:
            self._stop(verdict)

    def _act(self, decision: Decision) -> None:
        session = self._session
        if isinstance(decision, Stop):
            self._stop(decision)
        elif isinstance(decision, Replace):
            fresh = session.rollout.actors.replace(decision.actor_id, decision.reason)
            kind, detail = self.supervisor.replaced(decision.actor_id, fresh, decision.reason)
            session.store.record([session.event(kind, detail)])
            session.view.message(f"{decision.reason}; {fresh} is in its place")
        else:
            session.view.message(decision.reason)

    def _stop(self, stop: Stop) -> None:
        session = self._session
        session.store.record(
            [session.event("stopped_by_supervisor", {"culprit": stop.culprit, "reason": stop.reason})]
        )
        raise SupervisionError(
            f"the run can't go on because of {stop.culprit}: {stop.reason}; mend that and resume the run"
        )
