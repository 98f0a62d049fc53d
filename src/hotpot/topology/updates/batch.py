"""What one update learns from: what was just collected, and what replay drew beside it.

Owns the joining of the two: which sequences enter, with which weight, against which baseline, and where each trajectory
came from. Holds records; learns and stores nothing.

Invariants: a trajectory stands in a batch once; a drawn trajectory is compared with its whole recorded group, members
that were not drawn included; what a time limit cut is never learned from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hotpot.experience import TrainingSequence, sequences
from hotpot.experience.replay import Drawn
from hotpot.learner import Member
from hotpot.types import EndReason, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateBatch:
    """The batch of ``update``.

    ``collected`` is everything the store accepted for it, ``source`` what the consumptions call that; ``drawn`` comes
    from replay, and ``events`` are the (kind, detail) that replay reports of the draw. ``aliases`` are earlier policy
    versions with the very weights that learn now, and the version those have now (a resume serves them under a new one):
    to the learner their tokens are of today's policy.
    """

    update: int
    collected: Sequence[Trajectory]
    source: str = "fresh"
    drawn: Sequence[Drawn] = ()
    events: Sequence[tuple[str, Mapping[str, Any]]] = ()
    aliases: Mapping[int, int] = field(default_factory=dict)

    @property
    def trajectories(self) -> list[Trajectory]:
        """All of them: collected, then drawn."""
        return [*self.collected, *(drawn.trajectory for drawn in self.drawn)]

    @property
    def sources(self) -> dict[str, str]:
        """Where each trajectory came from, by its id."""
        fresh = {trajectory.row.trajectory_id: self.source for trajectory in self.collected}
        return fresh | {drawn.trajectory_id: drawn.source for drawn in self.drawn}

    def sequences(self) -> list[TrainingSequence]:
        """Return every segment of every trajectory to learn from; drawn ones are marked and weighed."""
        fresh = [
            self._renamed(part) for trajectory in learnable(self.collected) for part in sequences(trajectory)
        ]
        drawn = [
            replace(part, weight=drawn.weight * part.weight, replayed=True)
            for drawn in self.drawn
            for part in sequences(drawn.trajectory)
        ]
        return fresh + drawn

    def _renamed(self, part: TrainingSequence) -> TrainingSequence:
        if not self.aliases:
            return part
        versions = part.token_policy_version.copy()
        for old, new in self.aliases.items():
            versions[part.token_policy_version == old] = new
        return replace(part, token_policy_version=versions.astype(np.int32))

    def peers(self) -> list[Member]:
        """Return the members of drawn trajectories' groups that are not in the batch, each once."""
        known = {trajectory.row.trajectory_id for trajectory in self.trajectories}
        found = {
            peer.trajectory_id: Member(
                trajectory_id=peer.trajectory_id, group_id=peer.group_id, reward=peer.reward
            )
            for drawn in self.drawn
            for peer in drawn.peers
            if peer.trajectory_id not in known
        }
        return list(found.values())


def learnable(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return those that no time limit cut: how long a tool or a machine took is no reward of 0."""
    return [t for t in trajectories if t.row.end_reason != EndReason.MAX_SECONDS]
