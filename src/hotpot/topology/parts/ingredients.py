"""What a run is made of, read and checked before anything is written: environment, model, template, reference.

Everything that can be wrong with a recipe and its files is found here, so that a refused run leaves no trace.
"""

from dataclasses import dataclass
from pathlib import Path

from hotpot.config import Recipe
from hotpot.envs import BoundEnvironment, load_environment
from hotpot.errors import RecipeError
from hotpot.experience import Markup, Redactor
from hotpot.models import Policy, PolicyTokenizer, generation_config, load_policy
from hotpot.rollout import Dialect, Mix, MixedEnvironment, check_dialect
from hotpot.versions import Version, prompt_version

RENDERERS = (
    "hotpot.rollout.dialect",
    "hotpot.rollout.conversation",
    "hotpot.rollout.bridge",
    "hotpot.rollout.template",
    "hotpot.rollout.layout",
    "hotpot.rollout.syntax",
    "hotpot.rollout.arguments",
    "hotpot.models.tokenizer",
    "hotpot.experience.records.redact",
)
"""Modules that turn messages into tokens and tokens into actions: they belong to the prompt's version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironment:
    """One environment of the run with what its agent is told first, and the version of that."""

    member: MixedEnvironment
    system_prompt: str
    prompt: Version

    @property
    def environment(self) -> BoundEnvironment:
        """The environment."""
        return self.member.environment


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIngredients:
    """The models of a run and the way they are written to: all that a learner is made of besides the recipe."""

    tokenizer: PolicyTokenizer
    dialect: Dialect
    decoder: Policy
    reference: Policy | None
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingredients(ModelIngredients):
    """What a run is made of, read and checked before anything is written; ``environments`` as in ``mix``."""

    mix: Mix
    environments: tuple[RunEnvironment, ...]
    redactor: Redactor


def read_mix(recipe: Recipe) -> Mix:
    """Load the environments of ``recipe``. Raises :class:`hotpot.errors.UsageError` in one of its forms."""
    return Mix(
        [
            MixedEnvironment(
                name=entry.name, environment=load_environment(entry.kind, entry.params), weight=entry.weight
            )
            for entry in recipe.environments
        ]
    )


def read_ingredients(recipe: Recipe, *, model: Path | None = None, first: Path | None = None) -> Ingredients:
    """Load environments and models of ``recipe`` and check that they fit; ``model`` and ``first`` as :func:`read_model` has them.

    Raises :class:`hotpot.errors.UsageError` in one of its forms; nothing has been written then.
    """
    model_folder(recipe, model)
    mix = read_mix(recipe)
    made = read_model(recipe, model=model, first=first)
    return Ingredients(
        mix=mix,
        environments=tuple(_environment(recipe, member, made.tokenizer) for member in mix),
        tokenizer=made.tokenizer,
        dialect=made.dialect,
        redactor=Redactor(recipe.store.redact_patterns),
        decoder=made.decoder,
        reference=made.reference,
        origin=made.origin,
    )


def model_folder(recipe: Recipe, model: Path | None = None) -> Path:
    """Return ``model``, or without one the folder that the recipe names. Raises :class:`RecipeError` where it names none."""
    folder = model or recipe.model.path
    if folder is None:
        raise RecipeError(
            "model.path is not set; make a model with `hotpot model warmstart RECIPE --out FOLDER` and give "
            "model.path=FOLDER"
        )
    return folder


def read_model(recipe: Recipe, *, model: Path | None = None, first: Path | None = None) -> ModelIngredients:
    """Load the models of ``recipe`` and check that they fit it and each other.

    ``model`` takes the place of the recipe's model (a checkpoint to go on from); ``first`` is the model the run began
    with, where that is kept: what adapters lie on.

    Raises :class:`hotpot.errors.UsageError` in one of its forms.
    """
    folder = model_folder(recipe, model)
    tokenizer = PolicyTokenizer.load(folder)
    base = (first or recipe.model.path or folder) if recipe.learner.lora_rank else folder
    decoder = load_policy(base, recipe.model.implementation)
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
    return ModelIngredients(
        tokenizer=tokenizer,
        dialect=dialect,
        decoder=decoder,
        reference=read_reference(recipe, first, tokenizer, decoder),
        origin=str(folder),
    )


def system_prompt(recipe: Recipe, member: MixedEnvironment) -> str:
    """Return what the agent is told before its task: the recipe's text, or the environment's own."""
    told = recipe.prompt.system
    return told if told is not None else member.environment.system_prompt()


def _environment(recipe: Recipe, member: MixedEnvironment, tokenizer: PolicyTokenizer) -> RunEnvironment:
    system = system_prompt(recipe, member)
    prompt = prompt_version(
        system,
        tokenizer.chat_template,
        tokenizer.files(),
        renderers=RENDERERS,
        params={"redact_patterns": list(recipe.store.redact_patterns), **_shown_when_full(recipe)},
    )
    return RunEnvironment(member=member, system_prompt=system, prompt=prompt)


def _shown_when_full(recipe: Recipe) -> dict[str, str]:
    """Return the recipe's own text that the agent is shown where its context is full."""
    rollout = recipe.rollout
    return {"handover_request": rollout.handover_request} if rollout.context_overflow == "segment" else {}


def model_files(tokenizer: PolicyTokenizer, dialect: Dialect) -> dict[str, bytes]:
    """Return what a model folder holds beside the model: the tokenizer's files, and where a generation ends."""
    return tokenizer.files() | generation_config(dialect.stop_tokens, pad_id=tokenizer.pad_id)


def template_markup(tokenizer: PolicyTokenizer, dialect: Dialect) -> Markup:
    """Return the tokens that the chat template is written with; runs of spaces that a tokenizer adds are none."""
    ids = frozenset(index for text, index in tokenizer.added_ids.items() if text.strip())
    return Markup(ids=ids, ends=frozenset(dialect.stop_tokens))


def read_reference(
    recipe: Recipe, first: Path | None, tokenizer: PolicyTokenizer, policy: Policy
) -> Policy | None:
    """Return the policy to stay close to: the recipe's, or ``first``, the model the run began with. None without one.

    Where adapters learn, ``policy`` itself is that model, and stays it. Raises :class:`RecipeError` where it can't score what the policy says.
    """
    if recipe.learner.kl_coefficient == 0 and recipe.learner.reference_path is None:
        return None
    if recipe.learner.lora_rank and recipe.learner.reference_path is None:
        return policy
    folder = recipe.learner.reference_path or first or recipe.model.path
    if folder is None:
        raise RecipeError(
            "learner.kl_coefficient needs a reference; set learner.reference_path or model.path"
        )
    if PolicyTokenizer.load(folder).files() != tokenizer.files():
        raise RecipeError(
            f"the reference at {folder} has another tokenizer than the policy, so their log-probabilities are not of "
            "the same tokens; choose a reference of the same family"
        )
    reference = load_policy(folder, recipe.model.implementation)
    if recipe.rollout.max_context_tokens > reference.config.max_context_tokens:
        raise RecipeError(
            f"rollout.max_context_tokens = {recipe.rollout.max_context_tokens} is more than the "
            f"{reference.config.max_context_tokens} tokens the reference at {folder} is built for; lower it"
        )
    return reference
