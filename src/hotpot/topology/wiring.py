"""All wiring of a run: from a recipe to a :class:`Session`.

Nothing else builds parts. The order: read and check everything that can be wrong without leaving a trace
(``ingredients``), then open the run folder, then build what needs it, then say on the record what the run is.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from hotpot.config import Recipe
from hotpot.config.load import build_recipe
from hotpot.engine import Engine
from hotpot.evaluation import Evaluator, MeasuredVersions
from hotpot.experience import ExperienceStore, RunReader
from hotpot.experience.replay import Replay
from hotpot.learner import Learner
from hotpot.models import keep_freed_memory, seldom_collected
from hotpot.observability.gauges import ProcessGauges
from hotpot.observability.live import LiveView
from hotpot.rollout import Provenance, Rollout, Scene, TaskSampler
from hotpot.rollout.actors import Actors, InlineActors, ProcessActors, ThreadActors
from hotpot.rollout.collection import Places, even_places
from hotpot.timeline import Timeline
from hotpot.topology.collecting.departures import Departures
from hotpot.topology.collecting.intake import Intake
from hotpot.topology.halves import check_source, first_policy_version
from hotpot.topology.introduction import introduce
from hotpot.topology.learning.inline import InlineLearning
from hotpot.topology.learning.process import LearnerProcess
from hotpot.topology.learning.protocol import Learning
from hotpot.topology.parts.engines import Threads, choose_threads, frozen_sampling, make_engine
from hotpot.topology.parts.ingredients import (
    Ingredients,
    model_files,
    read_ingredients,
    read_reference,
)
from hotpot.topology.parts.learners import make_learner
from hotpot.topology.resume.checkpoints import checkpoint_folder, list_checkpoints
from hotpot.topology.resume.history import History, changed_settings, last_recipe, read_history, write_recipe
from hotpot.topology.resume.position import behind_the_marks
from hotpot.topology.resume.resuming import Resumption, Taking, check_same_experiment, take_up
from hotpot.topology.resume.run_state import RunState, made_of, surroundings
from hotpot.topology.session import Progress, Session
from hotpot.topology.supervision.stopping import StopSignal
from hotpot.topology.supervision.verdict import read_verdict
from hotpot.topology.supervision.watchdog import Watchdog, bounded, watch
from hotpot.topology.updates.outcomes import read_outcomes
from hotpot.topology.updates.rows import event_row
from hotpot.types import Purpose, SamplingParams

RESUMED, EVALUATING = "resumed", "opened_for_evaluation"
"""What the record says of a process that takes an existing run up: to train on, or only to measure it."""


@contextmanager
def wire(
    recipe: Recipe,
    *,
    run_id: str,
    folder: Path,
    resume: str | None,
    checkpoint: str | None = None,
    console: Console,
    stop: StopSignal,
) -> Iterator[Session]:
    """Build the session of a new run, or of the one in ``folder`` from a checkpoint (by default the last one).

    ``resume`` is None for a new run, else what the record is to say: :data:`RESUMED` or :data:`EVALUATING`. On leaving,
    the store is closed in order: what is finished is in the lake, what is not is dropped with a reason.
    """
    keep_freed_memory()
    limit_s = recipe.supervision.stop_after_s
    with bounded("its parts to be read and the machine measured", limit_s=limit_s):
        history = read_history(folder, checkpoint) if resume else History()
        kept = list_checkpoints(folder) if resume else []
        first = checkpoint_folder(folder, kept[0]) if kept else None
        made = read_ingredients(recipe, model=history.source, first=first)
        taking = _taking(folder, recipe, checkpoint) if resume == RESUMED else None
        accepted = check_same_experiment(taking, made, history.source) if taking is not None else []
        learner = make_learner(recipe, made, history.source)
        foreign_version = 0 if resume == EVALUATING else _foreign_version(recipe)
        threads = choose_threads(recipe, made.decoder)
    timeline = Timeline(keep_slices=recipe.run.trace)
    with ExitStack() as stack:
        stack.enter_context(seldom_collected())
        with bounded("the run folder to be opened", limit_s=limit_s):
            store = stack.enter_context(
                _open_store(recipe, made, folder, run_id, timeline, threads, resume=resume is not None)
            )
            _tell_verdict(store, folder, history.update)
        dog = stack.enter_context(watch(folder, stop_after_s=limit_s, timeline=timeline))
        learner.watch(dog.turn)
        resumption = Resumption(history=history, position=behind_the_marks(store.ledger))
        if taking is not None:
            resumption = _take_up(taking, made, history, store, threads, first, accepted, dog)
            history = resumption.history
            if history.source is not None:
                learner.load(history.source)
                made = replace(made, origin=str(history.source))
        version = max(store.ledger.mark("policy_version"), foreign_version) + 1
        store.ledger.advance("policy_version", version)
        position, done = resumption.position, len(history.updates)
        learner.lost_updates = position.next_update - 1 - done
        sampling = frozen_sampling(recipe)
        engine = make_engine(recipe, learner.policy(), sampling, version)
        stack.callback(engine.close)
        actors = _actors(recipe, made, folder, dog)
        rollout = _rollout(recipe, made, engine, sampling, store, actors, timeline)
        stack.callback(rollout.close)
        sampler = TaskSampler(
            made.mix,
            seed=recipe.run.seed,
            samples_per_task=recipe.episodes_per_task,
            next_issue=position.next_issue,
            advance=lambda issue: store.ledger.reach("issue", issue),
            num_holdout=max(recipe.evaluation.num_tasks, recipe.evaluation.num_tasks_final),
            settings=recipe.tasks,
        )
        if recipe.tasks.pools and resume is not None:
            sampler.hear(read_outcomes(RunReader.open(folder), {row.update for row in history.updates}))
        view = stack.enter_context(LiveView(run_id, recipe.topology.updates, done=done, console=console))
        intake = Intake(
            rollout, store, timeline, stop, view, num_threads=threads.engine, counts=history.counts,
            past=resumption.past, turn=dog.turn,
        )  # fmt: skip
        session = Session(
            recipe=recipe,
            run_id=run_id,
            folder=folder,
            environments=made.environments,
            model_files=model_files(made.tokenizer, made.dialect),
            store=store,
            engine=engine,
            rollout=rollout,
            intake=intake,
            sampler=sampler,
            learner=learner,
            departures=Departures(engine, rollout),
            dog=dog,
            evaluators=_evaluators(made, engine, intake, sampler, store, sampling, run_id),
            replay=_replay(recipe, folder) if resume != EVALUATING else None,
            gauges=ProcessGauges(run_id),
            timeline=timeline,
            view=view,
            stop=stop,
            threads=threads,
            progress=Progress(
                policy_version=version, update=history.update, done=done, next_update=position.next_update
            ),
            history=history,
            make_learning=partial(_learning, recipe, learner, folder, threads, history.update),
            left=resumption.left,
        )
        more = (
            {**({"changed": taking.changed} if taking.changed else {}), **resumption.detail()}
            if taking
            else {}
        )
        introduce(session, made, resume or "run_started", more, resumption.events)
        if resume != EVALUATING:
            write_recipe(folder, recipe, made.redactor)
        yield session


def _tell_verdict(store: ExperienceStore, folder: Path, update: int) -> None:
    """Put what the watchdog of the process before found on the record, ahead of anything that could hang again."""
    if (found := read_verdict(folder)) is None:
        return
    version = store.ledger.mark("policy_version")
    event = event_row(store.run_id, *found.event, update=update, policy_version=version)
    told = RunReader.open(folder).sql("select detail from events where kind = 'watchdog_ended'")
    if event.detail not in told.column("detail").to_pylist():  # else a process died before it was set aside
        store.record([event])


def _foreign_version(recipe: Recipe) -> int:
    """Return the policy version that a run which learns from another's record begins behind; 0 where it learns from its own."""
    source_run = recipe.debug.source_run
    if source_run is None:
        return 0
    check_source(source_run, recipe)
    return first_policy_version(source_run)


