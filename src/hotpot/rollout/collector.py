"""Many episodes at once over one engine: whatever is ready is submitted together, finished trajectories come out.

::

    plans ──► episodes (as many as the engine holds) ──► engine.step() ──► trajectories
                 ▲    │ environment broke                     │
                 └────┘ a fresh try, then dropped ◄───────────┘ answers go back to their episodes

Consumes plans; produces trajectories; waits for the engine only, at most ``deadline_s`` for one request. Waiting is
counted in seconds the engine worked, so neither environments nor the taker of the trajectories are taken for it. Owns the
attempts of a rollout: each ends as finished (its trajectory is stored by whoever takes it), failed or dropped. Knows no
topology, store or learner. One thread; the order of everything follows from plans and engine alone.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
from hotpot.rollout.attempts import STOPPED, AttemptLog, RolloutCounts, Try, readable, tally
from hotpot.rollout.clock import Clock
from hotpot.rollout.dialect import Dialect
from hotpot.rollout.engine_report import ReportCheck
from hotpot.rollout.loop import Episode, EpisodeRules
from hotpot.rollout.past import NOTHING, Past
from hotpot.rollout.recorder import Provenance
from hotpot.rollout.tasks import EpisodePlan
from hotpot.timeline import Timeline
from hotpot.types import Generation, Purpose, SamplingParams, Split, Trajectory

Redact = Callable[[str], tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Where the episodes of one environment play: what the agent is told first, and the versions on their records."""

    environment: BoundEnvironment
    system_prompt: str
    provenance: Provenance


@dataclass(slots=True, eq=False)
class _Flight:
    """An episode whose request is out, and how long the engine had worked when it went."""

    episode: Episode
    since_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class _Work:
    """One collection: tries not on the ledger yet, tries on it, requests out (oldest first), episodes at their end.

    ``running`` is the episode being worked on, so that it is not forgotten where something raises. ``tries`` are those of
    all episodes begun, by attempt.
    """

    purpose: Purpose
    rules: Mapping[str, EpisodeRules]
    waiting: deque[Try]
    tries: dict[str, Try] = field(default_factory=dict)
    leased: deque[Try] = field(default_factory=deque)
    flights: dict[str, _Flight] = field(default_factory=dict)
    finished: list[Episode] = field(default_factory=list)
    running: Episode | None = None

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.leased or self.flights)


