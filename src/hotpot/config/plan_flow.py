"""Who runs episodes, what waits between actors and learner, who is taken for dead: what a plan says beside its sizes.

Pure: every line follows from a :class:`Recipe` alone and names the settings that it comes from. What a recipe has no use for
is left out: a queue in ``sync``, actors where the run learns from a record, the clock's bounds in serial order.
"""

from dataclasses import dataclass

from hotpot.config.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    """One line of a plan: the group it is printed under, its name, its value (None: no bound), its unit, how it was made."""

    part: str
    name: str
    value: float | None
    unit: str
    made_of: str

    @property
    def shown(self) -> str:
        """The value as it is printed."""
        if self.value is None:
            return "any number of"
        return f"{self.value:,}" if isinstance(self.value, int) else f"{self.value:,g}"


_WHERE = {
    "inline": "called in the main loop, one after the other",
    "threads": "each calls environments in threads of its own",
    "processes": "each in a process of its own",
}
_FULL = {
    "drop_oldest": "the oldest groups are dropped",
    "drop_newest": "the group that comes is dropped",
    "block": "actors begin no episode",
}
_STALE = {
    "drop": "what is older is dropped when a batch is taken",
    "wait": "actors begin no episode that could come to be older",
}
_LATE = {
    "smaller": "it learns from what there is",
    "skip": "it learns from nothing, and waits as long again",
    "replay": "replay fills the batch up",
}
_SWAP = {
    "in_flight": "they serve from the next token on",
    "between_episodes": "no episode begins until all under way have ended",
}


def flow_lines(recipe: Recipe) -> tuple[PlanLine, ...]:
    """Return what ``recipe`` says of actors, of what waits for the learner, and of supervision, in reading order."""
    mode, asynchronous = recipe.debug.mode, recipe.topology.kind != "sync"
    lines: list[PlanLine] = []
    if mode != "learn_from_record":
        lines += _actors(recipe)
    if mode == "train" and asynchronous:
        lines += _waiting(recipe)
    watched = mode == "train" and asynchronous
    return (*lines, *_supervision(recipe, watched=watched))


def episodes_at_once(recipe: Recipe) -> int:
    """Return how many episodes all actor groups may have under way."""
    return _at_once(recipe, recipe.actors.environments_per_group)


def _at_once(recipe: Recipe, of_each_group: int | None) -> int:
    groups = recipe.actors.groups
    return max(recipe.engine.max_concurrency, groups) if of_each_group is None else groups * of_each_group


def _shared(recipe: Recipe, setting: str, of_each_group: int | None) -> str:
    if of_each_group is None:
        return f"engine.max_concurrency, shared evenly by {recipe.actors.groups} actors.groups"
    return f"{recipe.actors.groups} actors.groups x {of_each_group} {setting}"


def _actors(recipe: Recipe) -> list[PlanLine]:
    actors, samples = recipe.actors, recipe.rollout.samples_per_task
    environments, requests = actors.environments_per_group, actors.requests_per_group
    asked = "actors.requests_per_group" if requests else "actors.environments_per_group"
    lines = [
        _line("actors", actors.groups * actors.actors_per_group, "actors",
              f"{actors.groups} actors.groups x {actors.actors_per_group} actors.actors_per_group; {_WHERE[actors.kind]} "
              f"(actors.kind = {actors.kind})"),
        _line("episodes at once, at most", episodes_at_once(recipe), "episodes",
              _shared(recipe, "actors.environments_per_group", environments)),
        _line("their requests, at most", _at_once(recipe, requests or environments), "requests",
              f"{_shared(recipe, asked, requests or environments)}; further ones wait"),
    ]  # fmt: skip
    if actors.over_issue:
        beyond = f"{samples} of them count, the rest is cut (actors.over_issue = {actors.over_issue:g})"
        lines.append(_line("issued of each task", recipe.episodes_per_task, "episodes", beyond))
    if actors.kind != "inline":
        made_of = "actors.call_timeout_s; then its attempt has failed"
        lines.append(_line("one call, at most", actors.call_timeout_s, "s", made_of))
    return lines


def _line(name: str, value: float | None, unit: str, made_of: str, part: str = "actors run") -> PlanLine:
    return PlanLine(part=part, name=name, value=value, unit=unit, made_of=made_of)


def _waiting(recipe: Recipe) -> list[PlanLine]:
    part, topology = "between actors and learner", recipe.topology
    if topology.kind == "async":
        lines = _queue(recipe, part)
    else:
        made_of = "topology.batches_ahead; then actors wait. Tokens are about as many updates behind"
        lines = [_line("batches ahead, at most", topology.batches_ahead, "batches", made_of, part)]
    every_s = topology.publish_every_s
    clock = "" if every_s is None else f", or once {every_s:g} s have passed (topology.publish_every_s)"
    made_of = (
        f"topology.publish_every_updates{clock}; {_SWAP[topology.swap]} (topology.swap = {topology.swap})"
    )
    return [
        *lines,
        _line("weights are published every", topology.publish_every_updates, "updates", made_of, part),
    ]


def _queue(recipe: Recipe, part: str) -> list[PlanLine]:
    queue = recipe.queue
    late = f"then {_LATE[queue.when_late]} (queue.when_late = {queue.when_late})"
    wait_s, waits = queue.longest_wait_s, f"queue.longest_wait_s; {late}"
    lines = [
        _line("the queue, at most", queue.depth, "trajectories",
              f"queue.depth; full: {_FULL[queue.when_full]} (queue.when_full = {queue.when_full})", part),
        _line("staleness, at most", queue.max_staleness, "updates",
              f"queue.max_staleness; {_STALE[queue.when_stale]} (queue.when_stale = {queue.when_stale})", part),
        _line("wait for a batch, at most", wait_s, "s", waits, part),
    ]  # fmt: skip
    if recipe.topology.serial:
        lines[-1] = _line(
            lines[-1].name, None, "s", "topology.serial = true: nothing hangs on the clock", part
        )
    if queue.batch_tokens is not None:
        made_of = "queue.batch_tokens, in whole groups, in place of the tasks of an update"
        lines.append(_line("a batch, at least", queue.batch_tokens, "sampled tokens", made_of, part))
    return lines


def _supervision(recipe: Recipe, *, watched: bool) -> list[PlanLine]:
    """``watched``: parts and environments are judged, not only the whole."""
    part, settings = "supervision", recipe.supervision
    whole = _line(
        "the run ends without progress for", settings.stop_after_s, "s", "supervision.stop_after_s", part
    )
    if not watched:
        return [whole]
    fails = (
        f"where more than {settings.breaker_share:g} of the last {settings.breaker_attempts} attempts failed"
    )
    if recipe.topology.serial:
        ends = "supervision.breaker_attempts; where more than supervision.breaker_share = "
        ends += f"{settings.breaker_share:g} of them failed, the run ends (topology.serial = true)"
        return [
            _line("environments are judged by their last", settings.breaker_attempts, "attempts", ends, part),
            whole,
        ]
    return [
        _line("dead without progress for", settings.dead_after_s, "s",
              "supervision.dead_after_s: an actor is replaced; engine or learner, and the run ends", part),
        _line("replaced, at most", settings.max_replacements, "actors",
              "supervision.max_replacements; with one more the run ends", part),
        _line("an environment version rests", settings.rest_s, "s",
              f"supervision.breaker_rest_s, at most half of stop_after_s; {fails}", part),
        whole,
    ]  # fmt: skip
