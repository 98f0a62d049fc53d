"""Topology ``sync``: collect one batch on one policy, learn from it, publish, and again.

::

    task sampler ──plans──► rollout ⇄ engine ──trajectories──► store ──accepted──► learner ──weights──► engine
         ▲                                                              replay ──drawn──►│ ▲
         │                                                                 └──accepted───┼─┘ (once recorded)
         └───────────────────────────── next update ◄──── record, evaluate, checkpoint ◄─┘

One thread, and everything in it waits for everything else: generation while nothing learns, learning while nothing is
generated. Staleness of what was just collected is 0. Nothing hangs on the clock, so a deterministic run repeats bit for bit.
"""

from hotpot.topology.session import Session


def run_sync(session: Session) -> None:
    """Run updates until the recipe's number is reached or its time is over.

    Consumes tasks; produces trajectories, updates and policy versions. Waits for the engine (the rollout's deadline)
    and the disk; ends early by :class:`StopRequested`.
    """
    recipe = session.recipe
    while session.progress.done < recipe.topology.updates and not session.out_of_time():
        update = session.begin_update()
        batch = session.draw(session.collect(update))
        result = session.learn(batch)
        published = session.publish(update)
        session.record_update(result, batch, published)
        session.stop.check()
        session.due()
