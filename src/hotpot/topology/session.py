"""What every topology does the same way: collect, keep, learn, publish, record, evaluate, checkpoint.

A :class:`Session` holds the wired parts of one run and the run's position: the policy version being served and the
update that made it. A topology (``sync.py``) decides who waits for whom and calls these moves; it holds no state.

Order inside an update, and why: the policy version's mark is durable before the engine may serve it (a version is never
used twice); the update's row, groups, learned tokens and consumptions are one atomic frame written after the publish,
so a recorded update is one whose weights were served.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hotpot.config import Recipe
from hotpot.engine import Engine
from hotpot.errors import EngineError, EnvironmentFailure, SelfTestError
from hotpot.evaluation import Evaluator
from hotpot.experience import ExperienceStore
from hotpot.experience.crashpoints import reach
from hotpot.experience.replay import Replay
from hotpot.ids import canonical_json, group_id
from hotpot.learner import Learner, NonFiniteError, UpdateResult
from hotpot.models import Weights, use_threads
from hotpot.observability.gauges import ProcessGauges, gauge_rows
from hotpot.observability.live import LiveView
from hotpot.rollout import NOTHING, EpisodePlan, Rollout, TaskSampler
from hotpot.timeline import Timeline
from hotpot.topology.checks.self_test import run_self_test
from hotpot.topology.collecting.departures import Departures
from hotpot.topology.collecting.discards import Discard, discard_rows, discards
from hotpot.topology.collecting.groups import in_order
from hotpot.topology.collecting.harvest import collect_groups
from hotpot.topology.collecting.intake import Intake
from hotpot.topology.learning.protocol import Learning
from hotpot.topology.parts.engines import Threads
from hotpot.topology.parts.ingredients import RunEnvironment
from hotpot.topology.resume.checkpoints import write_checkpoint
from hotpot.topology.resume.history import History
from hotpot.topology.resume.left import NOTHING_LEFT, Left
from hotpot.topology.resume.rebuild import aliases
from hotpot.topology.resume.run_state import RunState, made_of, surroundings
from hotpot.topology.supervision.stopping import StopSignal
from hotpot.topology.supervision.watchdog import Watchdog
from hotpot.topology.updates import rows
from hotpot.topology.updates.batch import UpdateBatch, learnable
from hotpot.topology.updates.evidence import Evidence, halving_events
from hotpot.topology.updates.outcomes import update_outcomes
from hotpot.topology.updates.refill import Refill
from hotpot.types import DiscardReason, EvaluationRow, Purpose, Trajectory, UpdateRow

Save = Callable[[Path, Mapping[str, bytes], Mapping[str, Any]], None]
"""Writes the learner's state into a folder, with the model's files and what the run says of itself."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where the run stands. ``update`` made the newest weights, which are ``policy_version``; ``done`` updates lie on the way
    to them."""

    policy_version: int
    update: int
    done: int
    next_update: int


class Session:
    """The wired parts of one run. Made by :func:`hotpot.topology.wiring.wire`."""

    def __init__(
        self,
        *,
        recipe: Recipe,
        run_id: str,
        folder: Path,
        environments: Sequence[RunEnvironment],
        model_files: Mapping[str, bytes],
        store: ExperienceStore,
        engine: Engine,
        rollout: Rollout,
        intake: Intake,
        sampler: TaskSampler,
        learner: Learner,
        evaluators: Sequence[Evaluator[EpisodePlan]],
        departures: Departures,
        dog: Watchdog,
        replay: Replay | None,
        gauges: ProcessGauges,
        timeline: Timeline,
        view: LiveView,
        stop: StopSignal,
        threads: Threads,
        progress: Progress,
        history: History,
        make_learning: Callable[[], Learning],
        left: Left = NOTHING_LEFT,
    ) -> None:
        self.recipe, self.run_id, self.folder = recipe, run_id, folder
        self.environments, self._model_files = tuple(environments), model_files
        self.store, self.engine, self.rollout = store, engine, rollout
        self.intake, self.sampler = intake, sampler
        self.make_learning, self.left = make_learning, left
        self.learner, self.evaluators, self.replay = learner, evaluators, replay
        self.departures, self.dog = departures, dog
        self.gauges, self.timeline, self.view, self.stop = gauges, timeline, view, stop
        self.threads, self.progress = threads, progress
        self.history = history
        self.evidence = Evidence(
            folder, max_files=recipe.learner.evidence_files, max_bytes=recipe.learner.evidence_bytes
        )
        self.updates: list[UpdateRow] = list(history.updates)
        self.evaluations: list[EvaluationRow] = list(history.evaluations)
        self._saved_update = None if history.source is None else history.update
        self.save: Save | None = learner.save
        self.gauges_beside: Callable[[], Mapping[str, float]] = dict
        self._tested = not recipe.run.self_test
        self._started_us = 0
        self._checksum = engine.info().checksum
        self._checksums = dict(history.checksums)
        self._totals: dict[str, float] = {}

    @property
    def _env_versions(self) -> str:
        return "|".join(sorted({one.environment.env_version.version for one in self.environments}))

    # ---- the moves of one update ----

    def begin_update(self) -> int:
        """Start the clock of the next update and return its number; durable before it is used."""
        update = self.progress.next_update
        with self.timeline.span("store"):
            self.store.ledger.reach("update", update)
        reach("update_begun")
        self.progress.next_update = update + 1
        self._started_us = rows.now_us()
        return update

    def issue(self, num_tasks: int) -> list[EpisodePlan]:
        """Return the episodes of the next tasks; how these were chosen is on the record before they run."""
        plans = self.sampler.issue(num_tasks)
        self._tell_choices()
        return plans

    def reissue(self, issues: Sequence[int], chosen: Mapping[int, tuple[str, int]]) -> list[EpisodePlan]:
        """Return the episodes of ``issues`` that an earlier process handed out; ``chosen`` as the record tells."""
        plans = self.sampler.again(issues, chosen)
        self._tell_choices()
        return plans

    def _tell_choices(self) -> None:
        choices = self.sampler.take_choices()
        if choices:
            detail = {
                "update": self.progress.next_update - 1,
                "tasks": [asdict(choice) for choice in choices],
                "pools": self.sampler.pool_sizes(),
            }
            with self.timeline.span("store"):
                self.store.record([self.event("tasks_chosen", detail)])

    def collect(self, update: int) -> UpdateBatch:
        """Run the tasks of ``update`` and return what the store accepted; where the recipe says so, further tasks for
        groups without signal.
        """
        recipe = self.recipe.rollout
        refills = recipe.refill != "none"
        refill = Refill(recipe.tasks_per_batch, max_rounds=recipe.max_refill_rounds if refills else 0)
        collected: list[Trajectory] = []
        while missing := refill.missing:
            plans = self.issue(missing)
            with self._departures_kept():
                found = self._collected(plans)
            refill.hear([group_id(plan.issue) for plan in plans], found)
            collected += found
        events = [("refill", {"update": update, **refill.report()})] if refills else []
        return UpdateBatch(update=update, collected=collected, events=events)

    def _collected(self, plans: Sequence[EpisodePlan]) -> list[Trajectory]:
        """Run ``plans`` to their end; with over-issue, to where each group has enough."""
        if not self.recipe.actors.over_issue:
            return self.intake.collect(plans, Purpose.TRAINING)
        use_threads(self.threads.engine)
        brought = collect_groups(
            self.rollout,
            self.intake,
            plans,
            wanted=self.recipe.rollout.samples_per_task,
            check=self.stop.check,
        )
        surplus = [t for harvested in brought for t in harvested.surplus]
        self.discard(discards(surplus, DiscardReason.SURPLUS, policy_version=self.progress.policy_version))
        reach("collected")
        return list(in_order(group for harvested in brought for group in harvested.complete))

    def discard(self, gone: Sequence[Discard]) -> None:
        """Put on the ledger and on the record which finished trajectories are not learned from, and why."""
        if gone:
            with self.timeline.span("store"):
                self.store.discard(
                    discard_rows(gone, run_id=self.run_id, update=self.progress.update, time_us=rows.now_us())
                )

    def same_weights(self) -> dict[int, int]:
        """Return, for every earlier policy version with the newest weights, the version that these have now."""
        newest = self.progress.policy_version
        return {
            version: newest
            for version, found in self._checksums.items()
            if version < newest and found == self._checksum
        }

    def draw(self, batch: UpdateBatch, *, missing: int = 0) -> UpdateBatch:
        """Return ``batch`` with what replay draws beside what was collected, if it is on; ``missing`` trajectories more than
        the recipe's share."""
        own = aliases(batch.collected, policy_version=self.progress.policy_version, checksum=self._checksum)
        batch = replace(batch, aliases={**own, **self.same_weights()})
        if self.replay is None:
            return batch
        with self.timeline.span("replay"):
            draw = self.replay.draw(batch.update, num_fresh=len(learnable(batch.collected)), missing=missing)
        return replace(batch, drawn=draw.items, events=[*batch.events, *draw.events])

    def ready(self, batch: UpdateBatch) -> None:
        """Make sure that ``batch`` can be learned: there is something in it, and the set-up was tested.

        Raises :class:`EnvironmentFailure` with the reasons where nothing was collected that can be learned from, and
        :class:`SelfTestError` where the first batch shows that the set-up is wrong.
        """
        update, collected, fresh = batch.update, batch.collected, learnable(batch.collected)
        if not fresh:
            raise EnvironmentFailure(
                f"update {update} has no trajectory to learn from: {len(collected)} collected, "
                f"{len(collected) - len(fresh)} cut by rollout.max_seconds; {self.intake.failures()}"
            )
        if not self._tested:
            use_threads(self.threads.learner)
            self._self_test(batch)

    def learn(self, batch: UpdateBatch) -> UpdateResult:
        """Learn one batch, here and now; the weights change. Raises as :meth:`ready`."""
        self.ready(batch)
        use_threads(self.threads.learner)
        with self.timeline.span("learn"), self.evidence_kept():
            result = self.learner.update(
                batch.sequences(),
                update=batch.update,
                policy_version=self.progress.policy_version,
                peers=batch.peers(),
            )
        reach("learned")
        return result

    @contextmanager
    def evidence_kept(self) -> Iterator[None]:
        """Put on record what made learning stop, where steps that were not finite did."""
        try:
            yield
        except NonFiniteError as error:
            self.store.record(self._found_wrong(error.result))
            raise

    def _self_test(self, batch: UpdateBatch) -> None:
        """Test the set-up on the first batch of this process, before anything is learned from it."""
        with self.timeline.span("self_test"):
            found = run_self_test(
                self.recipe,
                self.learner,
                batch,
                policy_version=self.progress.policy_version,
                engine=self.engine,
            )
        differs = found["incremental_difference_max"]
        gauges = {} if differs is None else {"engine/incremental_difference_max": differs}
        self.store.record([self.event("self_test", found), *self._gauge_rows(gauges, batch.update)])
        if found["problem"]:
            raise SelfTestError(
                f"the self-test before update {batch.update} failed: {found['problem']}. Nothing was learned; mend the "
                "set-up and resume the run"
            )
        if found["not_compared"]:
            self.view.message(f"self-test: log-probabilities were not compared: {found['not_compared']}")
        self._tested = True

    def publish(self, update: int) -> list[Any]:
        """Serve the learner's weights as a new policy version; return the rows that say so."""
        version = self._next_version()
        published = self.serve(self.learner.weights(), version)
        return [self._version_made(version, self._checksum, update), *published]

    def adopt(self, update: int, checksum: str) -> list[Any]:
        """Give the weights that ``update`` made the next policy version, served or not; return the row that says so."""
        version = self._next_version()
        self.progress.policy_version, self._checksum = version, checksum
        return [self._version_made(version, checksum, update)]

    def serve(self, weights: Weights, version: int) -> list[Any]:
        """Let the engine sample from ``weights`` as ``version``; return the row that says so.

        Raises :class:`EngineError` where it serves others than those that became the version.
        """
        with self.timeline.span("publish"):
            report = self.engine.publish(weights, version)
        if report.policy_version != version:
            raise EngineError(
                f"the engine was published policy version {version} and says it serves {report.policy_version}; mend the engine"
            )
        if version == self.progress.policy_version and report.checksum != self._checksum:
            raise EngineError(
                f"the engine serves weights {report.checksum} as policy version {version}, which is {self._checksum}; they were "
                "changed on the way: look at the learner's process, and resume the run"
            )
        self._checksum = report.checksum
        self.progress.policy_version = version
        reach("published")
        detail = {"checksum": report.checksum, "seconds": report.seconds, "policy_version": version}
        return [self.event("publish", detail)]

    def _next_version(self) -> int:
        version = self.progress.policy_version + 1
        with self.timeline.span("publish"):
            self.store.ledger.advance("policy_version", version)
        reach("publish_marked")
        return version

    def _version_made(self, version: int, checksum: str, update: int) -> Any:
        self._checksums[version] = checksum
        described = rows.policy_version(version, checksum=checksum, update=update, origin=self.run_id)
        return rows.version_row(self.run_id, described)

    def record_update(
        self,
        result: UpdateResult,
        batch: UpdateBatch,
        published: Sequence[Any],
        *,
        learn_s: float | None = None,
    ) -> None:
        """Write everything about one update in one frame, and move the run's position onto it; replay may draw what it
        learned from then on. ``learn_s``: how long learning took, where that was not in this loop.
        """
        totals, before = self.timeline.totals(), self._totals
        self._totals = totals
        seconds = {name: totals[name] - before.get(name, 0.0) for name in totals}
        frame = rows.UpdateFrame(
            run_id=self.run_id,
            parent_update=self.progress.update,
            new_policy_version=self.progress.policy_version,
            started_us=self._started_us,
            seconds=seconds if learn_s is None else {**seconds, "learn": learn_s},
            seed=self.recipe.run.seed,
            weights_checksum=self._checksum,
            deterministic=self.recipe.run.deterministic,
        )
        row = rows.update_row(frame, batch, result)
        groups = rows.group_rows(self.run_id, batch, result)
        events = [self.event(kind, dict(detail)) for kind, detail in batch.events]
        events += self._found_wrong(result)
        if self.intake.differing:
            events.append(self.event("resume_differs", {"trajectories": self.intake.differing}))
        reach("update_unrecorded")
        with self.timeline.span("store", whole=True):
            self.store.record_update(
                row,
                groups,
                rows.learned_rows(self.run_id, batch, result),
                rows.consumption_rows(self.run_id, batch, result),
                [*published, *events, *self.measure(result.update)],
            )
        reach("update_recorded")
        self.intake.past, self.intake.differing = NOTHING, []
        self.sampler.hear(update_outcomes(groups, batch.collected))
        if self.replay is not None:
            with self.timeline.span("replay"):
                self.replay.add(result.update, learnable(batch.collected))
        self.progress.update, self.progress.done = result.update, self.progress.done + 1
        self.updates.append(row)
        self.view.update(row)

    def _found_wrong(self, result: UpdateResult) -> list[Any]:
        """Keep the evidence of the steps that were found wrong, and return the events that say what went wrong."""
        found = [*self.evidence.keep(result.update, result.steps), *halving_events(result)]
        return [
            rows.event_row(
                self.run_id, kind, detail, update=result.update, policy_version=result.policy_version
            )
            for kind, detail in found
        ]

    @contextmanager
    def _departures_kept(self) -> Iterator[None]:
        """Tell departures, however collecting ends."""
        try:
            yield
        finally:
            self.tell_departures()

    def tell_departures(self) -> None:
        """Put on record, with their counts, the departures from the frozen sampling parameters since they were told last."""
        found = self.departures.events()
        for kind, detail in found:
            self.view.message(f"{kind}: {canonical_json(detail)}")
        if found:
            told = [self.event(kind, detail) for kind, detail in found]
            self.store.record([*told, *self.measure(self.progress.update)])

    # ---- beside the updates ----

    def evaluate(self, label: str, num_tasks: int) -> list[EvaluationRow]:
        """Measure the policy being served on hold-out tasks of each environment and record it."""
        rows_of_all: list[EvaluationRow] = []
        for one, evaluator in zip(self.environments, self.evaluators, strict=True):
            if len(self.environments) > 1:
                self.view.message(f"hold-out tasks of {one.member.name} ({one.environment.name}):")
            with self.timeline.span("evaluate", whole=True):
                greedy = self.recipe.evaluation.greedy
                with self._departures_kept():
                    found = evaluator.evaluate(label, self.progress.update, num_tasks, greedy=greedy)
                reach("evaluation_unrecorded")
                self.store.record(found)
            reach("evaluated")
            self.evaluations += found
            rows_of_all += found
            for row in found:
                self.view.evaluation(row)
        return rows_of_all

    def checkpoint(self) -> None:
        """Write the learner's weights and optimiser state as the checkpoint of the current update, unless it is there."""
        save = self.save
        if save is None or self._saved_update == self.progress.update:
            return
        with self.timeline.span("checkpoint"):
            write_checkpoint(
                self.folder,
                self.progress.update,
                lambda folder: save(folder, self._model_files, self.state().to_json()),
                keep=self.recipe.checkpoint.keep,
            )
            self.store.record([self.event("checkpoint", {"checkpoint_update": self.progress.update})])
        self._saved_update = self.progress.update

    def state(self) -> RunState:
        """Return what the run says of itself in a checkpoint now."""
        threads, progress = self.threads, self.progress
        return RunState(
            run_id=self.run_id,
            update=progress.update,
            done=progress.done,
            policy_version=progress.policy_version,
            marks=self.store.ledger.marks(),
            replay_update=-1 if self.replay is None else self.replay.index.last_update,
            **made_of(self.environments),
            **surroundings(self.recipe, threads_engine=threads.engine, threads_learner=threads.learner),
        )

    def due(self) -> None:
        """Do what is on a schedule after an update: evaluation, checkpoint."""
        if self.checkpoint_due:
            self.checkpoint()
        if self.evaluation_due:
            self.evaluate("scheduled", self.recipe.evaluation.num_tasks)

    @property
    def checkpoint_due(self) -> bool:
        """Whether the schedule wants a checkpoint of the present update."""
        return self._on_schedule(self.recipe.checkpoint.every_updates)

    @property
    def evaluation_due(self) -> bool:
        """Whether the schedule wants an evaluation of the present update's weights."""
        return self._on_schedule(self.recipe.evaluation.every_updates)

    def _on_schedule(self, every: int) -> bool:
        done = self.progress.done
        return bool(every) and done % every == 0 and done < self.recipe.topology.updates

    def measure(self, update: int) -> list[Any]:
        """Return the gauges of the process as rows."""
        return list(
            self.gauges.sample(
                update=update,
                policy_version=self.progress.policy_version,
                env_version=self._env_versions,
                engine_queue_depth=self.intake.queue_depth(),
                experience_backlog=self.store.backlog(),
                others={**self.intake.losses(), **self.departures.gauges(), **self.gauges_beside()},
            )
        )

    def _gauge_rows(self, values: Mapping[str, float], update: int) -> Sequence[Any]:
        return gauge_rows(
            values,
            run_id=self.run_id,
            update=update,
            policy_version=self.progress.policy_version,
            env_version=self._env_versions,
        )

    def out_of_time(self) -> bool:
        """Return whether the recipe's wall time is over. Never in deterministic mode."""
        limit = self.recipe.topology.max_seconds
        return limit is not None and not self.recipe.run.deterministic and self.timeline.elapsed_s > limit

    def event(self, kind: str, detail: dict[str, Any]) -> Any:
        """Return an event row at the run's position."""
        return rows.event_row(
            self.run_id,
            kind,
            detail,
            update=self.progress.update,
            policy_version=self.progress.policy_version,
        )
