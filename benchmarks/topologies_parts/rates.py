"""What one core generates and learns, each by itself: the parts of the ideal that topologies are compared with.

Called with a file for the figures, a recipe and overrides. Generates as many episodes at once as the runs have, without
latency, environments inline; then learns them in batches of the recipe. One thread. What counts is that thread's own
processor time, so other programs on the machine change little; storing is in neither figure. Both are by the token of what
was collected, prompts and all: a policy that learns comes to write more or less, and a run is compared on what it wrote.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from hotpot.config.load import load_recipe
from hotpot.topology import runs
from hotpot.topology.session import Session
from hotpot.topology.updates.batch import UpdateBatch
from hotpot.types import Purpose, Trajectory

BATCHES = 8
"""Batches that are generated together and learned one by one; the first of each kind of work is warming up."""


class Stopwatch:
    """Processor time of the main thread, by what it was spent on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count what is done inside under ``name``."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - began_s


def run_rates(session: Session, out: Path) -> None:
    """Generate, learn, and write what a token of each costs."""
    keep, watch = session.intake.keep, Stopwatch()

    def kept(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        with watch.span("store"):
            return keep(trajectories)

    session.intake.keep = kept  # type: ignore[method-assign]
    generate(session, session.recipe.rollout.tasks_per_batch)
    watch.seconds.clear()
    with watch.span("generate"):
        found = generate(session, BATCHES * session.recipe.rollout.tasks_per_batch)
    size = len(found) // BATCHES
    learn(session, found[:size])
    with watch.span("learn"):
        for start in range(size, BATCHES * size, size):
            learn(session, found[start : start + size])
    generating_s = watch.seconds["generate"] - watch.seconds["store"]
    figures = {
        "trajectories": len(found),
        "tokens": tokens(found) / len(found),
        "generate_s": generating_s / tokens(found),
        "learn_s": watch.seconds["learn"] / tokens(found[size : BATCHES * size]),
        "store_s": watch.seconds["store"] / tokens(found),
    }
    out.write_text(json.dumps(figures), encoding="utf-8")


def generate(session: Session, num_tasks: int) -> list[Trajectory]:
    """Return the trajectories of further tasks."""
    sampler = session.sampler
    groups: dict[str, list[Trajectory]] = {}
    for one in session.intake.collect(sampler.issue(num_tasks), Purpose.TRAINING):
        groups.setdefault(one.row.group_id, []).append(one)
    return [one for group in groups.values() for one in group]


def tokens(trajectories: Sequence[Trajectory]) -> int:
    """Return how many tokens the contexts of ``trajectories`` hold."""
    return sum(one.row.num_prompt_tokens + one.row.num_sampled_tokens for one in trajectories)


def learn(session: Session, collected: list[Trajectory]) -> None:
    """Learn one batch."""
    update = session.begin_update()
    session.learn(session.draw(UpdateBatch(update=update, collected=collected)))


def main() -> None:
    out, recipe, *overrides = sys.argv[1:]
    runs.TOPOLOGIES = {"sync": lambda session: run_rates(session, Path(out))}
    runs.train(load_recipe(Path(recipe), overrides), console=Console(quiet=True))


if __name__ == "__main__":
    main()