def _taking(folder: Path, recipe: Recipe, checkpoint: str | None) -> Taking:
    told = build_recipe(last_recipe(folder), [], origin=str(folder))
    return Taking(
        folder=folder,
        recipe=recipe,
        told=told,
        changed=changed_settings(folder, recipe),
        checkpoint=checkpoint,
    )


def _take_up(
    taking: Taking,
    made: Ingredients,
    history: History,
    store: ExperienceStore,
    threads: Threads,
    first: Path | None,
    accepted: Sequence[str],
    dog: Watchdog,
) -> Resumption:
    """Come to the weights of the last recorded update; what is learned again is so under the settings told then."""
    here = surroundings(taking.recipe, threads_engine=threads.engine, threads_learner=threads.learner)
    then = replace(made, reference=read_reference(taking.told, first, made.tokenizer, made.decoder))

    def keep(learner: Learner, into: Path, at: History) -> None:
        state = RunState(
            run_id=store.run_id,
            update=at.update,
            done=len(at.updates),
            policy_version=at.updates[-1].new_policy_version if at.updates else 0,
            marks=store.ledger.marks(),
            replay_update=at.update,
            **made_of(made.environments),
            **here,
        )
        learner.save(into, model_files(made.tokenizer, made.dialect), state.to_json())

    def make() -> Learner:
        learner = make_learner(taking.told, then, history.source)
        learner.watch(dog.turn)
        return learner

    found = take_up(replace(taking, here=here), history, store.ledger, make, keep)
    return replace(found, why=(*accepted, *found.why))


