"""All wiring of a run, in one function: from a recipe to a :class:`Session`.

Nothing else builds parts. The order is: read and check everything that can be wrong without leaving a trace (recipe,
environment, model, template), then open the run folder, then build what needs it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from hotpot.config import Recipe
from hotpot.engine.embedded import EmbeddedEngine
from hotpot.envs import BoundEnvironment, load_environment
from hotpot.errors import RecipeError
from hotpot.evaluation import Evaluator, MeasuredVersions
from hotpot.experience import ExperienceStore, Redactor
from hotpot.learner import Learner
from hotpot.models import Decoder, PolicyTokenizer, checksum, load_decoder
from hotpot.observability.gauges import ProcessGauges
from hotpot.observability.live import LiveView
from hotpot.rollout import Dialect, Provenance, Rollout, TaskSampler, check_dialect
from hotpot.timeline import Timeline
from hotpot.topology import rows
from hotpot.topology.halves import first_policy_version
from hotpot.topology.history import History, changed_settings, read_history
from hotpot.topology.intake import Intake
from hotpot.topology.session import Progress, Session, Threads
from hotpot.topology.stopping import StopSignal
from hotpot.topology.threads import measure_threads
from hotpot.types import Purpose, SamplingParams
from hotpot.versions import Version, prompt_version

GREEDY = SamplingParams(temperature=0.0)

RENDERERS = (
    "hotpot.rollout.dialect",
    "hotpot.rollout.layout",
    "hotpot.rollout.syntax",
    "hotpot.rollout.arguments",
)
"""Modules that turn messages into tokens and tokens into actions: they belong to the prompt's version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingredients:
    """What a run is made of, read and checked before anything is written."""

    environment: BoundEnvironment
    system_prompt: str
    tokenizer: PolicyTokenizer
    dialect: Dialect
    prompt: Version
    decoder: Decoder
    reference: Decoder | None
    origin: str


def read_ingredients(recipe: Recipe, model: Path | None) -> Ingredients:
    """Load environment and model of ``recipe`` (``model`` in place of its own, where given) and check that they fit.

    Raises :class:`hotpot.errors.UsageError` in one of its forms; nothing has been written then.
    """
    folder = model or recipe.model.path
    if folder is None:
        raise RecipeError(
            "model.path is not set; make a model with `hotpot model warmstart RECIPE --out FOLDER` and give "
            "model.path=FOLDER"
        )
    environment = load_environment(recipe.env.kind, recipe.env.params)
    tokenizer = PolicyTokenizer.load(folder)
    decoder = load_decoder(folder)
    if tokenizer.vocab_size > decoder.config.vocab_size:
        raise RecipeError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} tokens, the model {decoder.config.vocab_size}; "
            "the folder mixes two models"
        )
    if recipe.rollout.max_context_tokens > decoder.config.max_context_tokens:
        raise RecipeError(
            f"rollout.max_context_tokens = {recipe.rollout.max_context_tokens} is more than the "
            f"{decoder.config.max_context_tokens} tokens the model at {folder} is built for; lower it"
        )
    dialect = Dialect(tokenizer)
    check_dialect(dialect)
    system = recipe.prompt.system if recipe.prompt.system is not None else environment.system_prompt()
    reference = None
    if recipe.learner.kl_coefficient > 0:
        reference = load_decoder(recipe.learner.reference_path or recipe.model.path or folder)
    return Ingredients(
        environment=environment,
        system_prompt=system,
        tokenizer=tokenizer,
        dialect=dialect,
        prompt=prompt_version(system, tokenizer.chat_template, tokenizer.files(), renderers=RENDERERS),
        decoder=decoder,
        reference=reference,
        origin=str(folder),
    )


