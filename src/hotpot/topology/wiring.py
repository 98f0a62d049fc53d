"""All wiring of a run: from a recipe to a :class:`Session`.

Nothing else builds parts. The order: read and check everything that can be wrong without leaving a trace
(``ingredients``), then open the run folder, then build what needs it, then say on the record what the run is.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from hotpot.config import Recipe
from hotpot.engine import Engine
from hotpot.engine.embedded import EmbeddedEngine
from hotpot.evaluation import Evaluator, MeasuredVersions
from hotpot.experience import ExperienceStore, RunReader
from hotpot.experience.replay import Replay
from hotpot.learner import Learner
from hotpot.models import Decoder, checksum, measure_threads, training_work
from hotpot.observability.gauges import ProcessGauges
from hotpot.observability.live import LiveView
from hotpot.rollout import Provenance, Rollout, TaskSampler
from hotpot.timeline import Timeline
from hotpot.topology import rows
from hotpot.topology.checkpoints import checkpoint_folder, list_checkpoints
from hotpot.topology.halves import check_source, first_policy_version
from hotpot.topology.history import History, changed_settings, read_history, write_recipe
from hotpot.topology.ingredients import Ingredients, read_ingredients, template_markup
from hotpot.topology.intake import Intake
from hotpot.topology.session import Progress, Session, Threads
from hotpot.topology.stopping import StopSignal
from hotpot.types import GenerationRequest, Purpose, SampleKey, SamplingParams

GREEDY = SamplingParams(temperature=0.0)

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
    history = read_history(folder, checkpoint) if resume else History()
    kept = list_checkpoints(folder) if resume else []
    first = checkpoint_folder(folder, kept[0]) if kept else None
    made = read_ingredients(recipe, model=history.source, first=first)
    learner = _learner(recipe, made, history)
    source_run = recipe.debug.source_run if resume != EVALUATING else None
    if source_run is not None:
        check_source(source_run, recipe)
    foreign_version = 0 if source_run is None else first_policy_version(source_run)
    threads = _choose_threads(recipe, made.decoder)
    changed = changed_settings(folder, recipe) if resume == RESUMED else {}
    timeline = Timeline(keep_slices=recipe.run.trace)
    with ExitStack() as stack:
        store = stack.enter_context(
            _open_store(recipe, made, folder, run_id, timeline, threads, resume=resume is not None)
        )
        if resume != EVALUATING:
            write_recipe(folder, recipe, made.redactor)
        version = max(store.ledger.mark("policy_version"), foreign_version) + 1
        store.ledger.advance("policy_version", version)
        next_update, done = max(store.ledger.mark("update"), 0) + 1, len(history.updates)
        learner.lost_updates = next_update - 1 - done
        sampling = _sampling(recipe)
        engine = _engine(recipe, made.decoder, sampling, version)
        stack.callback(engine.close)
        rollout = _rollout(recipe, made, engine, sampling, store, run_id, timeline)
        sampler = TaskSampler(
            made.environment,
            seed=recipe.run.seed,
            samples_per_task=recipe.rollout.samples_per_task,
            next_issue=store.ledger.mark("issue") + 1,
            advance=lambda issue: store.ledger.advance("issue", issue),
            num_holdout=max(recipe.evaluation.num_tasks, recipe.evaluation.num_tasks_final),
        )
        view = stack.enter_context(LiveView(run_id, recipe.topology.updates, done=done, console=console))
        intake = Intake(
            rollout, store, timeline, stop, view, num_threads=threads.engine, counts=history.counts
        )
        session = Session(
            recipe=recipe,
            run_id=run_id,
            folder=folder,
            environment=made.environment,
            tokenizer=made.tokenizer,
            store=store,
            engine=engine,
            intake=intake,
            sampler=sampler,
            learner=learner,
            evaluator=_evaluator(made, engine, intake, sampler, store, sampling, run_id),
            replay=_replay(recipe, folder) if resume != EVALUATING else None,
            prompt=made.prompt,
            gauges=ProcessGauges(run_id),
            timeline=timeline,
            view=view,
            stop=stop,
            threads=threads,
            progress=Progress(
                policy_version=version, update=history.update, done=done, next_update=next_update
            ),
            history=history,
        )
        _introduce(session, made, resume or "run_started", changed)
        yield session


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


def _sampling(recipe: Recipe) -> dict[Purpose, SamplingParams]:
    return {
        Purpose.TRAINING: recipe.sampling.training.params(),
        Purpose.EVALUATION: recipe.sampling.evaluation.params(),
        Purpose.EVALUATION_GREEDY: GREEDY,
    }


def _learner(recipe: Recipe, made: Ingredients, history: History) -> Learner:
    """Return the learner, with the state of the checkpoint if there is one."""
    learner = Learner(
        made.decoder,
        recipe.learner,
        total_updates=recipe.topology.updates,
        seed=recipe.run.seed,
        temperature=recipe.sampling.training.temperature or 1.0,
        reference=made.reference,
        markup=template_markup(made.tokenizer, made.dialect),
    )
    if history.source is not None:
        learner.load(history.source)
    return learner


def _engine(
    recipe: Recipe, decoder: Decoder, sampling: dict[Purpose, SamplingParams], version: int
) -> EmbeddedEngine:
    return EmbeddedEngine(
        decoder.config,
        decoder.state_dict(),
        settings=recipe.engine,
        max_context_tokens=recipe.rollout.max_context_tokens,
        sampling=sampling,
        policy_version=version,
    )


def _rollout(
    recipe: Recipe,
    made: Ingredients,
    engine: Engine,
    sampling: dict[Purpose, SamplingParams],
    store: ExperienceStore,
    run_id: str,
    timeline: Timeline,
) -> Rollout:
    return Rollout(
        engine,
        made.environment,
        made.dialect,
        recipe.rollout,
        sampling=sampling,
        provenance=Provenance(
            run_id=run_id,
            seed=recipe.run.seed,
            actor_id="actor-0",
            actor_group="group-0",
            env_version=made.environment.env_version.version,
            reward_version=made.environment.reward_version.version,
            prompt_version=made.prompt.version,
        ),
        attempts=store.ledger,
        redact=made.redactor.redact,
        timeline=timeline,
        system_prompt=made.system_prompt,
        deterministic=recipe.run.deterministic,
    )


def _replay(recipe: Recipe, folder: Path) -> Replay | None:
    """Return what draws from the run's own record; None where the recipe replays nothing."""
    if recipe.replay.share == 0 or recipe.debug.mode != "train":
        return None
    return Replay.open(
        RunReader.open(folder), recipe.replay, seed=recipe.run.seed, cache_folder=folder / "cache"
    )


