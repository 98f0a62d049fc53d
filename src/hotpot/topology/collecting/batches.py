"""Whole batches, collected side by side and learned one by one: what ``batched_async`` waits for.

::

    begin(groups of a batch) ──► under way ──end(group), for each──► whole ──take──► learning ──learned()──► gone

Owns which groups belong to which batch and how many batches there are at once. A pure state machine without a clock. Knows
no learner and no rollout.

Invariants: at most ``ahead`` batches are under way or whole beside the one that is being learned, so that with 0 nothing is
collected while something is learned; batches are learned in the order in which they were begun, one at a time; a group
belongs to one batch.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from hotpot.topology.collecting.groups import CompleteGroup
from hotpot.topology.collecting.queue import Taken


@dataclass(slots=True, eq=False)
class _Batch:
    out: set[str]
    came: list[CompleteGroup] = field(default_factory=list)


class BatchesAhead:
    """The batches of one run; ``ahead`` is topology.batches_ahead."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._batches: deque[_Batch] = deque()
        self._batch_of: dict[str, _Batch] = {}
        self._learning = False

    @property
    def depth(self) -> int:
        """Trajectories that wait, in whole batches and in such as lack groups yet."""
        return sum(len(group.trajectories) for batch in self._batches for group in batch.came)

    def gauges(self) -> dict[str, float]:
        """Return, by registered name, what the record is told of what waits."""
        return {"queue/depth": self.depth}

    def hold(self) -> str | None:
        """Return, in words, why no further batch may be begun now; None where one may."""
        if len(self._batches) + self._learning <= self._ahead:
            return None
        return (
            f"{len(self._batches)} batches are under way or wait{' while one is learned' if self._learning else ''} "
            f"(topology.batches_ahead = {self._ahead})"
        )

    def begin(self, groups: Collection[str]) -> None:
        """Begin the batch of ``groups``, by their ids. Raises ValueError where none may be begun, or a group is in one."""
        reason = self.hold()
        if reason is not None:
            raise ValueError(f"no further batch may be begun: {reason}")
        known = sorted(self._batch_of.keys() & set(groups))
        if known:
            raise ValueError(f"groups {known} belong to a batch already; a group is learned from once")
        batch = _Batch(out=set(groups))
        self._batches.append(batch)
        self._batch_of |= dict.fromkeys(groups, batch)

    def end(self, group: str, came: CompleteGroup | None) -> None:
        """Take the end of a group: what came of it, None where nothing did. Raises ValueError where it isn't under way."""
        batch = self._batch_of.pop(group, None)
        if batch is None:
            raise ValueError(
                f"group {group} is in no batch that is under way; it was never begun, or ended before"
            )
        batch.out.remove(group)
        if came is not None:
            batch.came.append(came)

    def take(self) -> Taken | None:
        """Return the batch that was begun first, once it is whole and nothing is being learned; else None.

        It is without groups where nothing came of any. From here on it counts as being learned, until :meth:`learned`.
        """
        if self._learning or not self._batches or self._batches[0].out:
            return None
        self._learning = True
        return Taken(groups=tuple(self._batches.popleft().came))

    def learned(self) -> None:
        """The batch taken last is learned, or was found to hold nothing to learn from."""
        self._learning = False
