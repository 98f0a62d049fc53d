"""Whether an update needs further groups, and why: dynamic sampling as in DAPO (arXiv:2503.14476), section 3.2.

::

    wanted groups ──► run ──► heard: which have signal ──► still missing and a round left? ──► run that many more

A pure state machine: it runs nothing. A group without signal has rewards that are all (almost) the same, fewer than two
members that ended, or none at all; it is replaced by a further task, and counted by its reason. Nothing is thrown away:
what has no signal is stored and in the groups' statistics as always; the learner leaves it out of the loss as always.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from hotpot.learner import Member, group_advantages
from hotpot.topology.updates.batch import learnable
from hotpot.types import Trajectory

NO_TRAJECTORY = "no_trajectory"
"""Reason of a group of which nothing came that can be learned from."""


class Refill:
    """The groups of one update: ``wanted`` with signal, in at most ``max_rounds`` rounds after the first (0: none)."""

    def __init__(self, wanted: int, *, max_rounds: int) -> None:
        self._wanted, self._max_rounds = wanted, max_rounds
        self._with_signal = 0
        self._issued: list[int] = []
        self._replaced: Counter[str] = Counter()

    @property
    def missing(self) -> int:
        """Groups to run now; 0 where there are enough with signal, or no round is left."""
        rounds_left = len(self._issued) <= self._max_rounds
        return self._wanted - self._with_signal if rounds_left else 0

    def hear(self, groups: Iterable[str], collected: Sequence[Trajectory]) -> None:
        """Take what became of the ``groups`` just run; ``collected`` are the trajectories that came of them."""
        wanted = dict.fromkeys(groups)
        members = [
            Member(trajectory_id=t.row.trajectory_id, group_id=t.row.group_id, reward=t.row.reward)
            for t in learnable(collected)
        ]
        reasons = {group.group_id: group.reason for group in group_advantages(members, "group_mean").groups}
        self._issued.append(len(wanted))
        for group in wanted:
            reason = reasons.get(group, NO_TRAJECTORY)
            if reason:
                self._replaced[reason] += 1
            else:
                self._with_signal += 1

    def report(self) -> dict[str, Any]:
        """Return what the record says of the update: groups wanted and had, those run in each round, those without
        signal by reason, and whether it was enough."""
        return {
            "wanted": self._wanted,
            "with_signal": self._with_signal,
            "issued": list(self._issued),
            "without_signal": dict(sorted(self._replaced.items())),
            "reached": self._with_signal >= self._wanted,
        }
