"""A run that learns every batch a fixed number of updates after it was sampled: for the benchmark of stale data.

::

    collect (newest weights) ──► batches waiting: always as many as the staleness ──► learn the oldest ──► publish

One thread. The first batches are all sampled by the starting weights, so the staleness of update u is the smaller of u - 1
and the bound; as many batches are collected as are learned. With a staleness of 0 it is topology ``sync``.

Called with the staleness, a recipe and overrides.
"""

import sys
from collections import deque
from functools import partial
from pathlib import Path

from rich.console import Console

from hotpot.config.load import load_recipe
from hotpot.topology import runs
from hotpot.topology.session import Session
from hotpot.topology.updates.batch import UpdateBatch
from hotpot.types import Trajectory


def run_delayed(session: Session, *, staleness: int) -> None:
    """Run updates until the recipe's number is reached; each learns the batch that has waited for ``staleness`` updates."""
    waiting: deque[list[Trajectory]] = deque()
    while (done := session.progress.done) < session.recipe.topology.updates:
        update = session.begin_update()
        while len(waiting) <= staleness and done + len(waiting) < session.recipe.topology.updates:
            waiting.append(list(session.collect(update).collected))
        batch = session.draw(UpdateBatch(update=update, collected=waiting.popleft()))
        result = session.learn(batch)
        published = session.publish(update)
        session.record_update(result, batch, published)
        session.stop.check()
        session.due()


def main() -> None:
    staleness, recipe, *overrides = sys.argv[1:]
    # The ends of a run (evaluations, checkpoints, summary) are those of any; only its loop is this one.
    runs.TOPOLOGIES["sync"] = partial(run_delayed, staleness=int(staleness))
    runs.train(load_recipe(Path(recipe), overrides), console=Console(quiet=True))


if __name__ == "__main__":
    main()