def _open_store(
    recipe: Recipe,
    made: Ingredients,
    folder: Path,
    run_id: str,
    timeline: Timeline,
    threads: Threads,
    *,
    resume: bool,
) -> ExperienceStore:
    return ExperienceStore.open(
        folder,
        run_id=run_id,
        settings=recipe.store,
        gate=recipe.gate,
        vocabulary_size=made.decoder.config.vocab_size,
        recipe=recipe.model_dump_json(),
        seed=recipe.run.seed,
        num_threads=threads.learner,
        resume=resume,
        timeline=timeline,
    )


def _rollout(
    recipe: Recipe,
    made: Ingredients,
    engine: Engine,
    sampling: dict[Purpose, SamplingParams],
    store: ExperienceStore,
    actors: Actors,
    timeline: Timeline,
) -> Rollout:
    scenes = {
        one.member.name: Scene(
            environment=one.environment,
            system_prompt=one.system_prompt,
            provenance=Provenance(
                run_id=store.run_id,
                seed=recipe.run.seed,
                actor_id="actor-0",
                actor_group="group-0",
                env_version=one.environment.env_version.version,
                reward_version=one.environment.reward_version.version,
                prompt_version=one.prompt.version,
            ),
        )
        for one in made.environments
    }
    return Rollout(
        engine,
        scenes,
        made.dialect,
        recipe.rollout,
        sampling=sampling,
        attempts=store.ledger,
        redact=made.redactor.redact,
        timeline=timeline,
        actors=actors,
        places=_places(recipe),
        deterministic=recipe.run.deterministic,
    )


def _learning(recipe: Recipe, learner: Learner, folder: Path, threads: Threads, update: int) -> Learning:
    """Return whoever learns in an asynchronous topology, in the state of the checkpoint of ``update``."""
    if recipe.topology.serial:
        return InlineLearning(learner, num_threads=threads.learner)
    return LearnerProcess(
        recipe,
        run=folder,
        num_threads=threads.learner,
        source=checkpoint_folder(folder, update),
        first=checkpoint_folder(folder, list_checkpoints(folder)[0]),
        lost_updates=learner.lost_updates,
    )


def _actors(recipe: Recipe, made: Ingredients, folder: Path, dog: Watchdog) -> Actors:
    makers = {one.member.name: one.environment.make for one in made.environments}
    if recipe.actors.kind == "threads":
        return ThreadActors(makers, recipe.actors)
    if recipe.actors.kind == "processes":
        return ProcessActors(
            {one.member.name: one.environment for one in made.environments},
            recipe.actors,
            beat_s=recipe.supervision.beat_s,
            logs=folder / "logs",
            starting=dog.turn,
        )
    return InlineActors(makers, recipe.actors)


def _places(recipe: Recipe) -> list[Places]:
    """Return what each actor group may have at once: what the recipe says, else an even share of the engine's requests."""
    settings = recipe.actors
    groups = [f"group-{index}" for index in range(settings.groups)]
    return [
        replace(
            place,
            environments=settings.environments_per_group or place.environments,
            requests=settings.requests_per_group or settings.environments_per_group or place.requests,
        )
        for place in even_places(groups, recipe.engine.max_concurrency)
    ]


def _replay(recipe: Recipe, folder: Path) -> Replay | None:
    """Return what draws from the run's own record; None where the recipe replays nothing."""
    if recipe.replay.share == 0 or recipe.debug.mode != "train":
        return None
    return Replay.open(
        RunReader.open(folder), recipe.replay, seed=recipe.run.seed, cache_folder=folder / "cache"
    )


def _evaluators(
    made: Ingredients,
    engine: Engine,
    intake: Intake,
    sampler: TaskSampler,
    store: ExperienceStore,
    sampling: dict[Purpose, SamplingParams],
    run_id: str,
) -> tuple[Evaluator[Any], ...]:
    """Return one evaluator for each environment; their numbers come from one row."""

    def next_number() -> int:
        number = store.ledger.mark("evaluation") + 1
        store.ledger.advance("evaluation", number)
        return number

    return tuple(
        Evaluator(
            run_id=run_id,
            plans=partial(sampler.holdout, environment=one.member.name),
            collect=intake.stream,
            info=engine.info,
            next_number=next_number,
            sampling=sampling,
            versions=MeasuredVersions(
                env=one.environment.name,
                env_version=one.environment.env_version.version,
                reward_version=one.environment.reward_version.version,
                prompt_version=one.prompt.version,
            ),
        )
        for one in made.environments
    )
