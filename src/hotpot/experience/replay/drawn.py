"""What a draw hands out, as closed records."""

from dataclasses import dataclass
from typing import Any, Literal

from hotpot.types import Trajectory

Source = Literal["hot", "cold"]
"""Where a replayed trajectory came from; the same words stand in ``consumptions.source``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another member of a drawn trajectory's group: it counts in the group's baseline, not in the loss."""

    trajectory_id: str
    group_id: str
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """One replayed trajectory. ``weight`` multiplies its loss; the weights of a draw have the mean 1.

    ``peers`` are the other members of its group as recorded, whether drawn in the same draw or not.
    """

    trajectory_id: str
    group_id: str
    source: Source
    weight: float
    trajectory: Trajectory
    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draw:
    """What is replayed in one update, and what there is to say about it: (kind of event, detail) pairs.

    Kinds: ``consumed_again`` (the epoch's pool was empty, so trajectories repeat: ``num``, ``epoch_since_update``),
    ``replay_empty`` (nothing to replay at all), ``replay_short`` (fewer than wanted: quotas or too little history),
    ``replay_quota_unused`` (a quota names an environment that no trajectory is of, told once),
    ``replay_gone`` (``trajectories`` that the record no longer holds), ``replay_cache_failed`` (``reason``: the disk did
    not take a block; the draw was read from the lake and is whole).
    """

    items: tuple[Drawn, ...]
    events: tuple[tuple[str, dict[str, Any]], ...]
