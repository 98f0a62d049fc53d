"""What waits between actors and learner: how much, how old, and when a batch of it is there.

::

    complete groups ──put──► waiting (whole groups, in order of completion) ──take──► a batch, or nothing yet
                      │                        │                               │
                      └── no room: overflow ───┴── too old: stale ─► Discard   └── late: smaller, skipped, or filled by replay

Owns the waiting groups and every decision about them: what goes where there is no room, what is too old to learn from, when
a batch is whole, and whether actors may begin another group. A pure state machine without a clock: times are given, in
seconds on any clock that doesn't go back. Knows no ledger; what it discards is recorded by whoever calls.

Invariants, at each moment: a trajectory that was put is taken, discarded or waiting, exactly one of them; no trajectory of a
batch is older than the bound; groups leave in the order in which they came; with ``drop_oldest`` and ``drop_newest`` no more
than ``depth`` trajectories wait, but where one batch alone has more (room for one whole batch there always is); with
``block`` nothing is ever dropped for want of room.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hotpot.config.sections import QueueSection
from hotpot.topology.collecting.discards import Discard, discards, oldest_version
from hotpot.topology.collecting.groups import CompleteGroup, in_order
from hotpot.types import DiscardReason, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Taken:
    """What the learner gets: whole groups, in order, without what was ``discarded`` of them.

    ``late``: the longest wait was over before a batch was whole. ``missing`` groups, or sampled tokens where batches are
    counted in those, are for replay to fill up. ``waited_s``: how long the learner has been waiting by now.
    """

    groups: tuple[CompleteGroup, ...] = ()
    discarded: tuple[Discard, ...] = ()
    late: bool = False
    missing: int = 0
    waited_s: float = 0.0

    @property
    def is_batch(self) -> bool:
        """Whether there is something to learn from."""
        return bool(self.groups or self.missing)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """All of the batch, in order of finishing."""
        return in_order(self.groups)


@dataclass(slots=True)
class QueueCounts:
    """Trajectories since the beginning: ``put`` = ``taken`` + ``discarded`` + those that wait. Batches by how they came."""

    put: int = 0
    taken: int = 0
    discarded: int = 0
    batches: int = 0
    late_batches: int = 0
    skipped_batches: int = 0


class TrajectoryQueue:
    """The queue of one run.

    ``batch_groups``: groups of a batch (where ``settings.batch_tokens`` is unset). ``group_size``: trajectories that a group
    is expected to bring. ``aliases``: earlier policy versions whose weights are served under another number now, and that
    number; a token of theirs is as old as that.
    """

    def __init__(
        self,
        settings: QueueSection,
        *,
        batch_groups: int,
        group_size: int,
        aliases: Mapping[int, int] | None = None,
    ) -> None:
        self.counts = QueueCounts()
        self._settings, self._batch_groups, self._group_size = settings, batch_groups, group_size
        self._aliases = dict(aliases or {})
        self._waiting: list[CompleteGroup] = []
        self._oldest: dict[str, int] = {}
        """The oldest policy version of each trajectory that waits: it is asked for whenever the learner is idle."""
        self._since_s: float | None = None
        self._seen = (0, 0)  # groups and sampled tokens that were put

    @property
    def depth(self) -> int:
        """Trajectories that wait."""
        return sum(len(group.trajectories) for group in self._waiting)

    @property
    def waiting(self) -> tuple[CompleteGroup, ...]:
        """The groups that wait, in order."""
        return tuple(self._waiting)

    def gauges(self) -> dict[str, float]:
        """Return, by registered name, what the record is told of the queue."""
        return {
            "queue/depth": self.depth,
            "queue/late_batches": self.counts.late_batches,
            "queue/skipped_batches": self.counts.skipped_batches,
        }

    def put(self, group: CompleteGroup, *, policy_version: int) -> tuple[Discard, ...]:
        """Take a group in; return what goes for it. ``policy_version``: the learner's, for the record's sake."""
        self.counts.put += len(group.trajectories)
        groups, tokens = self._seen
        self._seen = groups + 1, tokens + group.num_sampled_tokens
        self._waiting.append(group)
        for one in group.trajectories:
            self._oldest[one.row.trajectory_id] = oldest_version(one, self._aliases)
        gone: list[CompleteGroup] = []
        reason, place = DiscardReason.OVERFLOW_OLDEST, 0
        if self._settings.when_full == "drop_newest":
            reason, place = DiscardReason.OVERFLOW_NEWEST, -1
        while self._settings.when_full != "block" and self._overfull(place):
            gone.append(self._waiting.pop(place))
        return self._discard([t for one in gone for t in one.trajectories], reason, policy_version)

    def take(self, now_s: float, *, policy_version: int) -> Taken:
        """Ask for a batch while the learner is idle; the wait counts from the first time of asking after the last batch.

        ``policy_version`` is the learner's: what is staler for it than the bound is discarded, batch or not.
        """
        if self._since_s is None:
            self._since_s = now_s
        waited_s = now_s - self._since_s
        discarded = self._drop_stale(policy_version)
        size = self._batch_size(self._waiting)
        if size is not None:
            return self._hand_out(size, Taken(discarded=discarded, waited_s=waited_s))
        if waited_s < self._settings.longest_wait_s:
            return Taken(discarded=discarded, waited_s=waited_s)
        late = Taken(discarded=discarded, waited_s=waited_s, late=True)
        if self._settings.when_late == "replay":
            return self._hand_out(len(self._waiting), replace(late, missing=self._missing()))
        if self._settings.when_late == "smaller" and self._waiting:
            return self._hand_out(len(self._waiting), late)
        self._since_s = now_s
        self.counts.skipped_batches += 1
        return late

    def hold(
        self, *, under_way: int, expected: int, policy_version: int, served_version: int, learning: bool
    ) -> str | None:
        """Return, in words, why actors may not begin another group now; None where they may.

        ``under_way``: open groups, ``expected``: trajectories they may still bring (:class:`Groups`). ``policy_version``: the
        learner's, without the update it is ``learning``; ``served_version``: what actors sample from.
        """
        ahead = self._batches_ahead(under_way)
        room = self._settings.depth - self.depth - expected
        if self._settings.when_full == "block" and room < self._group_size and ahead >= 1:
            return (
                f"the queue is full: {self.depth} trajectories wait and up to {expected} are under way (queue.depth = "
                f"{self._settings.depth}, queue.when_full = 'block')"
            )
        bound = self._settings.max_staleness
        if self._settings.when_stale == "drop" or bound is None:
            return None
        staleness = policy_version - served_version + learning + math.floor(ahead)
        if staleness <= bound:
            return None
        return (
            f"what begins now would be {staleness} updates old when it is learned from (queue.max_staleness = {bound}, "
            f"queue.when_stale = 'wait'): {math.floor(ahead)} batches are ahead of it, the weights served are "
            f"{policy_version - served_version} updates behind the learner's{' and it is learning' if learning else ''}"
        )

    def _overfull(self, place: int) -> bool:
        """Whether the group at ``place`` must go: more wait than the depth, and without it a batch is still whole."""
        if self.depth <= self._settings.depth:
            return False
        rest = self._waiting[1:] if place == 0 else self._waiting[:place]
        return self._batch_size(rest) is not None

    def _batch_size(self, groups: list[CompleteGroup]) -> int | None:
        """Return how many of ``groups``, from the first, make a whole batch; None where they don't."""
        wanted = self._settings.batch_tokens
        if wanted is None:
            return self._batch_groups if len(groups) >= self._batch_groups else None
        tokens = 0
        for number, group in enumerate(groups, 1):
            tokens += group.num_sampled_tokens
            if tokens >= wanted:
                return number
        return None

    def _missing(self) -> int:
        wanted = self._settings.batch_tokens
        if wanted is None:
            return self._batch_groups - len(self._waiting)
        return wanted - sum(group.num_sampled_tokens for group in self._waiting)

    def _batches_ahead(self, under_way: int) -> float:
        """Return how many batches wait or are under way; of groups under way the mean size so far is taken (before any has
        come, each for a batch: fewer begin than might)."""
        wanted = self._settings.batch_tokens
        if wanted is None:
            return (len(self._waiting) + under_way) / self._batch_groups
        groups, tokens = self._seen
        mean = tokens / groups if groups else wanted
        return (sum(group.num_sampled_tokens for group in self._waiting) + under_way * mean) / wanted

    def _drop_stale(self, policy_version: int) -> tuple[Discard, ...]:
        bound = self._settings.max_staleness
        if bound is None:
            return ()
        stale: list[Trajectory] = []
        kept: list[CompleteGroup] = []
        for group in self._waiting:
            oldest = [self._oldest[one.row.trajectory_id] for one in group.trajectories]
            fresh = [policy_version - version <= bound for version in oldest]
            stale += [one for one, stays in zip(group.trajectories, fresh, strict=True) if not stays]
            if any(fresh):
                kept.append(group if all(fresh) else _part(group, fresh))
        self._waiting = kept
        return self._discard(stale, DiscardReason.STALE, policy_version)

    def _discard(
        self, gone: Sequence[Trajectory], reason: DiscardReason, policy_version: int
    ) -> tuple[Discard, ...]:
        self._forget(gone)
        self.counts.discarded += len(gone)
        return discards(gone, reason, policy_version=policy_version, aliases=self._aliases)

    def _hand_out(self, size: int, taken: Taken) -> Taken:
        groups, self._waiting = tuple(self._waiting[:size]), self._waiting[size:]
        self._since_s = None
        for group in groups:
            self._forget(group.trajectories)
            self.counts.taken += len(group.trajectories)
        self.counts.batches += 1
        self.counts.late_batches += taken.late
        return replace(taken, groups=groups)

    def _forget(self, left: Sequence[Trajectory]) -> None:
        for one in left:
            del self._oldest[one.row.trajectory_id]


def _part(group: CompleteGroup, keep: list[bool]) -> CompleteGroup:
    """Return a group without the trajectories that are not kept; there is one at least that is."""
    pairs = zip(group.trajectories, group.arrivals, keep, strict=True)
    kept = [(trajectory, arrival) for trajectory, arrival, stays in pairs if stays]
    return replace(
        group, trajectories=tuple(one for one, _ in kept), arrivals=tuple(arrival for _, arrival in kept)
    )
