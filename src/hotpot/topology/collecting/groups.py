"""Groups of episodes: which are under way, which are complete, whose tail is cut.

::

    plans ──issue──► open ──turn(finished, lost)──► complete (what counts, in order of finishing) ──► queue
                                                ├──► cut: episodes still under way in a group that has enough
                                                └──► surplus: finished, and not counted

Owns the state of every open group. A pure state machine: it runs, stores and cuts nothing, and hangs on no clock. Knows no
queue and no learner.

Invariants:

- a group is complete once each of its episodes has ended, or as many as wanted have finished; never waits for one member:
  what is lost just lacks, and a group in which nothing finished ends empty;
- which count: those of earlier turns first, of one turn those of the lowest sample number. No more than wanted count;
- each episode of a group counts, is surplus, is lost or is cut: one of them, once.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from hotpot.ids import episode_id, group_id
from hotpot.rollout import EpisodePlan
from hotpot.types import Trajectory

CUT = "cut: its group has enough"
"""Reason, on the ledger, of an attempt whose group went without it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompleteGroup:
    """A group that nothing is added to any more.

    ``trajectories`` are those that count, forks with their root, in order of finishing; ``arrivals`` gives each its place
    in that order over all groups. ``issued`` episodes; ``lost`` ended without a trajectory, ``cut`` were under way.
    """

    group_id: str
    trajectories: tuple[Trajectory, ...]
    arrivals: tuple[int, ...]
    issued: int
    lost: int = 0
    cut: int = 0

    @property
    def num_sampled_tokens(self) -> int:
        """Sampled tokens of what counts."""
        return sum(trajectory.row.num_sampled_tokens for trajectory in self.trajectories)


