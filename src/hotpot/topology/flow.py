"""The moves that the asynchronous topologies share: what goes on side by side in one loop.

::

    feed ──plans──► harvest (actors ⇄ engine) ──complete groups──► line ──a batch──► learning (its own process) ──► record
      ▲                                                                                     │ weights
      └─────────────────────────────── publish, when due ◄──────────────────────────────────┘

A :class:`Flow` holds what stands between collecting and learning of one run, and no decision about who waits for whom: the line
says whether a group may begin and when a batch is there. Each move is bounded. What was collected is stored before it waits in
the line; what the line drops is on the ledger, with its reason; an update is recorded before the next one begins, and before its weights serve.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hotpot.errors import LearnerError
from hotpot.experience.crashpoints import reach
from hotpot.ids import group_id
from hotpot.models import use_threads
from hotpot.rollout import NOTHING, EpisodePlan, Past
from hotpot.rollout.collector import WAIT_S
from hotpot.topology.collecting.discards import Discard, discards
from hotpot.topology.collecting.harvest import KEEP_WITHIN_S, Harvest, Harvested
from hotpot.topology.collecting.lines import Line, Standing, told
from hotpot.topology.collecting.queue import Taken
from hotpot.topology.learning.protocol import Learned, Work
from hotpot.topology.resume.left import NOTHING_LEFT
from hotpot.topology.session import Session
from hotpot.topology.supervision.stopping import StopRequested
from hotpot.topology.updates.batch import UpdateBatch, learnable
from hotpot.topology.watch import Watch
from hotpot.types import DiscardReason


class Flow:
    """One run's flow. As a context manager it leaves in order: what finished is stored, what is under way is dropped, the
    learner ends; asked to stop, it records the update under way first."""

    def __init__(self, session: Session, line: Line) -> None:
        recipe = session.recipe
        self.session, self.line = session, line
        self.learning = session.make_learning()
        self.serial = recipe.topology.serial
        self.harvest = Harvest(
            session.rollout,
            session.intake,
            wanted=recipe.rollout.samples_per_task,
            keep_within_s=0.0 if self.serial else KEEP_WITHIN_S,
        )
        whole = recipe.rollout.tasks_per_batch * recipe.rollout.samples_per_task
        self._batch_size = whole if recipe.queue.batch_tokens is None else 0
        self._batch: UpdateBatch | None = None
        self._to_publish = self._to_evaluate = self._leaving = False
        self._published_s = self._now_s()
        self._left, session.left = session.left, NOTHING_LEFT
        self._environments = {one.member.name for one in session.environments}
        self._watch = Watch(session, self.learning, line)
        session.save, session.gauges_beside = self._save, line.gauges

    def __enter__(self) -> Self:
        use_threads(self.session.threads.engine)
        version = self.session.progress.policy_version
        gone = discards(self._left.gone, DiscardReason.SETTINGS_CHANGED, policy_version=version)
        self.session.discard(gone)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None or isinstance(error, StopRequested):
                self._settle()
        finally:
            self.session.save = None
            self.session.rollout.paused, self.session.rollout.held = False, ()
            try:
                self._take_in(self.harvest.close())
                self.session.tell_departures()
            finally:
                self.learning.close()
        if error is None:
            self._evaluate_where_due()  # its swap may have waited for episodes until after the last update

    @property
    def done(self) -> bool:
        """Whether the recipe's number of updates is reached, or its time is over."""
        session = self.session
        return session.progress.done >= session.recipe.topology.updates or session.out_of_time()

    # ---- collecting ----

    def feed(self) -> None:
        """Begin further groups, as far as the line has nothing against it: first what an earlier process left under way, in
        order of issue, then new ones where actors are free for them.
        """
        session, harvest = self.session, self.harvest
        held = session.rollout.held
        if held:
            # Such as rest would take every place in line; what is let go here is issued again by a resume.
            keep = 0 if self.line.in_order else session.rollout.capacity // 2
            self._take_in(harvest.let_go(held, keep=keep))
        # Where nothing may begin, further ones would rest too, and what is in line is enough for a trial.
        most = 0 if self._environments <= set(held) else session.rollout.capacity
        while self._left.issues and len(harvest.resting) <= most and self._free > 0 and self._may_begin(0):
            part, rest = self._left.issues[: self.line.unit], self._left.issues[self.line.unit :]
            self._issue(session.reissue(part, self._left.chosen), self._left.past)
            self._left = replace(self._left, issues=rest) if rest else NOTHING_LEFT
        if self._left.issues:
            return
        size = self.line.unit * session.sampler.samples_per_task
        while len(harvest.resting) <= most and (units := self._units(self._free, size)):
            self._issue(session.issue(units * self.line.unit))

    @property
    def _free(self) -> int:
        """Places for which no episode waits."""
        return self.session.rollout.free_places - self.harvest.waiting

    def _units(self, free: int, size: int) -> int:
        """Return how many units of ``size`` episodes to begin in one go."""
        units = 0
        while free > units * size and self._may_begin(units):
            units += 1
        return units

    def collect(self, *, idle_s: float = WAIT_S) -> None:
        """Let actors and engine do a piece of work, and take in what finished; wait at most ``idle_s`` where none has any."""
        # Where it wouldn't make a batch, it may as well be acknowledged together with what comes next.
        hungry = not self.learning.busy and self.line.depth + self.harvest.pending >= self._batch_size
        self._take_in(self.harvest.turn(self._now_s(), wait_s=0.0 if self.serial else idle_s, hungry=hungry))
        self._watch.turn(self.harvest)
        self.session.stop.check()

    def _may_begin(self, more: int) -> bool:
        learner, size = self.session.progress.policy_version, self.session.recipe.rollout.samples_per_task
        under_way, expected = self.harvest.standing
        standing = Standing(
            under_way=under_way + more * self.line.unit,
            expected=expected + more * self.line.unit * size,
            policy_version=learner,
            served_version=self.session.engine.info().policy_version,
            learning=self._batch is not None,
            more=more,
        )
        return self.line.hold(standing) is None

    def _issue(self, plans: Sequence[EpisodePlan], past: Past = NOTHING) -> None:
        self.line.begin(list(dict.fromkeys(group_id(plan.issue) for plan in plans)))
        self._take_in(self.harvest.issue(plans, past))

    def _take_in(self, harvested: Harvested) -> None:
        version = self.session.progress.policy_version
        gone: list[Discard] = []
        for group in harvested.complete:
            gone += self.line.put(group, version)
        for name in harvested.empty:
            self.line.empty(name)
        gone += discards(harvested.surplus, DiscardReason.SURPLUS, policy_version=version)
        self.session.discard(gone)
        self._watch.ended(harvested.ends)

    # ---- learning ----

    def learn(self) -> None:
        """Take the update that is learned, if one is, and begin the next where a batch for it is there."""
        if self._batch is not None:
            with self.session.evidence_kept():
                learned = self.learning.poll()
            if learned is None:
                return
            if not isinstance(learned, Learned):
                raise LearnerError(f"the learner says it wrote {learned}, and was asked for an update")
            self._record(learned)
        if not self.done:
            self._begin()

    def _begin(self) -> None:
        session = self.session
        taken = self.line.take(self._now_s(), session.progress.policy_version)
        session.discard(taken.discarded)
        if not taken.is_batch:
            if taken.late:
                session.store.record([session.event("batch_skipped", {"waited_s": round(taken.waited_s, 3)})])
            return
        collected = taken.trajectories
        if not learnable(collected):
            version = session.progress.policy_version
            session.discard(discards(collected, DiscardReason.NOT_LEARNABLE, policy_version=version))
            self.line.learned()
            return
        update = session.begin_update()
        batch = UpdateBatch(update=update, collected=collected, events=told(taken))
        batch = session.draw(batch, missing=self._missing(taken))
        session.ready(batch)
        self._batch = batch
        self.learning.begin(
            Work(
                update=update,
                policy_version=session.progress.policy_version,
                sequences=batch.sequences(),
                peers=batch.peers(),
            )
        )
        use_threads(session.threads.engine)  # where it was learned here and now

    def _missing(self, taken: Taken) -> int:
        """Return how many trajectories a late batch lacks; where batches are counted in tokens, of the mean length so far."""
        recipe, counts = self.session.recipe, self.session.intake.counts
        if recipe.queue.batch_tokens is None:
            return taken.missing * recipe.rollout.samples_per_task
        return round(taken.missing * counts.training / max(counts.sampled_tokens, 1))

    def _record(self, learned: Learned) -> None:
        session, batch = self.session, self._batch
        if batch is None:
            raise LearnerError("an update came back that nobody asked for")
        reach("learned")
        session.tell_departures()
        made = session.adopt(batch.update, learned.checksum)
        session.record_update(learned.result, batch, made, learn_s=learned.seconds)
        self._batch = None
        self._to_evaluate |= session.evaluation_due
        self._to_publish |= self._to_evaluate or self._publish_due()
        self.line.learned()
        if session.checkpoint_due:
            session.checkpoint()

    def _save(self, folder: Path, files: Mapping[str, bytes], run: Mapping[str, Any]) -> None:
        """Have the learner write a checkpoint; actors go on meanwhile."""
        self.learning.begin_save(folder, files, run)
        if self._leaving:
            self._last_word(f"writing {folder}")
        else:
            while self.learning.poll() is None:
                self.collect()

    def _last_word(self, doing: str) -> Learned | Path:
        """Return what comes of the work under way, when nothing else goes on any more."""
        limit_s = self.session.recipe.supervision.stop_after_s
        until_s = time.monotonic() + limit_s
        while (found := self.learning.poll(WAIT_S)) is None:
            self.session.dog.turn()
            if time.monotonic() > until_s:
                raise LearnerError(
                    f"the learner was {doing} for {limit_s:g} s (supervision.stop_after_s) while the run was to end; resume it"
                )
        return found

    # ---- publishing ----

    def publish(self) -> None:
        """Serve the newest weights where that is due, once no episode is under way where the recipe wants that; then evaluate,
        where that is due.
        """
        session = self.session
        self._to_publish |= self._publish_late()
        if self._to_publish:
            between = session.recipe.topology.swap == "between_episodes"
            session.rollout.paused = between and bool(self.harvest.live)
            if session.rollout.paused:
                return
            self._to_publish, self._published_s = False, self._now_s()
            self._serve()
        self._evaluate_where_due()

    def _evaluate_where_due(self) -> None:
        if self._to_evaluate:
            self._to_evaluate = False
            self.session.evaluate("scheduled", self.session.recipe.evaluation.num_tasks)

    def _publish_due(self) -> bool:
        topology, done = self.session.recipe.topology, self.session.progress.done
        return done % topology.publish_every_updates == 0 or done >= topology.updates

    def _publish_late(self) -> bool:
        """Whether the time is over after which newer weights serve, however few updates made them."""
        session = self.session
        every_s = session.recipe.topology.publish_every_s
        if every_s is None or self._now_s() - self._published_s < every_s:
            return False
        return session.engine.info().policy_version != session.progress.policy_version

    def _serve(self) -> None:
        session = self.session
        session.store.record(session.serve(self.learning.weights(), session.progress.policy_version))

    def _settle(self) -> None:
        """Come to rest: record the update under way, serve the newest weights, keep them."""
        session, self._leaving = self.session, True
        if self.learning.busy:
            with session.evidence_kept():
                found = self._last_word("at work")
            if isinstance(found, Learned):
                self._record(found)
        if session.engine.info().policy_version != session.progress.policy_version:
            self._serve()
        session.checkpoint()

    def _now_s(self) -> float:
        """Return the time that decisions go by; in serial order none does."""
        return 0.0 if self.serial else time.monotonic()
