"""Many episodes at once over one engine and some actors: what is ready is asked together, finished trajectories come out.

::

    plans ──► episodes (as many as there are places) ──request──► engine.step() ──answer──► their actions
                 ▲    │ environment broke                                                       │ call
                 └────┘ a fresh try, then dropped ◄──── replies of actors ◄─────────────────────┘

Consumes plans; produces trajectories; waits for the engine (at most ``deadline_s`` for one request) and for actors (whose
calls have deadlines of their own). Waiting is counted in seconds the engine worked, so neither environments nor the taker of
the trajectories are taken for it. Owns the attempts of a rollout: each ends as finished (its trajectory is stored by whoever
takes it), failed or dropped. Knows no topology, store or learner. One thread; with inline actors the order of everything
follows from plans and engine alone.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Collection as AnyOf
from dataclasses import dataclass, replace

from hotpot.config import RolloutSection
from hotpot.engine import Engine
from hotpot.envs import BoundEnvironment
from hotpot.errors import (
    ContextFullError,
    EngineError,
    EngineReportError,
    EnvironmentFailure,
    EnvironmentOverrideError,
    HotpotError,
)
from hotpot.experience.crashpoints import reach
from hotpot.rollout.actors import Actors, CallKind, Reply
from hotpot.rollout.attempts import STOPPED, AttemptLog, RolloutCounts, Try, readable, tally
from hotpot.rollout.clock import Clock
from hotpot.rollout.collection import AttemptEnd, Collection, Live, Occupied, Places, even_places, of_episodes
from hotpot.rollout.dialect import Dialect
from hotpot.rollout.engine_report import ReportCheck
from hotpot.rollout.loop import Episode, EpisodeRules
from hotpot.rollout.past import NOTHING, Past
from hotpot.rollout.recorder import Provenance
from hotpot.rollout.tasks import EpisodePlan
from hotpot.timeline import Timeline
from hotpot.types import Generation, Purpose, SamplingParams, Split, Trajectory

Redact = Callable[[str], tuple[str, int]]

WAIT_S = 0.05
"""Longest wait for an actor's reply within one turn where the engine has nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Where the episodes of one environment play: what the agent is told first, and the versions on their records."""

    environment: BoundEnvironment
    system_prompt: str
    provenance: Provenance


