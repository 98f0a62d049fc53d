"""Topology ``batched_async``: whole batches are collected side by side while one is learned, each learned once.

::

    task sampler ──a batch of tasks──► actors ⇄ engine ──groups──► batches (at most K ahead) ──the oldest──► learner
                                          ▲                                                                     │
                                          └──────────────────── new weights, in flight ◄────────────────────────┘

One batch is one learning phase of ``learner.epochs`` epochs; a trajectory is in one batch. Tokens are at most about K updates
behind. Who waits: actors, once K batches are ahead of the learner; the learner, for the oldest batch to be whole. With
``topology.batches_ahead = 0`` it is ``sync``, update for update.
"""

from hotpot.topology.collecting.batches import BatchesAhead
from hotpot.topology.collecting.lines import BatchLine
from hotpot.topology.flow import Flow
from hotpot.topology.session import Session


def run_batched_async(session: Session) -> None:
    """Run updates until the recipe's number is reached or its time is over; see :func:`hotpot.topology.async_.run_async`."""
    recipe = session.recipe
    line = BatchLine(BatchesAhead(recipe.topology.batches_ahead), unit=recipe.rollout.tasks_per_batch)
    with Flow(session, line) as flow:
        while not flow.done:
            flow.feed()
            flow.collect()
            flow.learn()
            flow.publish()
