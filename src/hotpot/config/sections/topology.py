"""Who waits for whom: the topology, what waits between actors and learner, who runs episodes, who is taken for dead."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hotpot.config.sections.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class TopologySection(Section):
    """Who waits for whom."""

    kind: Literal["sync", "batched_async", "async"] = "sync"
    """``sync``: collect, learn, publish, in turn. ``batched_async``: whole batches are collected while the one before is
    learned, each learned once. ``async``: actors never wait for the learner, which takes what is in the queue."""
    updates: PositiveInt = 60
    """Updates in the run."""
    max_seconds: PositiveFloat | None = None
    """Wall time after which no further update begins; the final evaluation still runs."""
    serial: bool = False
    """Everything in one thread, in an order that follows from the recipe alone: for debugging, and with run.deterministic
    for repeating a run. The learner has no process of its own, environments are stepped where they are called."""
    batches_ahead: NonNegativeInt = 1
    """``batched_async``: batches that may be collected or wait while one is learned; 0 is ``sync``."""
    publish_every_updates: PositiveInt = 1
    """Updates between publishes. The updates between make policy versions that nobody samples from."""
    publish_every_s: PositiveFloat | None = None
    """Publish also where this much time has passed since the last one."""
    swap: Literal["in_flight", "between_episodes"] = "in_flight"
    """New weights serve from the next token on, in the midst of episodes (each token's version is recorded); or no episode
    begins until all under way have ended, and then they are published."""

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        published = (self.publish_every_updates, self.publish_every_s, self.swap)
        if self.kind == "sync" and published != (1, None, "in_flight"):
            raise ValueError(
                "topology.kind = 'sync' publishes after every update, between episodes; leave out "
                "topology.publish_every_updates, publish_every_s and swap, or take another kind"
            )
        return self


class QueueSection(Section):
    """What waits between actors and learner (topology.kind = ``async``). Sizes count trajectories."""

    depth: PositiveInt = 200
    """Trajectories that may wait; at least those of one batch."""
    when_full: Literal["drop_oldest", "drop_newest", "block"] = "drop_oldest"
    """Where a group comes and there is no room for it: the oldest groups go, or it does, or actors begin no episode until
    there is room for it and for all under way. Room for one whole batch there always is. What goes is on the ledger."""
    max_staleness: NonNegativeInt | None = 8
    """Updates that a trajectory's oldest token may be behind the weights that learn from it; unset, any number."""
    when_stale: Literal["drop", "wait"] = "drop"
    """What keeps that bound: older trajectories are dropped when a batch is taken, or actors begin no episode that
    could come to be older (as many batches are under way, wait or are learned as the bound has updates, and one), and
    only what faster ones overtook is dropped."""
    batch_tokens: PositiveInt | None = None
    """Sampled tokens of a batch, in whole groups; unset, a batch is rollout.tasks_per_batch groups."""
    longest_wait_s: PositiveFloat = 60.0
    """Longest time the learner waits for a whole batch."""
    when_late: Literal["smaller", "skip", "replay"] = "smaller"
    """What happens then: it learns from what there is, from nothing (and waits as long again), or replay fills the batch up
    (needs section replay; recorded as consumed again)."""


class ActorsSection(Section):
    """Who runs episodes."""

    kind: Literal["inline", "threads", "processes"] = "inline"
    """Where environments are called: in the main loop, one after the other; each actor in threads; or in a process of its
    own, which can be killed where it hangs."""
    groups: PositiveInt = 1
    """Actor groups; each shares an engine."""
    actors_per_group: PositiveInt = 1
    """Actors in a group; episodes are dealt to them in turn."""
    environments_per_group: PositiveInt | None = None
    """Episodes of a group at once; unset, an even share of engine.max_concurrency."""
    requests_per_group: PositiveInt | None = None
    """Requests of a group that are in the engine at once; further ones wait. Unset, one for each of its episodes."""
    call_timeout_s: PositiveFloat = 60.0
    """Longest time for one call of an environment; then it counts as hung, and the attempt has failed. At most
    supervision.stop_after_s, unless calls are inline."""
    start_timeout_s: PositiveFloat = 120.0
    """Longest time that an actor's process may take to make its environments ready, a fresh one's too; at most
    supervision.stop_after_s."""
    max_hung: NonNegativeInt = 4
    """Calls of one actor that may hang at once, each keeping a thread; with one more it takes no calls and is replaced."""
    over_issue: NonNegativeFloat = 0.0
    """Episodes of each task issued beyond rollout.samples_per_task, as a share of it; what is still under way when
    enough have finished is cut, with a reason."""


class SupervisionSection(Section):
    """Who is taken for dead, and what becomes of the run."""

    beat_s: PositiveFloat = 1.0
    """Time between two beats of progress on the record."""
    dead_after_s: PositiveFloat = 30.0
    """Without progress for this long while it has work, an actor, an engine or the learner is taken for dead. At least four
    times beat_s."""
    stop_after_s: PositiveFloat = 600.0
    """Without progress of the whole for this long the run ends, names who it waits for, and writes every stack."""
    max_replacements: NonNegativeInt = 16
    """Actors that are replaced in a run; one more ends it."""
    breaker_attempts: PositiveInt = 32
    """Attempts of one environment version that its circuit breaker judges by."""
    breaker_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of them that fails above which no task of that version is begun."""
    breaker_rest_s: PositiveFloat = 30.0
    """How long, at most half of stop_after_s; then one attempt is let through, and its end decides."""

    @property
    def rest_s(self) -> float:
        """How long an environment version rests: the watchdog is not to end a run whose environments do nothing else."""
        return min(self.breaker_rest_s, self.stop_after_s / 2)

    @model_validator(mode="after")
    def _beats_are_well_below(self) -> Self:
        if self.dead_after_s < 4 * self.beat_s:
            raise ValueError(
                f"supervision.beat_s = {self.beat_s} is not well below supervision.dead_after_s = {self.dead_after_s}: a late "
                "beat would be taken for a death; make the latter at least four times the former"
            )
        if self.stop_after_s < self.dead_after_s:
            raise ValueError(
                f"supervision.stop_after_s = {self.stop_after_s} is below supervision.dead_after_s = {self.dead_after_s}: the "
                "run would end before the dead are replaced; raise it"
            )
        return self
