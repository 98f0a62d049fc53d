"""What stands between actors and learner, as a topology sees it: a queue of groups, or whole batches side by side.

Owns the common face of :class:`~hotpot.topology.collecting.queue.TrajectoryQueue` (``async``) and
:class:`~hotpot.topology.collecting.batches.BatchesAhead` (``batched_async``). Decides nothing itself. And what the record is told of a
batch that was taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hotpot.topology.collecting.batches import BatchesAhead
from hotpot.topology.collecting.discards import Discard
from hotpot.topology.collecting.groups import CompleteGroup
from hotpot.topology.collecting.queue import Taken, TrajectoryQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where collecting and learning stand: groups ``under_way`` and the trajectories ``expected`` of them, the learner's
    policy version (without what it is ``learning``), and the one that is served. ``more`` units of the groups under way are
    about to be begun."""

    under_way: int
    expected: int
    policy_version: int
    served_version: int
    learning: bool
    more: int = 0


class Line(Protocol):
    """Where whole groups wait for the learner."""

    @property
    def unit(self) -> int:
        """Groups that are begun together."""

    @property
    def in_order(self) -> bool:
        """Whether what was begun first is taken first, so that one group that rests holds up all."""

    @property
    def depth(self) -> int:
        """Trajectories that wait."""

    def hold(self, standing: Standing) -> str | None:
        """Return, in words, why no further :attr:`unit` may be begun now; None where one may."""

    def begin(self, groups: Sequence[str]) -> None:
        """Hear that ``groups`` were begun."""

    def put(self, group: CompleteGroup, policy_version: int) -> tuple[Discard, ...]:
        """Take a complete group; return what goes for it. ``policy_version``: the learner's."""

    def empty(self, group: str) -> None:
        """Hear that a group ended with nothing."""

    def take(self, now_s: float, policy_version: int) -> Taken:
        """Ask for a batch while the learner is idle."""

    def learned(self) -> None:
        """Hear that the batch taken last is learned, or that there was nothing in it to learn from."""

    def gauges(self) -> Mapping[str, float]:
        """Return how much waits, by the names of metrics."""


class StreamLine:
    """Groups one by one, through the queue."""

    unit = 1
    in_order = False

    def __init__(self, queue: TrajectoryQueue) -> None:
        self.queue = queue

    @property
    def depth(self) -> int:
        """Trajectories that wait."""
        return self.queue.depth

    def hold(self, standing: Standing) -> str | None:
        """As the queue says."""
        return self.queue.hold(
            under_way=standing.under_way,
            expected=standing.expected,
            policy_version=standing.policy_version,
            served_version=standing.served_version,
            learning=standing.learning,
        )

    def begin(self, groups: Sequence[str]) -> None:
        """Nothing hangs on which groups are under way."""

    def put(self, group: CompleteGroup, policy_version: int) -> tuple[Discard, ...]:
        """As the queue does."""
        return self.queue.put(group, policy_version=policy_version)

    def empty(self, group: str) -> None:
        """Nobody waits for it."""

    def take(self, now_s: float, policy_version: int) -> Taken:
        """As the queue does."""
        return self.queue.take(now_s, policy_version=policy_version)

    def learned(self) -> None:
        """Nothing hangs on it."""

    def gauges(self) -> Mapping[str, float]:
        """As the queue counts."""
        return self.queue.gauges()


class BatchLine:
    """Whole batches of ``unit`` groups."""

    in_order = True

    def __init__(self, batches: BatchesAhead, *, unit: int) -> None:
        self._batches, self.unit = batches, unit

    @property
    def depth(self) -> int:
        """Trajectories that wait."""
        return self._batches.depth

    def hold(self, standing: Standing) -> str | None:
        """Only batches count, and they are begun one by one."""
        return self._batches.hold() or ("a batch is about to be begun" if standing.more else None)

    def begin(self, groups: Sequence[str]) -> None:
        """A batch of these."""
        self._batches.begin(groups)

    def put(self, group: CompleteGroup, policy_version: int) -> tuple[Discard, ...]:
        """Nothing ever goes: there is room for what was begun."""
        del policy_version
        self._batches.end(group.group_id, group)
        return ()

    def empty(self, group: str) -> None:
        """Its batch is without it."""
        self._batches.end(group, None)

    def take(self, now_s: float, policy_version: int) -> Taken:
        """The batch that was begun first, once it is whole; such as nothing came of are left out."""
        del now_s, policy_version
        while (taken := self._batches.take()) is not None:
            if taken.groups:
                return taken
            self._batches.learned()
        return Taken()

    def learned(self) -> None:
        """The next one may be taken, and another begun."""
        self._batches.learned()

    def gauges(self) -> Mapping[str, float]:
        """Only how much waits: no batch is late, or left out."""
        return {"queue/depth": self.depth}


def told(taken: Taken) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of an update whose batch is ``taken``: that it was late, where it was."""
    if not taken.late:
        return []
    detail = {"waited_s": round(taken.waited_s, 3), "groups": len(taken.groups), "missing": taken.missing}
    return [("batch_late", detail)]