class Rollout:
    """Collects trajectories.

    Parameters
    ----------
    scenes: the environments of the run, by the name that plans give them.
    sampling: frozen parameters of each purpose; neither plans nor environments can change them.
    redact: maps text of an environment (messages, reasons of failures) to text without secrets and their number.
    actors: who calls the environments. The rollout closes them with itself (:meth:`close`).
    places: what each actor group may have at once; by default one group shares the engine's ``max_concurrency``.
    deterministic: no decision hangs on the clock (``max_seconds`` is not applied).
    deadline_s: how long the engine may work while one request is out; then it counts as broken.
    """

    def __init__(
        self,
        engine: Engine,
        scenes: Mapping[str, Scene],
        dialect: Dialect,
        settings: RolloutSection,
        *,
        sampling: Mapping[Purpose, SamplingParams],
        attempts: AttemptLog,
        redact: Redact,
        timeline: Timeline,
        actors: Actors,
        places: Sequence[Places] = (),
        deterministic: bool = False,
        clock: Clock | None = None,
        deadline_s: float = 600.0,
    ) -> None:
        self.counts = RolloutCounts()
        self.reports = ReportCheck(settings.engine_report_differs)
        self.actors = actors
        self.held: AnyOf[str] = ()
        self.paused = False
        self._engine = engine
        self._scenes = dict(scenes)
        self._dialect = dialect
        self._settings = settings
        self._sampling = dict(sampling)
        self._attempts = attempts
        self._redact = redact
        self._timeline = timeline
        self._occupied = Occupied(places or even_places(["group-0"], engine.info().max_concurrency))
        self._deterministic = deterministic
        self._clock = clock or Clock()
        self._deadline_s = deadline_s
        self._collections: list[Collection] = []
        self._flights: dict[str, tuple[Collection, Live]] = {}
        self._called: dict[str, tuple[Collection, Live]] = {}
        self._abandoned: set[str] = set()
        self._worked_s = 0.0

    def collect(
        self, plans: Sequence[EpisodePlan], purpose: Purpose, past: Past = NOTHING
    ) -> Iterator[list[Trajectory]]:
        """Run all plans for ``purpose`` and yield, after every turn, the trajectories that finished in it.

        The list is empty where none did: whoever takes them is back in control after each turn, and can stop there.

        A plan whose environment breaks, or for which the engine reports that it sampled otherwise than asked, is tried
        again in a fresh environment, with the same random numbers, up to ``max_attempts`` times, then dropped and
        counted: there may be fewer trajectories than plans. Time is counted as ``generate``, ``environment`` and ``store``
        (ledger). If the iterator is closed early, or anything raises, attempts whose trajectories were not yielded are
        dropped and their environments closed.

        ``past`` says what is settled already: its plans are not run, or run as company, off the ledger; then what they
        bring is yielded too, and whoever takes it leaves it alone.

        Raises :class:`EngineError` where the engine does not answer, or answers what was not asked.
        """
        work = self.begin(purpose)
        try:
            self.add(work, plans, past)
            while work.unfinished:
                self.turn()
                yield work.take()
                # Last, so that what finished in this turn is out before a request that did not raises.
                self.check_deadline()
        finally:
            self.end(work)

    def begin(self, purpose: Purpose) -> Collection:
        """Return a new collection, with nothing in it. Evaluations come before training where places are short."""
        self.reports.expect(self._engine.info())
        work = Collection(
            purpose=purpose,
            rules={name: self._rules(purpose, scene) for name, scene in self._scenes.items()},
        )
        self._collections.append(work)
        self._collections.sort(key=lambda one: one.purpose is Purpose.TRAINING)
        return work

    def add(self, work: Collection, plans: Sequence[EpisodePlan], past: Past = NOTHING) -> None:
        """Put ``plans`` in line; see :meth:`collect`."""
        _check_purpose(plans, work.purpose)
        work.waiting.extend(
            Try(plan=plan, attempt=past.next_attempt(plan), company=past.is_settled(plan))
            for plan in past.to_run(plans)
        )

    def turn(self, wait_s: float = WAIT_S) -> None:
        """Do a bounded piece of work for all collections: begin what there are places for, one step of the engine, and what
        follows from its answers and from the replies of actors. Where the engine has nothing to do, wait at most ``wait_s``
        seconds for a reply.

        No training episode begins while :attr:`paused` is true, nor of the environments named in :attr:`held`.
        """
        for work in self._collections:
            self._launch(work)
        busy = bool(self._flights)
        if busy:
            self.counts.engine_steps += 1
            self.counts.requests_in_engine += len(self._flights)
            with self._timeline.span("generate"):
                began_s = self._clock.now_s()
                generations = self._engine.step()
                self._worked_s += self._clock.now_s() - began_s
            with self._timeline.span("environment", whole=True):
                for generation in generations:
                    self._deliver(generation)
        with self._timeline.span("environment", whole=True):
            self._hear(0.0 if busy else wait_s)
        for work in self._collections:
            self._hand_out(work)

    @property
    def capacity(self) -> int:
        """Episodes at once."""
        return self._occupied.capacity

    @property
    def free_places(self) -> int:
        """Episodes that may begin now."""
        return self._occupied.capacity - sum(self._occupied.episodes.values())

    @property
    def num_requests(self) -> int:
        """Requests in the engine."""
        return len(self._flights)

    def let_through(self, work: Collection, environment: str) -> str | None:
        """Put one waiting try of a held ``environment`` on the ledger, to begin next; return its attempt, None where none
        waits.
        """
        found = next((one for one in work.waiting if one.plan.environment == environment), None)
        if found is None:
            return None
        work.waiting.remove(found)
        with self._timeline.span("store"):
            self._attempts.lease([found.lease(work.purpose)])
        work.leased.append(found)
        return found.attempt_id

    def check_deadline(self) -> None:
        """Raise :class:`EngineError` where a request is out for longer than the deadline."""
        for request_id, (
            _,
            live,
        ) in self._flights.items():  # in order of submission, so the first waits longest
            waited_s = self._worked_s - live.since_s
            if waited_s > self._deadline_s:
                raise EngineError(
                    f"request {request_id!r} got no answer in {waited_s:.0f} s (deadline {self._deadline_s:.0f} s, "
                    f"{len(self._flights)} requests are out); look at the engine, or lower engine.max_concurrency"
                )
            return

    def cut(self, work: Collection, episodes: AnyOf[str], reason: str) -> None:
        """End what is under way of ``episodes`` for ``reason``: nothing is wrong with them, and nobody waits for them."""
        for line in (work.waiting, work.leased):
            for one in of_episodes(line, episodes):
                line.remove(one)
                if line is work.leased:
                    self._drop(work, one, reason)
                work.ends.append(
                    AttemptEnd(attempt_id=one.attempt_id, plan=one.plan, reason=reason, cut=True)
                )
        for one in of_episodes([live.one for live in work.live.values()], episodes):
            self._leave(work, work.live[one.attempt_id])
            self._drop(work, one, reason)
            work.ends.append(AttemptEnd(attempt_id=one.attempt_id, plan=one.plan, reason=reason, cut=True))

    def end(self, work: Collection) -> None:
        """Take a collection off: what is open of it is closed, and its attempts are dropped."""
        if work not in self._collections:
            return
        self._collections.remove(work)
        gone = list(work.live.values())
        names = [episode.attempt_id for episode in (*(live.episode for live in gone), *work.finished)]
        names += [trajectory.row.attempt_id for trajectory in work.taken]
        names += [one.attempt_id for one in work.leased]
        work.tries |= {one.attempt_id: one for one in work.leased}
        for live in gone:
            self._leave(work, live)
        known = [name for name in dict.fromkeys(names) if not work.tries[name].company]
        for name in known:
            self._attempts.drop(name, STOPPED)
        self.counts.dropped += len(known)

    def close(self) -> None:
        """End every collection, then the actors."""
        for work in list(self._collections):
            self.end(work)
        self.actors.close()

    # ---- beginning episodes ----

    def _rules(self, purpose: Purpose, scene: Scene) -> EpisodeRules:
        limit = self._engine.info().max_context_tokens
        return EpisodeRules(
            purpose=purpose,
            sampling=self._sampling[purpose],
            limits=self._settings,
            max_context_tokens=min(self._settings.max_context_tokens, limit),
            deterministic=self._deterministic,
            system_prompt=scene.system_prompt,
            redact=self._redact,
            reports=self.reports,
        )

    def _launch(self, work: Collection) -> None:
        """Start episodes as far as there are places; attempts are put on the ledger in blocks, ahead of their start."""
        if self.paused and work.purpose is Purpose.TRAINING:
            return
        while (work.waiting or work.leased) and self._occupied.free_group() is not None:
            if not work.leased and not self._lease(work):
                return
            with self._timeline.span("environment", whole=True):
                while work.leased and (group := self._occupied.free_group()) is not None:
                    self._start(work, work.leased.popleft(), group)

    def _lease(self, work: Collection) -> bool:
        """Put a block of waiting tries on the ledger; return whether there was one."""
        block: list[Try] = []
        kept: deque[Try] = deque()
        held = self.held if work.purpose is Purpose.TRAINING else ()
        while work.waiting and len(block) < self._occupied.capacity:
            one = work.waiting.popleft()
            (kept if one.plan.environment in held else block).append(one)
        work.waiting.extendleft(reversed(kept))
        if not block:
            return False
        with self._timeline.span("store"):
            self._attempts.lease([one.lease(work.purpose) for one in block if not one.company])
        reach("leased")
        work.leased.extend(block)
        return True

    def _start(self, work: Collection, one: Try, group: str) -> None:
        name = one.plan.environment
        scene = self._scenes[name]
        episode = Episode(
            one.plan,
            attempt=one.attempt,
            dialect=self._dialect,
            rules=work.rules[name],
            provenance=replace(scene.provenance, actor_id=self.actors.assign(group), actor_group=group),
            clock=self._clock,
        )
        self.counts.started += 1
        live = Live(episode=episode, one=one, group=group)
        work.tries[one.attempt_id] = one
        work.live[one.attempt_id] = live
        self._occupied.episodes[group] += 1
        self._called[one.attempt_id] = (work, live)
        self.actors.begin(episode.opening())
        self._hear(0.0)

    # ---- answers and replies ----

    def _deliver(self, generation: Generation) -> None:
        """Hand a generation to its episode; its action goes to the actor, or its next request to the engine."""
        self.counts.answers += 1
        found = self._flights.pop(generation.request_id, None)
        if found is None:
            if generation.request_id not in self._abandoned:
                raise EngineError(
                    f"the engine answered request {generation.request_id!r}, which is not out; mend the engine"
                )
            self._abandoned.discard(generation.request_id)
            return
        work, live = found
        self._occupied.requests[live.group] -= 1
        live.request_id = ""
        try:
            call = live.episode.receive(generation, waited_s=self._worked_s - live.since_s)
        except (EnvironmentFailure, EngineReportError) as failure:
            self._fail(work, live, failure)
        else:
            if call is None:
                self._go_on(work, live)
            else:
                self._called[live.one.attempt_id] = (work, live)
                with self._timeline.span("tools"):
                    self.actors.begin(call)
        self._next_in_line(live.group)
        self._hear(0.0)

    def _hear(self, wait_s: float) -> None:
        """Take the replies of actors, and what they lead to, until there are none; wait for the first one ``wait_s``."""
        while replies := self.actors.ready(wait_s):
            for reply in replies:
                self._take(reply)
            wait_s = 0.0

    def _take(self, reply: Reply) -> None:
        self.counts.replies += 1
        if reply.kind is CallKind.CLOSE:
            if reply.failure is not None:
                # What happened in the episode stands; that its environment can't be closed is counted, and its owner's.
                tally(self.counts.close_failures, self._without_secrets(str(reply.failure)))
            return
        found = self._called.pop(reply.attempt_id, None)
        if found is None:
            return  # the reply to an episode that was cut
        work, live = found
        try:
            live.episode.resume(reply)
        except EnvironmentFailure as failure:
            self._fail(work, live, failure)
        else:
            self._go_on(work, live)

    def _go_on(self, work: Collection, live: Live) -> None:
        if live.episode.finished:
            self._finish(work, live)
        elif self._occupied.has_request_place(live.group) and not self._occupied.lines[live.group]:
            self._submit(work, live)
        else:
            live.in_line = True
            self._occupied.lines[live.group].append((work, live))

    def _next_in_line(self, group: str) -> None:
        line = self._occupied.lines[group]
        while line and self._occupied.has_request_place(group):
            work, live = line.popleft()
            live.in_line = False
            self._submit(work, live)

    def _submit(self, work: Collection, live: Live) -> None:
        request = live.episode.next_request()
        if request is None:
            raise EngineError(f"episode {live.one.attempt_id} has neither ended nor anything to ask")
        try:
            self._engine.submit(request)
        except ContextFullError as refusal:
            self._end_for_room(work, live, str(refusal))
            return
        live.request_id, live.since_s = request.request_id, self._worked_s
        self._occupied.requests[live.group] += 1
        self._flights[request.request_id] = (work, live)

    def _end_for_room(self, work: Collection, live: Live, reason: str) -> None:
        """End an episode whose request the engine has no room for, though it said so when the collection began."""
        try:
            live.episode.refused_for_room(reason)
        except EnvironmentFailure as failure:
            self._fail(work, live, failure)
        else:
            self._finish(work, live)

    # ---- ends ----

    def _finish(self, work: Collection, live: Live) -> None:
        work.finished.append(live.episode)
        self._leave(work, live)

    def _hand_out(self, work: Collection) -> None:
        """Turn the episodes at their end into trajectories; from here on these count as finished."""
        if not work.finished:
            return
        with self._timeline.span("environment", whole=True):
            trajectories = [episode.trajectory() for episode in work.finished]
        self.counts.finished += len(trajectories)
        self.counts.redactions += sum(episode.num_redactions for episode in work.finished)
        work.ends += [AttemptEnd(attempt_id=one.attempt_id, plan=one.plan) for one in work.finished]
        work.taken += trajectories
        work.finished = []

    def _fail(self, work: Collection, live: Live, failure: HotpotError) -> None:
        """End the attempt; put a fresh one in line, or give the episode up."""
        reason, one = self._without_secrets(str(failure)), live.one
        if isinstance(failure, EnvironmentOverrideError):
            tally(self.counts.overrides, reason)
        self._leave(work, live)
        again = one.number < self._settings.max_attempts
        if not one.company:
            tally(self.counts.failures, reason)
            end = self._attempts.fail if again else self._attempts.drop
            with self._timeline.span("store"):
                end(
                    one.attempt_id,
                    reason if again else f"gave up after {one.number} tries; the last: {reason}",
                )
        work.tries.pop(one.attempt_id)
        work.ends.append(
            AttemptEnd(attempt_id=one.attempt_id, plan=one.plan, reason=reason, given_up=not again)
        )
        if again:
            work.waiting.appendleft(one.again())
        elif not one.company:
            self.counts.dropped += 1

    def _leave(self, work: Collection, live: Live) -> None:
        """Give a live episode's places back and close its environment; whatever still comes for it is left alone."""
        name, group = live.one.attempt_id, live.group
        if work.live.pop(name, None) is None:
            return
        self._occupied.episodes[group] -= 1
        self._called.pop(name, None)
        if live.request_id:
            del self._flights[live.request_id]
            self._occupied.requests[group] -= 1
            self._abandoned.add(live.request_id)
        if live.in_line:
            self._occupied.lines[group].remove((work, live))
        self.actors.begin(live.episode.call(CallKind.CLOSE))

    def _drop(self, work: Collection, one: Try, reason: str) -> None:
        work.tries.pop(one.attempt_id, None)
        if not one.company:
            self.counts.dropped += 1
            with self._timeline.span("store"):
                self._attempts.drop(one.attempt_id, reason)

    def _without_secrets(self, reason: str) -> str:
        """Return a reason fit for the ledger; redacted before it is cut, so that no half of a secret stays."""
        text, count = self._redact(reason)
        self.counts.redactions += count
        return readable(text)


def _check_purpose(plans: Sequence[EpisodePlan], purpose: Purpose) -> None:
    training = purpose is Purpose.TRAINING
    for plan in plans:
        if training != (plan.evaluation is None) or training != (plan.task.split is Split.TRAIN):
            raise ValueError(
                f"issue {plan.issue} (split {plan.task.split}, evaluation {plan.evaluation}) can't be run for {purpose}: "
                "training runs tasks of the train split without an evaluation number, evaluations those of the holdout"
            )
