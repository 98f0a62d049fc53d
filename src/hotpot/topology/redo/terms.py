"""The terms an update was learned under, read back from its record, and the same with settings changed.

Owns which settings act at learning and so may be changed for a doing over. Loads no model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from hotpot.config.load import build_recipe, parse_override
from hotpot.config.sections import LearnerSection
from hotpot.errors import RecipeError, UsageError
from hotpot.learner.update.terms import EXACT
from hotpot.types import UpdateRow

CHANGEABLE = ("learner", "run.seed", "run.threads", "sampling.training.temperature", "topology.updates")
"""Sections and settings that act when an update is learned; all others acted on what is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a learner is made with: two updates of equal terms are learned by one learner."""

    settings: LearnerSection
    seed: int
    temperature: float
    total_updates: int
    num_threads: int
    has_reference: bool
    exact: bool

    @classmethod
    def of(cls, row: UpdateRow) -> Self:
        """Return the terms of a recorded update.

        Raises :class:`UsageError` where they were not recorded, or not so that this release can read them.
        """
        if not row.learner_settings:
            raise UsageError(
                f"update {row.update} was recorded under schema version {row.schema_version}, which did not keep the "
                "settings it was learned with; updates are proved from version 3 on"
            )
        try:
            settings = LearnerSection.model_validate(json.loads(row.learner_settings))
        except ValueError as error:
            raise UsageError(
                f"update {row.update} was learned with settings that this release does not read "
                f"({' '.join(str(error).split())[:200]}); use the release that recorded it"
            ) from error
        return cls(
            settings=settings,
            seed=row.seed,
            temperature=row.temperature,
            total_updates=row.total_updates,
            num_threads=row.num_threads,
            has_reference=row.reference_checksum is not None,
            exact=row.cpu_capability.endswith(EXACT),
        )

    def under(self, changes: Sequence[str], recipe: Mapping[str, Any]) -> Self:
        """Return these terms with ``changes`` (``section.key=value``) laid over them.

        ``recipe`` is the run's, against which the result is checked as a whole. Raises :class:`RecipeError` where a
        change is wrong, or of a setting that does not act at learning.
        """
        for change in changes:
            name = ".".join(parse_override(change)[0])
            if not any(name == known or name.startswith(f"{known}.") for known in CHANGEABLE):
                raise RecipeError(
                    f"{name} does not act when an update is learned, so changing it would change nothing; what does: "
                    f"{', '.join(CHANGEABLE)}"
                )
        own = {
            "learner": self.settings.model_dump(mode="json"),
            "run": {**recipe.get("run", {}), "seed": self.seed, "threads": self.num_threads},
            "topology": {**recipe.get("topology", {}), "updates": self.total_updates},
        }
        sampling = dict(recipe.get("sampling", {}))
        sampling["training"] = {**sampling.get("training", {}), "temperature": self.temperature}
        changed = build_recipe({**recipe, **own, "sampling": sampling}, changes, origin="the update's record")
        learner = changed.learner
        if learner.critic != self.settings.critic:
            raise RecipeError(
                f"learner.critic = {learner.critic!r}: the update started from what its critic ({self.settings.critic!r}) had "
                "learned till then, and the record has no state of another to start from; change how it learns "
                "(learner.value_coefficient, critic_learning_rate, critic_extra_epochs), or train anew"
            )
        num_threads = changed.run.threads or self.num_threads
        return type(self)(
            settings=learner,
            seed=changed.run.seed,
            temperature=changed.sampling.training.temperature,
            total_updates=changed.topology.updates,
            num_threads=num_threads,
            has_reference=self.has_reference
            or learner.kl_coefficient > 0
            or learner.reference_path is not None,
            exact=self.exact and num_threads == 1,
        )
