"""Learners in the state that an update of a run started from, under the terms that it was learned with.

Owns what a learner is made of besides the record: weights and optimiser of a checkpoint, the tokenizer beside them, the
reference, the model that adapters lie on. Reads checkpoints; writes into a temporary folder only.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from hotpot.errors import ModelFilesError
from hotpot.learner import Learner
from hotpot.models import Implementation, Policy, PolicyTokenizer, checksum, load_policy
from hotpot.rollout import Dialect
from hotpot.topology.parts.ingredients import template_markup
from hotpot.topology.redo.terms import Terms
from hotpot.topology.resume.checkpoints import checkpoint_folder


class Learners:
    """Makes the learners of one run. ``model`` is the model the run began with, as its recipe names it, and
    ``implementation`` who computes it."""

    def __init__(self, folder: Path, model: Path | None, implementation: Implementation = "auto") -> None:
        self._folder, self._model, self._implementation = folder, model, implementation
        self._policies: dict[Path, Policy] = {}

    def at(self, checkpoint: int, terms: Terms) -> Learner:
        """Return a learner in the state of the checkpoint after update ``checkpoint``.

        Raises :class:`ModelFilesError` where it can't be read, or the reference that the terms need is gone.
        """
        return self._load(checkpoint_folder(self._folder, checkpoint), terms)

    def under(self, learner: Learner, terms: Terms) -> Learner:
        """Return another learner in the state of ``learner``, under other terms; as a resume does, by way of files."""
        with tempfile.TemporaryDirectory(prefix="hotpot-") as scratch:
            folder = Path(scratch) / "learner"
            folder.mkdir()
            learner.save(folder, self.tokenizer().files())
            return self._load(folder, terms)

    def tokenizer(self) -> PolicyTokenizer:
        """Return the run's tokenizer: every checkpoint has it."""
        found = sorted(self._folder.glob("checkpoints/*/tokenizer.json"))
        if not found:
            raise ModelFilesError(
                f"{self._folder} has no checkpoint with a tokenizer; restore one from a copy"
            )
        return PolicyTokenizer.load(found[0].parent)

    def _load(self, folder: Path, terms: Terms) -> Learner:
        tokenizer = PolicyTokenizer.load(folder)
        learner = Learner(
            self._starting_model() if terms.settings.lora_rank else load_policy(folder, self._implementation),
            terms.settings,
            total_updates=terms.total_updates,
            seed=terms.seed,
            temperature=terms.temperature,
            reference=self._reference(terms),
            markup=template_markup(tokenizer, Dialect(tokenizer)),
            exact=terms.exact,
        )
        learner.load(folder)
        return learner

    def _reference(self, terms: Terms) -> Policy | None:
        """Return the reference: the one the settings name, else the model the run began with."""
        if not terms.has_reference:
            return None
        named = terms.settings.reference_path
        return self._starting_model() if named is None else self._policy("the reference policy", [named])

    def _starting_model(self) -> Policy:
        """Return the model the run began with: a reference, and what adapters lie on. Its weights never change."""
        return self._policy("the starting model", [checkpoint_folder(self._folder, 0), self._model])

    def _policy(self, what: str, candidates: Sequence[Path | None]) -> Policy:
        for folder in candidates:
            if folder is not None and folder.is_dir():
                if folder not in self._policies:
                    self._policies[folder] = load_policy(folder, self._implementation)
                return self._policies[folder]
        raise ModelFilesError(
            f"{what} is gone: none of {', '.join(str(one) for one in candidates if one)} is a model folder; "
            "restore it from a copy"
        )


def weights_checksum(learner: Learner) -> str:
    """Return the checksum of the weights of ``learner`` as they stand."""
    return checksum(learner.weights())
