"""What stands between plans and their trajectories: the state of one collection, and the places of actor groups.

Owns records only; the collector moves them. Knows no engine and no environment.

Invariant: each plan is in one place: waiting, leased (on the ledger, not begun), live (begun), finished (its trajectory not
taken yet) or ended.
"""

from collections import deque
from collections.abc import Collection as AnyOf
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hotpot.ids import episode_id
from hotpot.rollout.attempts import Try
from hotpot.rollout.loop import Episode, EpisodeRules
from hotpot.rollout.tasks import EpisodePlan
from hotpot.types import Purpose, Trajectory


@dataclass(slots=True, eq=False)
class Live:
    """An episode under way. ``request_id``: its request that is in the engine, empty where none is, and ``since_s`` how long
    the engine had worked when that went in. ``in_line``: its next request waits for a place."""

    episode: Episode
    one: Try
    group: str
    request_id: str = ""
    since_s: float = 0.0
    in_line: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended that brought no trajectory, or that did (``reason`` is empty then).

    ``given_up``: its episode will bring nothing any more. ``cut``: nothing was wrong with it.
    """

    attempt_id: str
    plan: EpisodePlan
    reason: str = ""
    given_up: bool = False
    cut: bool = False

    @property
    def episode_id(self) -> str:
        """Id of its episode."""
        return episode_id(self.plan.issue, self.plan.sample, evaluation=self.plan.evaluation)


@dataclass(slots=True, kw_only=True, eq=False)
class Collection:
    """Plans of one purpose that are being run.

    ``waiting`` are not on the ledger yet, ``leased`` are and are not begun, ``live`` are those begun, by attempt. ``tries`` are
    those of all attempts begun, until they end or their trajectory is taken. ``ends`` are told by :meth:`take_ends`.
    """

    purpose: Purpose
    rules: Mapping[str, EpisodeRules]
    waiting: deque[Try] = field(default_factory=deque)
    leased: deque[Try] = field(default_factory=deque)
    live: dict[str, Live] = field(default_factory=dict)
    finished: list[Episode] = field(default_factory=list)
    taken: list[Trajectory] = field(default_factory=list)
    tries: dict[str, Try] = field(default_factory=dict)
    ends: list[AttemptEnd] = field(default_factory=list)

    @property
    def unfinished(self) -> bool:
        """Whether anything is still to come."""
        return bool(self.waiting or self.leased or self.live)

    @property
    def under_way(self) -> int:
        """Episodes that were given and have not ended: waiting, leased or live."""
        return len(self.waiting) + len(self.leased) + len(self.live)

    def take(self) -> list[Trajectory]:
        """Return the trajectories that came out since this was asked last, in order of finishing."""
        found, self.taken = self.taken, []
        for trajectory in found:
            self.tries.pop(trajectory.row.attempt_id, None)
        return found

    def take_ends(self) -> list[AttemptEnd]:
        """Return how attempts ended since this was asked last, in order."""
        found, self.ends = self.ends, []
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """How much an actor group may have at once: episodes under way, and of these requests in the engine."""

    group: str
    environments: int
    requests: int


def even_places(groups: Sequence[str], capacity: int) -> list[Places]:
    """Return places of ``groups`` that share ``capacity`` evenly, one for each at least."""
    shares = [capacity // len(groups) + (index < capacity % len(groups)) for index in range(len(groups))]
    return [
        Places(group=group, environments=max(share, 1), requests=max(share, 1))
        for group, share in zip(groups, shares, strict=True)
    ]


class Occupied:
    """Who takes which places. ``lines`` are episodes whose next request waits for one, by group, oldest first."""

    def __init__(self, places: Sequence[Places]) -> None:
        self.places = {one.group: one for one in places}
        self.episodes = dict.fromkeys(self.places, 0)
        self.requests = dict.fromkeys(self.places, 0)
        self.lines: dict[str, deque[tuple[Collection, Live]]] = {group: deque() for group in self.places}

    @property
    def capacity(self) -> int:
        """Episodes at once, of all groups."""
        return sum(one.environments for one in self.places.values())

    def free_group(self) -> str | None:
        """Return the group with most free places for an episode, the first among equals; None where there is none."""
        best, most = None, 0
        for group, one in self.places.items():
            free = one.environments - self.episodes[group]
            if free > most:
                best, most = group, free
        return best

    def has_request_place(self, group: str) -> bool:
        """Whether ``group`` may have one more request in the engine."""
        return self.requests[group] < self.places[group].requests


def of_episodes(tries: AnyOf[Try], episodes: AnyOf[str]) -> list[Try]:
    """Return those ``tries`` whose episode is named."""
    return [
        one
        for one in tries
        if episode_id(one.plan.issue, one.plan.sample, evaluation=one.plan.evaluation) in episodes
    ]
