"""Difficulty pools: what is known of each task of a finite list, and a draw that prefers where there is something to learn.

A pure state machine: it hears verdicts, in order, and draws; no clock, no randomness of its own, no record. Whoever
tells it the same verdicts in the same order gets the same state, bit for bit.

Evidence of a task is one weight per verdict. Each verdict heard multiplies them by ``decay`` and adds 1 to its own. A
task is *unseen* without evidence; *solved* or *unsolved* where that verdict holds at least :data:`CERTAIN` of the
weight; else *learnable*.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hotpot.rollout.draws import choose

CERTAIN = 0.9
"""Share of the evidence that a verdict of one kind must hold for the task to count as solved or unsolved."""


class Verdict(StrEnum):
    """What became of one group: all failed, all succeeded, or there was something to learn from."""

    FAILED = "failed"
    MIXED = "mixed"
    SOLVED = "solved"


class Pool(StrEnum):
    """Where a task stands."""

    UNSEEN = "unseen"
    UNSOLVED = "unsolved"
    LEARNABLE = "learnable"
    SOLVED = "solved"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """What became of one group, and of which task: by its id and the versions it ran on."""

    task_id: str
    env_version: str
    reward_version: str
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDraw:
    """A task drawn: its place in the list, the pool it stood in and the probability it was drawn with."""

    index: int
    pool: Pool
    probability: float


def verdict_of(*, num_solved: int, size: int, has_signal: bool) -> Verdict | None:
    """Return the verdict on a group of ``size`` episodes; None where fewer than two came to an end.

    Different rewards are something to learn from, whatever the environment says of success.
    """
    if size < 2:
        return None
    if has_signal or 0 < num_solved < size:
        return Verdict.MIXED
    return Verdict.SOLVED if num_solved else Verdict.FAILED


class Pools:
    """The pools over tasks 0..N-1 of a list, those of ``indices``; ``decay`` in [0, 1) is what older evidence keeps."""

    def __init__(self, indices: Sequence[int], *, decay: float) -> None:
        self._decay = decay
        self._evidence: dict[int, dict[Verdict, float]] = {}
        self._members: dict[Pool, list[int]] = {pool: [] for pool in Pool}
        self._members[Pool.UNSEEN] = sorted(indices)

    @property
    def sizes(self) -> dict[Pool, int]:
        """Tasks in each pool."""
        return {pool: len(members) for pool, members in self._members.items()}

    def pool(self, index: int) -> Pool:
        """Return the pool of a task."""
        evidence = self._evidence.get(index)
        if evidence is None:
            return Pool.UNSEEN
        certain = CERTAIN * sum(evidence.values())
        if evidence[Verdict.SOLVED] >= certain:
            return Pool.SOLVED
        return Pool.UNSOLVED if evidence[Verdict.FAILED] >= certain else Pool.LEARNABLE

    def hear(self, index: int, verdict: Verdict) -> None:
        """Take a verdict on a task into account."""
        before = self._members[self.pool(index)]
        del before[bisect_left(before, index)]
        old = self._evidence.get(index, dict.fromkeys(Verdict, 0.0))
        self._evidence[index] = {
            kind: weight * self._decay + (kind is verdict) for kind, weight in old.items()
        }
        insort(self._members[self.pool(index)], index)

    def draw(self, weights: Mapping[Pool, float], at: float, taken: Collection[int] = ()) -> PoolDraw:
        """Return the task that a chance ``at`` in [0, 1) falls on, none of ``taken`` while there are others.

        A task weighs what its pool weighs. Where every pool with tasks left weighs 0, all tasks left weigh the same.
        """
        gone = {pool: self._places(pool, taken) for pool in Pool}
        counts = [len(self._members[pool]) - len(gone[pool]) for pool in Pool]
        if not any(counts):
            return self.draw(weights, at)
        each = [weights[pool] for pool in Pool]
        if not any(weight * count for weight, count in zip(each, counts, strict=True)):
            each = [1.0] * len(counts)
        shares = [weight * count for weight, count in zip(each, counts, strict=True)]
        chosen = choose(shares, at)
        pool, total = list(Pool)[chosen], sum(shares)
        inside = (at * total - sum(shares[:chosen])) / shares[chosen]
        rank = min(max(int(inside * counts[chosen]), 0), counts[chosen] - 1)
        for place in gone[pool]:
            rank += place <= rank
        return PoolDraw(index=self._members[pool][rank], pool=pool, probability=each[chosen] / total)

    def _places(self, pool: Pool, taken: Collection[int]) -> list[int]:
        """Return the places in a pool of those of ``taken`` that stand in it, ascending."""
        members = self._members[pool]
        return sorted(bisect_left(members, index) for index in taken if self.pool(index) is pool)