def _evaluator(
    made: Ingredients,
    engine: Engine,
    intake: Intake,
    sampler: TaskSampler,
    store: ExperienceStore,
    sampling: dict[Purpose, SamplingParams],
    run_id: str,
) -> Evaluator[Any]:
    def next_number() -> int:
        number = store.ledger.mark("evaluation") + 1
        store.ledger.advance("evaluation", number)
        return number

    return Evaluator(
        run_id=run_id,
        plans=sampler.holdout,
        collect=intake.stream,
        info=engine.info,
        next_number=next_number,
        sampling=sampling,
        versions=MeasuredVersions(
            env=made.environment.name,
            env_version=made.environment.env_version.version,
            reward_version=made.environment.reward_version.version,
            prompt_version=made.prompt.version,
        ),
    )


def _introduce(session: Session, made: Ingredients, kind: str, changed: dict[str, list[Any]]) -> None:
    """Put on the record what the run is made of and what this process was told."""
    progress, environment = session.progress, made.environment
    served = rows.policy_version(
        progress.policy_version,
        checksum=checksum(made.decoder.state_dict()),
        update=progress.update,
        origin=made.origin,
    )
    versions = (
        environment.env_version,
        environment.reward_version,
        made.prompt,
        served,
        rows.schema_version(),
    )
    unknown = [known for known in versions if (known.kind, known.version) not in session.history.versions]
    detail: dict[str, Any] = {
        "origin": made.origin,
        "threads_engine": session.threads.engine,
        "threads_learner": session.threads.learner,
        **({"changed": changed} if changed else {}),
    }
    described = [rows.version_row(session.run_id, known) for known in unknown]
    session.store.record([*described, session.event(kind, detail)])
    if not made.dialect.renders_tools:
        session.view.message(
            "the chat template shows the model no tools; name them in prompt.system, or use another template"
        )


def _choose_threads(recipe: Recipe, decoder: Decoder) -> Threads:
    """Return the thread counts of the recipe, or those measured best on the policy for each of the two kinds of work."""
    fixed = 1 if recipe.run.deterministic else recipe.run.threads
    if fixed:
        return Threads(engine=fixed, learner=fixed)
    sampling = {Purpose.EVALUATION: SamplingParams()}
    engine = _engine(recipe, decoder, sampling, version=0)
    number = 0

    def generate() -> None:
        nonlocal number
        for row in range(min(64, recipe.engine.max_concurrency)):
            number += 1
            engine.submit(
                GenerationRequest(
                    request_id=str(number),
                    session_id=str(number),
                    prompt=np.zeros(min(32, recipe.rollout.max_context_tokens - 8), dtype=np.int32),
                    stop_tokens=(),
                    max_tokens=4,
                    purpose=Purpose.EVALUATION,
                    sampling=sampling[Purpose.EVALUATION],
                    key=SampleKey(seed=0, issue=row, sample=0, step=0),
                )
            )
        while not engine.idle:
            engine.step()

    chosen = Threads(engine=measure_threads(generate)[0], learner=measure_threads(training_work(decoder))[0])
    engine.close()
    return chosen
