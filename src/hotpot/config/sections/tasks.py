"""What the agent acts in, which tasks it is given, what it is told."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from hotpot.config.sections.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, Section


class EnvSection(Section):
    """What the agent acts in."""

    kind: str = "order_desk"
    """Name of the environment, as registered under the entry point ``hotpot.environments``; or ``module:attribute`` of a
    spec that no package registers."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of that environment; its own model checks them."""


class MixEntry(Section):
    """One environment of a mix (``[[tasks.mix]]``)."""

    name: Annotated[str, Field(min_length=1, max_length=40)]
    """Name of the environment in this recipe; it may be the same kind as another, with other parameters."""
    kind: str
    """Name of the environment, as registered under the entry point ``hotpot.environments``; or ``module:attribute`` of a
    spec that no package registers."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of that environment; its own model checks them."""
    weight: PositiveFloat = 1.0
    """Part of the tasks that come from it, relative to the others'."""


class PoolWeights(Section):
    """How many times as often a task is drawn that stands in a pool, by pool."""

    unseen: NonNegativeFloat = 1.0
    """Tasks nothing was heard of yet."""
    unsolved: NonNegativeFloat = 0.5
    """Tasks all of whose episodes failed."""
    learnable: NonNegativeFloat = 2.0
    """Tasks some of whose episodes succeeded, or whose rewards differ."""
    solved: NonNegativeFloat = 0.25
    """Tasks all of whose episodes succeeded."""


class TasksSection(Section):
    """Which tasks are trained on."""

    mix: tuple[MixEntry, ...] = ()
    """Environments to train in and to evaluate on, instead of the one of section env: a list of tables with name, kind,
    params and weight."""
    num_tasks: NonNegativeInt = 0
    """Training tasks of each environment, drawn again and again; 0: every task issued is a new one."""
    pools: bool = False
    """Draw tasks by what is known of their difficulty; needs num_tasks."""
    pool_weights: PoolWeights = PoolWeights()
    """How much more often tasks of a pool are drawn."""
    pool_decay: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """What older evidence of a task keeps of its weight with each group of it that ends; 0: only the last one counts."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        names = [entry.name for entry in self.mix]
        if len(set(names)) < len(names):
            raise ValueError(
                f"tasks.mix has two environments of one name ({', '.join(names)}); name them apart"
            )
        if self.pools and not self.num_tasks:
            raise ValueError(
                "tasks.pools = true has nothing to sort where every task is new; set tasks.num_tasks, or leave pools off"
            )
        weights = self.pool_weights
        if not weights.unseen and not weights.learnable:
            raise ValueError(
                "tasks.pool_weights gives neither unseen nor learnable tasks any weight, so nothing new is ever learned; "
                "raise one of them"
            )
        return self


class PromptSection(Section):
    """What the model is told before the task."""

    system: str | None = None
    """System prompt; by default the environment's own."""
