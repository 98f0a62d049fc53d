"""Which sequences are computed in passes of their own because of a prefix they share.

Owns the decision where sharing a prefix saves work. Knows token ids, lengths and two measured costs; no model.

A pass computes one prefix once for all its sequences. All sequences of an optimiser step share the system prompt; those
of a group the task as well; forks of one trajectory everything up to the fork. A family of its own computes its longer
prefix once, at the price of further passes that are less full. Both sides are counted in tokens::

    cost of a family = tokens its passes compute + PASS_OVERHEAD_TOKENS a pass + PREFIX_OVERHEAD_TOKENS a pass with a prefix

and a family is split off exactly where that lowers the sum; a prefix is shared exactly where it saves more than it costs.
Below these costs sharing would be slower than computing the tokens again, so it is left. Candidates are the nodes of the
prefix tree of the step's sequences, decided from the leaves up.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotpot.learner.batches.arrangement import Packing, arrange, computed_tokens
from hotpot.learner.batches.batches import BatchSequence

PASS_OVERHEAD_TOKENS = 32
"""What a further pass costs, in tokens (measured: docs/segments.md)."""

PREFIX_OVERHEAD_TOKENS = 192
"""What computing a prefix apart costs in a pass, in tokens (measured: docs/segments.md)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """Sequences that are computed together; the first ``prefix`` tokens of all of them once in each pass."""

    members: Sequence[BatchSequence]
    prefix: int


def families(members: Sequence[BatchSequence], *, max_tokens: int, packing: Packing) -> list[Family]:
    """Return ``members``, dealt to families at the lowest cost found, each family in the members' order."""
    if not members:
        return []
    order = sorted(range(len(members)), key=lambda index: _key(members[index]))
    shared = [common_prefix([members[a], members[b]]) for a, b in itertools.pairwise(order)]
    planner = _Planner(members, order, shared, max_tokens, packing)
    return [planner.family(part) for part in planner.best(0, len(order))]


def common_prefix(members: Sequence[BatchSequence]) -> int:
    """Return how many leading tokens all ``members`` read, so that at least one token is left to each.

    0 for a single one: nothing would be saved.
    """
    if len(members) < 2:
        return 0
    first = members[0].sequence.tokens[: min(member.num_inputs for member in members) - 1]
    for member in members[1:]:
        differs = np.flatnonzero(first != member.sequence.tokens[: len(first)])
        if len(differs):
            first = first[: differs[0]]
    return len(first)


def _key(member: BatchSequence) -> bytes:
    """Return bytes that sort as the tokens do."""
    inputs: NDArray[np.int32] = member.sequence.tokens[: member.num_inputs]
    return inputs.astype(">u4").tobytes()


class _Planner:
    """The best split of members in order of their tokens; ``shared[i]`` is the common prefix of neighbours i, i + 1."""

    def __init__(
        self,
        members: Sequence[BatchSequence],
        order: Sequence[int],
        shared: Sequence[int],
        max_tokens: int,
        packing: Packing,
    ) -> None:
        self._members, self._order, self._shared = members, order, shared
        self._inputs = [members[index].num_inputs for index in order]
        self._max_tokens, self._packing = max_tokens, packing

    def best(self, begin: int, end: int) -> list[list[int]]:
        """Return families (lists of places in the order) of the places ``begin .. end``.

        Places that share more than all of them do are candidates for families of their own, the most sharing first.
        """
        together = list(range(begin, end))
        if end - begin < 2:
            return [together]
        common = min(self._shared[begin : end - 1])
        bounds = [begin, *(i + 1 for i in range(begin, end - 1) if self._shared[i] == common), end]
        apart: list[list[int]] = []
        cost = self._cost(together)
        for first, stop in itertools.pairwise(bounds):
            # Nothing below can save more than this, so most candidates need no look.
            if sum(self._shared[first : stop - 1]) - common * (stop - 1 - first) <= PREFIX_OVERHEAD_TOKENS:
                continue
            parts = self.best(first, stop)
            rest = [place for place in together if not first <= place < stop]
            left = self._cost(rest)
            if sum(self._cost(part) for part in parts) + left < cost:
                apart += parts
                together, cost = rest, left
        return [*apart, together] if together else apart

    def family(self, places: Sequence[int]) -> Family:
        """Return the family of ``places``, sharing a prefix if that pays."""
        members = [self._members[index] for index in sorted(self._order[place] for place in places)]
        prefix = self._prefix(places)
        pays = self._sum(places, prefix) < self._sum(places, 0)
        return Family(members=members, prefix=prefix if pays else 0)

    def _prefix(self, places: Sequence[int]) -> int:
        between = self._shared[places[0] : places[-1]]
        return min(between) if between else 0

    def _cost(self, places: Sequence[int]) -> int:
        if not places:
            return 0
        return min(self._sum(places, shared) for shared in {0, self._prefix(places)})

    def _sum(self, places: Sequence[int], prefix: int) -> int:
        lengths = [self._inputs[place] - prefix for place in places]
        passes = arrange(lengths, max_tokens=self._max_tokens - prefix, packing=self._packing)
        overhead = PASS_OVERHEAD_TOKENS + (prefix + PREFIX_OVERHEAD_TOKENS if prefix else 0)
        return computed_tokens(lengths, passes) + overhead * len(passes)