@contextmanager
def wire(
    recipe: Recipe,
    *,
    run_id: str,
    folder: Path,
    resume: bool,
    checkpoint: str | None = None,
    console: Console,
    stop: StopSignal,
) -> Iterator[Session]:
    """Build the session of a new run, or with ``resume`` of the one in ``folder`` from a checkpoint (the last one).

    On leaving, the store is closed in order: what is finished is in the lake, what is not is dropped with a reason.
    """
    history = read_history(folder, checkpoint) if resume else History()
    made = read_ingredients(recipe, history.source)
    learner = _learner(recipe, made, history)
    source_run = recipe.debug.source_run
    foreign_version = 0 if source_run is None else first_policy_version(source_run)
    threads = _choose_threads(recipe, made.decoder)
    timeline = Timeline(keep_slices=recipe.run.trace)
    with ExitStack() as stack:
        store = stack.enter_context(
            ExperienceStore.open(
                folder,
                run_id=run_id,
                settings=recipe.store,
                vocabulary_size=made.decoder.config.vocab_size,
                recipe=recipe.model_dump_json(),
                seed=recipe.run.seed,
                num_threads=threads.learner,
                resume=resume,
            )
        )
        version = max(store.ledger.mark("policy_version"), foreign_version) + 1
        store.ledger.advance("policy_version", version)
        next_update, done = max(store.ledger.mark("update"), 0) + 1, len(history.updates)
        progress = Progress(policy_version=version, update=history.update, done=done, next_update=next_update)
        learner.total_updates = next_update - 1 + max(recipe.topology.updates - done, 1)
        sampling = {
            Purpose.TRAINING: recipe.sampling.training.params(),
            Purpose.EVALUATION: recipe.sampling.evaluation.params(),
            Purpose.EVALUATION_GREEDY: GREEDY,
        }
        engine = EmbeddedEngine(
            made.decoder.config,
            made.decoder.state_dict(),
            settings=recipe.engine,
            max_context_tokens=recipe.rollout.max_context_tokens,
            sampling=sampling,
            policy_version=version,
        )
        stack.callback(engine.close)
        environment = made.environment
        rollout = Rollout(
            engine,
            environment,
            made.dialect,
            recipe.rollout,
            sampling=sampling,
            provenance=Provenance(
                run_id=run_id,
                seed=recipe.run.seed,
                actor_id="actor-0",
                actor_group="group-0",
                env_version=environment.env_version.version,
                reward_version=environment.reward_version.version,
                prompt_version=made.prompt.version,
            ),
            attempts=store.ledger,
            redact=Redactor(recipe.store.redact_patterns).redact,
            timeline=timeline,
            system_prompt=made.system_prompt,
            deterministic=recipe.run.deterministic,
        )
        sampler = TaskSampler(
            environment,
            seed=recipe.run.seed,
            samples_per_task=recipe.rollout.samples_per_task,
            next_issue=store.ledger.mark("issue") + 1,
            advance=lambda issue: store.ledger.advance("issue", issue),
        )
        intake = Intake(rollout, store, timeline, stop, num_threads=threads.engine, counts=history.counts)
        evaluator = Evaluator(
            run_id=run_id,
            plans=sampler.holdout,
            collect=intake.stream,
            info=engine.info,
            next_number=lambda: _next(store, "evaluation"),
            sampling=sampling,
            versions=MeasuredVersions(
                env=environment.name,
                env_version=environment.env_version.version,
                reward_version=environment.reward_version.version,
                prompt_version=made.prompt.version,
            ),
        )
        view = stack.enter_context(LiveView(run_id, recipe.topology.updates, done=done, console=console))
        session = Session(
            recipe=recipe,
            run_id=run_id,
            folder=folder,
            environment=environment,
            tokenizer=made.tokenizer,
            store=store,
            engine=engine,
            intake=intake,
            sampler=sampler,
            learner=learner,
            evaluator=evaluator,
            prompt=made.prompt,
            gauges=ProcessGauges(run_id),
            timeline=timeline,
            view=view,
            stop=stop,
            threads=threads,
            progress=progress,
            history=history,
        )
        origin = made.origin
        served = rows.policy_version(
            version, checksum=checksum(made.decoder.state_dict()), update=history.update, origin=origin
        )
        versions = (
            environment.env_version,
            environment.reward_version,
            made.prompt,
            served,
            rows.schema_version(),
        )
        detail: dict[str, Any] = {
            "origin": origin,
            "threads_engine": threads.engine,
            "threads_learner": threads.learner,
        }
        if resume:
            detail["changed"] = changed_settings(folder, recipe)
        store.record(
            [
                *(
                    rows.version_row(run_id, known)
                    for known in versions
                    if (known.kind, known.version) not in history.versions
                ),
                session.event("resumed" if resume else "run_started", detail),
            ]
        )
        if not made.dialect.renders_tools:
            view.message(
                "the chat template shows the model no tools; name them in prompt.system, or use another template"
            )
        yield session


def _next(store: ExperienceStore, mark: str) -> int:
    number = store.ledger.mark(mark) + 1
    store.ledger.advance(mark, number)
    return number


def _learner(recipe: Recipe, made: Ingredients, history: History) -> Learner:
    """Return the learner with the state of the checkpoint, if there is one; its ``total_updates`` is set by the caller."""
    learner = Learner(
        made.decoder,
        recipe.learner,
        total_updates=recipe.topology.updates,
        seed=recipe.run.seed,
        temperature=recipe.sampling.training.temperature or 1.0,
        reference=made.reference,
    )
    if history.source is not None:
        learner.load(history.source)
    return learner


def _choose_threads(recipe: Recipe, decoder: Decoder) -> Threads:
    """Return the thread counts of the recipe, or those measured best on the policy for each of the two kinds of work."""
    fixed = 1 if recipe.run.deterministic else recipe.run.threads
    if fixed:
        return Threads(engine=fixed, learner=fixed)
    length = min(128, decoder.config.max_context_tokens)
    tokens = torch.zeros(16, length, dtype=torch.long)
    positions = torch.arange(length).expand_as(tokens)

    def generate() -> None:
        with torch.inference_mode():
            for _ in range(2):
                decoder.logits(decoder(tokens[:, :8].reshape(-1, 1), positions[:, :8].reshape(-1, 1)))

    def learn() -> None:
        decoder.logits(decoder(tokens, positions)).logsumexp(-1).mean().backward()  # type: ignore[no-untyped-call]
        decoder.zero_grad(set_to_none=True)

    return Threads(engine=measure_threads(generate)[0], learner=measure_threads(learn)[0])
