"""Topology ``async``: actors never wait for the learner, the learner takes what is in the queue.

::

    task sampler ──► actors ⇄ engine ──groups──► queue (depth, staleness) ──a batch──► learner (a process of its own)
                                 ▲                                                          │
                                 └──────────────── new weights, in flight ◄─────────────────┘

Episodes go on through publishes; each token has the version that sampled it, and the learner corrects for what that is behind
(docs/off-policy.md). Who waits: the learner for a batch, at most ``queue.longest_wait_s``; actors only where the recipe says
``block`` or ``wait``.
"""

from hotpot.topology.collecting.lines import StreamLine
from hotpot.topology.collecting.queue import TrajectoryQueue
from hotpot.topology.flow import Flow
from hotpot.topology.session import Session


def run_async(session: Session) -> None:
    """Run updates until the recipe's number is reached or its time is over.

    Consumes tasks; produces trajectories, updates and policy versions. Waits for replies of actors where nobody else has
    anything to do; ends early by :class:`StopRequested`.
    """
    recipe = session.recipe
    queue = TrajectoryQueue(
        recipe.queue,
        batch_groups=recipe.rollout.tasks_per_batch,
        group_size=recipe.rollout.samples_per_task,
        aliases=session.same_weights() if session.left.issues else None,
    )
    with Flow(session, StreamLine(queue)) as flow:
        while not flow.done:
            flow.feed()
            flow.collect()
            flow.learn()
            flow.publish()