def in_order(groups: Iterable[CompleteGroup]) -> tuple[Trajectory, ...]:
    """Return the trajectories of ``groups`` in order of finishing over all of them."""
    pairs = [pair for group in groups for pair in zip(group.arrivals, group.trajectories, strict=True)]
    return tuple(trajectory for _, trajectory in sorted(pairs, key=lambda pair: pair[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """What a turn came to. ``complete`` groups in order of issue; ``empty`` are groups that ended with nothing; ``cut`` are
    episodes whose attempts the caller drops before the next turn, with reason :data:`CUT`; ``surplus`` is stored and enters
    no group: it is discarded."""

    complete: tuple[CompleteGroup, ...] = ()
    empty: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    surplus: tuple[Trajectory, ...] = ()


@dataclass(slots=True)
class GroupCounts:
    """Episodes since the beginning by what became of them, and groups that ended empty. ``finished`` are those that count;
    ``issued`` is the sum of the others and of what is under way. Trajectories that came for no open group are ``late``."""

    issued: int = 0
    finished: int = 0
    surplus: int = 0
    lost: int = 0
    cut: int = 0
    late: int = 0
    empty_groups: int = 0


@dataclass(slots=True, eq=False)
class _Open:
    """A group under way: ``samples`` of its episodes, those that are ``out``, what counts of it so far (with its arrival)."""

    samples: dict[str, int]
    out: dict[str, None]
    found: list[tuple[int, Trajectory]] = field(default_factory=list)
    finished: int = 0
    lost: int = 0

    def end(self, episode: str) -> None:
        if episode not in self.out:
            raise ValueError(
                f"episode {episode} isn't under way in its group; it was never issued, or ended before"
            )
        del self.out[episode]


class Groups:
    """The open groups of a run; ``wanted`` is how many episodes of each count (rollout.samples_per_task)."""

    def __init__(self, wanted: int) -> None:
        self.counts = GroupCounts()
        self._wanted = wanted
        self._open: dict[str, _Open] = {}
        self._group_of: dict[str, str] = {}
        self._arrivals = 0

    @property
    def under_way(self) -> tuple[str, ...]:
        """Ids of the open groups, in order of issue."""
        return tuple(self._open)

    def standing(self, resting: Collection[str] = ()) -> tuple[int, int]:
        """Return how many groups are under way, and how many episodes of open groups have finished or may still come to count;
        without episodes that are ``resting``, and groups of which nothing else is out."""
        groups = expected = 0
        for group in self._open.values():
            out = len(group.out)
            if resting:
                out -= sum(episode in resting for episode in group.out)
            groups += out > 0
            expected += min(self._wanted, group.finished + out)
        return groups, expected

    def issue(self, plans: Iterable[EpisodePlan]) -> None:
        """Open the groups of ``plans``: all episodes of a task issue come in one call, in order of their samples.

        Raises ValueError where a group is open already, or an episode is planned twice.
        """
        opened: dict[str, dict[str, int]] = {}
        for plan in plans:
            name = group_id(plan.issue, evaluation=plan.evaluation)
            episode = episode_id(plan.issue, plan.sample, evaluation=plan.evaluation)
            episodes = opened.setdefault(name, {})
            if name in self._open or episode in episodes:
                raise ValueError(
                    f"episode {episode} of group {name} was issued before; an issue number is used once"
                )
            episodes[episode] = plan.sample
        for name, episodes in opened.items():
            self._open[name] = _Open(samples=episodes, out=dict.fromkeys(episodes))
            self._group_of |= dict.fromkeys(episodes, name)
            self.counts.issued += len(episodes)

    def turn(self, finished: Sequence[Trajectory] = (), lost: Collection[str] = ()) -> Turned:
        """Take what one turn of the rollout brought: trajectories that the store accepted (all of an episode in one turn),
        in order, and the ids of episodes that ended without one: given up, quarantined, or cut by someone else.

        What comes for a group that isn't open is surplus. Raises ValueError where an episode isn't under way in its group.
        """
        came: dict[str, dict[str, list[tuple[int, Trajectory]]]] = {}
        surplus: list[Trajectory] = []
        for trajectory in finished:
            row = trajectory.row
            if row.group_id in self._open:
                parts = came.setdefault(row.group_id, {}).setdefault(row.episode_id, [])
                parts.append((self._arrivals, trajectory))
                self._arrivals += 1
            else:
                surplus.append(trajectory)
        self.counts.late += len(surplus)
        for name, episodes in came.items():
            surplus += self._finish(self._open[name], episodes)
        for episode in lost:
            self._lose(episode)
        return self._close(surplus)

    def _finish(self, group: _Open, came: dict[str, list[tuple[int, Trajectory]]]) -> list[Trajectory]:
        """Take the episodes of a group that finished in this turn; return what does not count."""
        surplus: list[Trajectory] = []
        for episode in came:
            group.end(episode)
        for episode in sorted(came, key=group.samples.__getitem__):
            if group.finished < self._wanted:
                group.finished += 1
                group.found += came[episode]
                self.counts.finished += 1
            else:
                surplus += [trajectory for _, trajectory in came[episode]]
                self.counts.surplus += 1
        group.found.sort(key=lambda one: one[0])
        return surplus

    def _lose(self, episode: str) -> None:
        name = self._group_of.get(episode)
        if name is None:
            return
        self._open[name].end(episode)
        self._open[name].lost += 1
        self.counts.lost += 1

    def _close(self, surplus: Sequence[Trajectory]) -> Turned:
        """Close the groups that are complete now."""
        complete, empty, cut = [], [], []
        for name, group in list(self._open.items()):
            if group.out and group.finished < self._wanted:
                continue
            del self._open[name]
            for episode in group.samples:
                del self._group_of[episode]
            cut += list(group.out)
            self.counts.cut += len(group.out)
            if group.found:
                complete.append(_completed(name, group))
            else:
                empty.append(name)
                self.counts.empty_groups += 1
        return Turned(complete=tuple(complete), empty=tuple(empty), cut=tuple(cut), surplus=tuple(surplus))


def _completed(name: str, group: _Open) -> CompleteGroup:
    return CompleteGroup(
        group_id=name,
        trajectories=tuple(trajectory for _, trajectory in group.found),
        arrivals=tuple(arrival for arrival, _ in group.found),
        issued=len(group.samples),
        lost=group.lost,
        cut=len(group.out),
    )
