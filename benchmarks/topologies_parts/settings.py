"""What the runs of the benchmark of topologies are: the reference shape, the law of waiting, and each topology's settings.

Pure: starts nothing. ``SCALE`` makes the shape smaller, groups of actors and of tasks alike, so that small runs wait for the
same things.
"""

import os
from collections.abc import Mapping

CORES = 2
"""Cores that every run is given: the law of waiting is made for as many."""
SCALE = float(os.environ.get("SCALE", "1"))
UPDATES = int(os.environ.get("UPDATES", "200"))

RECIPE = "recipes/order_desk.toml"
GROUPS, ENVIRONMENTS = max(1, round(16 * SCALE)), 32
TASKS, SAMPLES = max(2, round(8 * SCALE)), 8
DEPTH = max(TASKS * SAMPLES, round(200 * SCALE))
OVER_ISSUE = 0.25
PUBLISH_EVERY = 10
MAX_STALENESS = 24
"""Above what a steady run comes to: 9 updates until the next publish, and 4 batches that are under way or wait."""

POLICY = ["warmstart.hidden_size=192", "warmstart.intermediate_size=576"]
"""The order desk's policy, twice its size (0.9 million parameters): beside the default's arithmetic what is recorded of a
trajectory weighs as much, which is the same work in each topology, and in the ideal it is none."""

WAIT = 29
"""Mean wait of a call, in what a core of this machine takes to generate and to learn one trajectory
(``topologies_parts/rates.py``): a faster machine waits for less, so that the synchronous loop is as idle on it."""


def law(trajectory_s: float) -> dict[str, str | float]:
    """Return how long each call of an environment waits, the reset too: half of them 0.6 of the mean, the longest ten times it."""
    mean_s = round(WAIT * trajectory_s, 3)
    return {"kind": "lognormal", "mean_s": mean_s, "sigma": 1.0, "longest_s": round(10 * mean_s, 2)}


LEARNING = [
    "learner.advantages=reinforce_pp", "learner.learning_rate=4e-5", "learner.decoupled=stale",
]  # fmt: skip
"""Every trajectory is learned from, whatever its group's rewards: an update costs as much at the end as at the start, and
the learner has something to do throughout. The rate is such that the order desk takes most of the updates to learn."""

COMMON = [
    "run.threads=1", "run.trace=false", "checkpoint.every_updates=0", "evaluation.every_updates=0",
    "evaluation.greedy=false", f"topology.updates={UPDATES}", f"rollout.tasks_per_batch={TASKS}",
    f"rollout.samples_per_task={SAMPLES}", f"engine.max_concurrency={GROUPS * ENVIRONMENTS}", *LEARNING,
]  # fmt: skip


def waiting(law: Mapping[str, str | float]) -> list[str]:
    """Return the settings of an environment that waits by ``law``, and of the actors that wait for it."""
    return [
        "env.kind=hotpot.testing.latency:ORDER_DESK",
        *(f"env.params.latency.{name}={value}" for name, value in law.items()),
        "actors.kind=threads", f"actors.groups={GROUPS}", f"actors.environments_per_group={ENVIRONMENTS}",
    ]  # fmt: skip


TOPOLOGIES: dict[str, list[str]] = {
    "sync": ["topology.kind=sync", f"actors.over_issue={OVER_ISSUE}"],
    "async": [
        "topology.kind=async", f"topology.publish_every_updates={PUBLISH_EVERY}", f"queue.depth={DEPTH}",
        "queue.when_full=block", f"queue.max_staleness={MAX_STALENESS}",
    ],
    "batched": [
        "topology.kind=batched_async", f"topology.publish_every_updates={PUBLISH_EVERY}", "topology.batches_ahead=3",
        f"actors.over_issue={OVER_ISSUE}",
    ],
}  # fmt: skip
"""``async`` issues no more episodes than there is room for, so that nothing is cut, dropped or generated in vain. With
``drop_oldest`` all 512 environments are at work, a quarter of what they bring finds no room, and the learner, who shares two
cores with them, is no faster for it."""