class Rollout:
    """Collects trajectories.

    Parameters
    ----------
    scenes: the environments of the run, by the name that plans give them.
    sampling: frozen parameters of each purpose; neither plans nor environments can change them.
    redact: maps text of an environment (messages, reasons of failures) to text without secrets and their number.
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
        deterministic: bool = False,
        clock: Clock | None = None,
        deadline_s: float = 600.0,
    ) -> None:
        self.counts = RolloutCounts()
        self.reports = ReportCheck(settings.engine_report_differs)
        self._engine = engine
        self._scenes = dict(scenes)
        self._dialect = dialect
        self._settings = settings
        self._sampling = dict(sampling)
        self._attempts = attempts
        self._redact = redact
        self._timeline = timeline
        self._deterministic = deterministic
        self._clock = clock or Clock()
        self._deadline_s = deadline_s
        self._abandoned: set[str] = set()
        self._worked_s = 0.0

    def collect(
        self, plans: Sequence[EpisodePlan], purpose: Purpose, past: Past = NOTHING
    ) -> Iterator[list[Trajectory]]:
        """Run all plans for ``purpose`` and yield, after every engine step, the trajectories that finished in it.

        The list is empty where none did: whoever takes them is back in control after each step, and can stop there.

        A plan whose environment breaks, or for which the engine reports that it sampled otherwise than asked, is tried
        again in a fresh environment, with the same random numbers, up to ``max_attempts`` times, then dropped and
        counted: there may be fewer trajectories than plans. Time is counted as ``generate``, ``environment`` and ``store`` (ledger). If the iterator is closed early, or anything raises,
        attempts whose trajectories were not yielded are dropped and their environments closed.

        ``past`` says what is settled already: its plans are not run, or run as company, off the ledger; then what they
        bring is yielded too, and whoever takes it leaves it alone.

        Raises :class:`EngineError` where the engine does not answer, or answers what was not asked.
        """
        _check_purpose(plans, purpose)
        self.reports.expect(self._engine.info())
        tries = [
            Try(plan=plan, attempt=past.next_attempt(plan), company=past.is_settled(plan))
            for plan in past.to_run(plans)
        ]
        work = _Work(
            purpose=purpose,
            rules={name: self._rules(purpose, scene) for name, scene in self._scenes.items()},
            waiting=deque(tries),
        )
        try:
            while work.unfinished:
                self._launch(work)
                self.counts.engine_steps += 1
                self.counts.requests_in_engine += len(work.flights)
                with self._timeline.span("generate"):
                    began_s = self._clock.now_s()
                    generations = self._engine.step()
                    self._worked_s += self._clock.now_s() - began_s
                with self._timeline.span("environment", whole=True):
                    for generation in generations:
                        self._deliver(generation, work)
                yield self._take_finished(work) if work.finished else []
                # Last, so that what finished in this step is out before a request that did not raises.
                self._check_deadline(work)
        finally:
            self._abandon(work)

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
            timeline=self._timeline,
            reports=self.reports,
        )

    def _launch(self, work: _Work) -> None:
        """Start episodes up to what the engine holds; attempts are put on the ledger in blocks, ahead of their start."""
        capacity = self._engine.info().max_concurrency
        while work.unfinished and len(work.flights) < capacity:
            if not work.leased:
                if not work.waiting:
                    return
                block = [work.waiting.popleft() for _ in range(min(capacity, len(work.waiting)))]
                with self._timeline.span("store"):
                    self._attempts.lease([one.lease(work.purpose) for one in block if not one.company])
                reach("leased")
                work.leased.extend(block)
            with self._timeline.span("environment", whole=True):
                while work.leased and len(work.flights) < capacity:
                    self._start(work.leased.popleft(), work)

    def _start(self, one: Try, work: _Work) -> None:
        name = one.plan.environment
        scene = self._scenes[name]
        episode = Episode(
            one.plan,
            attempt=one.attempt,
            make_environment=scene.environment.make,
            dialect=self._dialect,
            rules=work.rules[name],
            provenance=scene.provenance,
            clock=self._clock,
        )
        self.counts.started += 1
        work.tries[one.attempt_id] = one
        work.running = episode
        try:
            episode.start()
        except EnvironmentFailure as failure:
            self._fail(episode, failure, work)
        else:
            self._submit(episode, work)
        work.running = None

    def _deliver(self, generation: Generation, work: _Work) -> None:
        """Hand a generation to its episode and submit what the episode asks next."""
        flight = work.flights.pop(generation.request_id, None)
        if flight is None:
            if generation.request_id not in self._abandoned:
                raise EngineError(
                    f"the engine answered request {generation.request_id!r}, which is not out; mend the engine"
                )
            self._abandoned.discard(generation.request_id)
            return
        self.counts.preemptions += generation.report.num_preemptions
        episode = work.running = flight.episode
        try:
            episode.receive(generation, waited_s=self._worked_s - flight.since_s)
        except (EnvironmentFailure, EngineReportError) as failure:
            self._fail(episode, failure, work)
        else:
            if episode.finished:
                work.finished.append(episode)
                self._close(episode)
            else:
                self._submit(episode, work)
        work.running = None

    def _submit(self, episode: Episode, work: _Work) -> None:
        request = episode.next_request()
        if request is None:
            raise EngineError(f"episode {episode.attempt_id} has neither ended nor anything to ask")
        try:
            self._engine.submit(request)
        except ContextFullError as refusal:
            self._end_for_room(episode, str(refusal), work)
            return
        work.flights[request.request_id] = _Flight(episode=episode, since_s=self._worked_s)

    def _end_for_room(self, episode: Episode, reason: str, work: _Work) -> None:
        """End an episode whose request the engine has no room for, though it said so when the collection began."""
        try:
            episode.refused_for_room(reason)
        except EnvironmentFailure as failure:
            self._fail(episode, failure, work)
        else:
            work.finished.append(episode)
            self._close(episode)

    def _take_finished(self, work: _Work) -> list[Trajectory]:
        """Return the trajectories of the episodes at their end; from here on these count as finished."""
        with self._timeline.span("environment", whole=True):
            trajectories = [episode.trajectory() for episode in work.finished]
        self.counts.finished += len(trajectories)
        self.counts.redactions += sum(episode.num_redactions for episode in work.finished)
        work.finished = []
        return trajectories

    def _fail(self, episode: Episode, failure: HotpotError, work: _Work) -> None:
        """End the attempt; put a fresh one in line, or give the episode up."""
        reason, one = self._without_secrets(str(failure)), work.tries[episode.attempt_id]
        if isinstance(failure, EnvironmentOverrideError):
            tally(self.counts.overrides, reason)
        self._close(episode)
        again = one.number < self._settings.max_attempts
        if not one.company:
            tally(self.counts.failures, reason)
            end = self._attempts.fail if again else self._attempts.drop
            with self._timeline.span("store"):
                end(
                    one.attempt_id,
                    reason if again else f"gave up after {one.number} tries; the last: {reason}",
                )
        if again:
            work.waiting.appendleft(one.again())
        elif not one.company:
            self.counts.dropped += 1

    def _close(self, episode: Episode) -> None:
        try:
            episode.close()
        except EnvironmentFailure as failure:
            # What happened in the episode stands; that its environment can't be closed is counted, and its owner's.
            tally(self.counts.close_failures, self._without_secrets(str(failure)))

    def _without_secrets(self, reason: str) -> str:
        """Return a reason fit for the ledger; redacted before it is cut, so that no half of a secret stays."""
        text, count = self._redact(reason)
        self.counts.redactions += count
        return readable(text)

    def _check_deadline(self, work: _Work) -> None:
        for request_id, flight in work.flights.items():  # in order of submission, so the first waits longest
            waited_s = self._worked_s - flight.since_s
            if waited_s > self._deadline_s:
                raise EngineError(
                    f"request {request_id!r} got no answer in {waited_s:.0f} s (deadline {self._deadline_s:.0f} s, "
                    f"{len(work.flights)} requests are out); look at the engine, or lower engine.max_concurrency"
                )
            return

    def _abandon(self, work: _Work) -> None:
        """Close what is open and drop its attempts: the collection was stopped or something raised."""
        episodes = [flight.episode for flight in work.flights.values()]
        self._abandoned.update(work.flights)
        if work.running is not None and work.running not in episodes:
            episodes.append(work.running)
        names = [episode.attempt_id for episode in (*episodes, *work.finished)]
        work.tries |= {one.attempt_id: one for one in work.leased}
        names += [one.attempt_id for one in work.leased]
        for episode in episodes:
            self._close(episode)
        known = [name for name in dict.fromkeys(names) if not work.tries[name].company]
        for name in known:
            self._attempts.drop(name, STOPPED)
        self.counts.dropped += len(known)


def _check_purpose(plans: Sequence[EpisodePlan], purpose: Purpose) -> None:
    training = purpose is Purpose.TRAINING
    for plan in plans:
        if training != (plan.evaluation is None) or training != (plan.task.split is Split.TRAIN):
            raise ValueError(
                f"issue {plan.issue} (split {plan.task.split}, evaluation {plan.evaluation}) can't be run for {purpose}: "
                "training runs tasks of the train split without an evaluation number, evaluations those of the holdout"
            )
