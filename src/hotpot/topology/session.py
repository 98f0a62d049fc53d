"""What every topology does the same way: collect, keep, learn, publish, record, evaluate, checkpoint.

A :class:`Session` holds the wired parts of one run and the run's position: the policy version being served and the
update that made it. A topology (``sync.py``) decides who waits for whom and calls these moves; it holds no state.

Order inside an update, and why: the policy version's mark is durable before the engine may serve it (a version is never
used twice); the update's row, groups, learned tokens and consumptions are one atomic frame written after the publish,
so a recorded update is one whose weights were served.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotpot.config import Recipe
from hotpot.engine import Engine
from hotpot.envs import BoundEnvironment
from hotpot.errors import EnvironmentFailure, SelfTestError
from hotpot.evaluation import Evaluator
from hotpot.experience import ExperienceStore
from hotpot.experience.crashpoints import reach
from hotpot.experience.replay import Replay
from hotpot.learner import Learner, NonFiniteError, UpdateResult
from hotpot.models import PolicyTokenizer, use_threads
from hotpot.observability.gauges import ProcessGauges
from hotpot.observability.live import LiveView
from hotpot.rollout import NOTHING, EpisodePlan, TaskSampler
from hotpot.timeline import Timeline
from hotpot.topology import rows
from hotpot.topology.batch import UpdateBatch, learnable
from hotpot.topology.checkpoints import write_checkpoint
from hotpot.topology.engines import Threads
from hotpot.topology.history import History
from hotpot.topology.intake import Intake
from hotpot.topology.rebuild import aliases
from hotpot.topology.run_state import RunState, surroundings
from hotpot.topology.self_test import run_self_test
from hotpot.topology.stopping import StopSignal
from hotpot.types import EvaluationRow, Trajectory, UpdateRow
from hotpot.versions import Version


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where the run stands. ``update`` made the weights being served; ``done`` updates lie on the way to them."""

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
        environment: BoundEnvironment,
        tokenizer: PolicyTokenizer,
        store: ExperienceStore,
        engine: Engine,
        intake: Intake,
        sampler: TaskSampler,
        learner: Learner,
        evaluator: Evaluator[EpisodePlan],
        replay: Replay | None,
        prompt: Version,
        gauges: ProcessGauges,
        timeline: Timeline,
        view: LiveView,
        stop: StopSignal,
        threads: Threads,
        progress: Progress,
        history: History,
    ) -> None:
        self.recipe, self.run_id, self.folder = recipe, run_id, folder
        self.environment, self.tokenizer, self.prompt = environment, tokenizer, prompt
        self.store, self.engine, self.intake, self.sampler = store, engine, intake, sampler
        self.learner, self.evaluator, self.replay = learner, evaluator, replay
        self.gauges, self.timeline, self.view, self.stop = gauges, timeline, view, stop
        self.threads, self.progress = threads, progress
        self.history = history
        self.updates: list[UpdateRow] = list(history.updates)
        self.evaluations: list[EvaluationRow] = list(history.evaluations)
        self._saved_update = None if history.source is None else history.update
        self._tested = not recipe.run.self_test
        self._started_us = 0
        self._totals: dict[str, float] = {}

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

    def draw(self, update: int, collected: Sequence[Trajectory]) -> UpdateBatch:
        """Return the batch of ``update``: what was collected for it, and what replay draws beside it, if it is on."""
        served = self.engine.info()
        own = aliases(collected, policy_version=served.policy_version, checksum=served.checksum)
        batch = UpdateBatch(update=update, collected=collected, aliases=own)
        if self.replay is None:
            return batch
        with self.timeline.span("replay"):
            draw = self.replay.draw(update, num_fresh=len(learnable(collected)))
        return replace(batch, drawn=draw.items, events=draw.events)

    def learn(self, batch: UpdateBatch) -> UpdateResult:
        """Learn one batch; the weights change.

        Raises :class:`EnvironmentFailure` with the reasons where nothing was collected that can be learned from, and
        :class:`SelfTestError` where the first batch shows that the set-up is wrong.
        """
        update, collected, fresh = batch.update, batch.collected, learnable(batch.collected)
        if not fresh:
            raise EnvironmentFailure(
                f"update {update} has no trajectory to learn from: {len(collected)} collected, "
                f"{len(collected) - len(fresh)} cut by rollout.max_seconds; {self.intake.failures()}"
            )
        use_threads(self.threads.learner)
        self._self_test(batch)
        with self.timeline.span("learn"):
            try:
                result = self.learner.update(
                    batch.sequences(),
                    update=update,
                    policy_version=self.progress.policy_version,
                    peers=batch.peers(),
                )
            except NonFiniteError as error:
                culprits = list(error.result.skipped_trajectories)
                self.store.record([self.event("non_finite", {"update": update, "trajectories": culprits})])
                raise
        reach("learned")
        return result

    def _self_test(self, batch: UpdateBatch) -> None:
        """Test the set-up on the first batch of this process, before anything is learned from it."""
        if self._tested:
            return
        with self.timeline.span("self_test"):
            found = run_self_test(
                self.recipe, self.learner, batch, policy_version=self.progress.policy_version
            )
        self.store.record([self.event("self_test", found)])
        if found["problem"]:
            raise SelfTestError(
                f"the self-test before update {batch.update} failed: {found['problem']}. Nothing was learned; mend the "
                "set-up and resume the run"
            )
        self._tested = True

    def publish(self, update: int) -> list[Any]:
        """Serve the learner's weights as a new policy version; return the rows that say so."""
        version = self.progress.policy_version + 1
        with self.timeline.span("publish"):
            self.store.ledger.advance("policy_version", version)
            reach("publish_marked")
            report = self.engine.publish(self.learner.weights(), version)
        described = rows.policy_version(version, checksum=report.checksum, update=update, origin=self.run_id)
        detail = {"checksum": report.checksum, "seconds": report.seconds, "policy_version": version}
        self.progress.policy_version = version
        reach("published")
        return [rows.version_row(self.run_id, described), self.event("publish", detail)]

    def record_update(self, result: UpdateResult, batch: UpdateBatch, published: Sequence[Any]) -> None:
        """Write everything about one update in one frame, and move the run's position onto it; replay may draw what it
        learned from then on.
        """
        totals, before = self.timeline.totals(), self._totals
        self._totals = totals
        frame = rows.UpdateFrame(
            run_id=self.run_id,
            parent_update=self.progress.update,
            new_policy_version=self.progress.policy_version,
            started_us=self._started_us,
            seconds={name: totals[name] - before.get(name, 0.0) for name in totals},
            seed=self.recipe.run.seed,
        )
        row = rows.update_row(frame, batch, result)
        events = [self.event(kind, dict(detail)) for kind, detail in batch.events]
        if self.intake.differing:
            events.append(self.event("resume_differs", {"trajectories": self.intake.differing}))
        reach("update_unrecorded")
        with self.timeline.span("store", whole=True):
            self.store.record_update(
                row,
                rows.group_rows(self.run_id, batch, result),
                rows.learned_rows(self.run_id, batch, result),
                rows.consumption_rows(self.run_id, batch, result),
                [*published, *events, *self.measure(result.update)],
            )
        reach("update_recorded")
        self.intake.past, self.intake.differing = NOTHING, []
        if self.replay is not None:
            with self.timeline.span("replay"):
                self.replay.add(result.update, learnable(batch.collected))
        self.progress.update, self.progress.done = result.update, self.progress.done + 1
        self.updates.append(row)
        self.view.update(row)

    # ---- beside the updates ----

    def evaluate(self, label: str, num_tasks: int) -> list[EvaluationRow]:
        """Measure the policy being served on hold-out tasks and record it."""
        with self.timeline.span("evaluate", whole=True):
            greedy = self.recipe.evaluation.greedy
            found = self.evaluator.evaluate(label, self.progress.update, num_tasks, greedy=greedy)
            reach("evaluation_unrecorded")
            self.store.record(found)
        reach("evaluated")
        self.evaluations += found
        for row in found:
            self.view.evaluation(row)
        return found

    def checkpoint(self) -> None:
        """Write the learner's weights and optimiser state as the checkpoint of the current update, unless it is there."""
        if self._saved_update == self.progress.update:
            return
        with self.timeline.span("checkpoint"):
            write_checkpoint(
                self.folder,
                self.progress.update,
                lambda folder: self.learner.save(folder, self.tokenizer.files(), self.state().to_json()),
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
            env_version=self.environment.env_version.version,
            reward_version=self.environment.reward_version.version,
            prompt_version=self.prompt.version,
            **surroundings(self.recipe, threads_engine=threads.engine, threads_learner=threads.learner),
        )

    def due(self) -> None:
        """Do what is on a schedule after an update: evaluation, checkpoint."""
        done, recipe = self.progress.done, self.recipe
        last = done >= recipe.topology.updates
        if recipe.checkpoint.every_updates and done % recipe.checkpoint.every_updates == 0 and not last:
            self.checkpoint()
        if recipe.evaluation.every_updates and done % recipe.evaluation.every_updates == 0 and not last:
            self.evaluate("scheduled", recipe.evaluation.num_tasks)

    def measure(self, update: int) -> list[Any]:
        """Return the gauges of the process as rows."""
        return list(
            self.gauges.sample(
                update=update,
                policy_version=self.progress.policy_version,
                env_version=self.environment.env_version.version,
                engine_queue_depth=self.intake.queue_depth(),
                experience_backlog=self.store.backlog(),
                others=self.intake.losses(),
            )
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
