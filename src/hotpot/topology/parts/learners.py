"""The learner of a run, from its recipe, its models and a checkpoint.

Owns its making. Knows neither who calls it nor in which process: the same recipe and folders give the same learner anywhere.
"""

from pathlib import Path

from hotpot.config import Recipe
from hotpot.learner import Learner
from hotpot.topology.parts.ingredients import ModelIngredients, template_markup


def make_learner(recipe: Recipe, made: ModelIngredients, source: Path | None) -> Learner:
    """Return the learner of ``recipe`` on the models in ``made``, in the state of the checkpoint ``source`` if there is one.

    Raises :class:`hotpot.errors.LearnerError` where the settings can't work together, and
    :class:`hotpot.errors.ModelFilesError` where the checkpoint is damaged or of another model.
    """
    learner = Learner(
        made.decoder,
        recipe.learner,
        total_updates=recipe.topology.updates,
        seed=recipe.run.seed,
        temperature=recipe.sampling.training.temperature or 1.0,
        reference=made.reference,
        markup=template_markup(made.tokenizer, made.dialect),
        exact=recipe.run.deterministic,
    )
    if source is not None:
        learner.load(source)
    return learner
