"""Contexts in blocks: whatever comes after whatever, a row's blocks hold its own tokens, computed by the weights now serving."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from hotpot.engine.embedded.blocks import BLOCK_TOKENS as B
from hotpot.engine.embedded.memory import ContextMemory, Placement, Wait, num_blocks_of
from hotpot.engine.embedded.prefixes import PrefixIndex, chain

Tokens = NDArray[np.int32]


def tokens(*parts: tuple[int, int]) -> Tokens:
    """``count`` times ``value``, for each (value, count)."""
    return np.concatenate([np.full(count, value, np.int32) for value, count in parts])


def make_memory(rows: int = 4, blocks: int = 20, share_from: int = 2) -> ContextMemory:
    return ContextMemory(num_rows=rows, num_blocks=blocks, max_tokens=6 * B, share_from=share_from, root="0")


def run(memory: ContextMemory, row: int, context: Tokens) -> Placement:
    """Place a context and say that all of it is computed."""
    placed = memory.place(row, context)
    assert isinstance(placed, Placement)
    memory.seal(row, context, len(context))
    return placed


# The index -----------------------------------------------------------------------------------------------------------


def test_a_context_is_found_as_far_as_it_is_the_same() -> None:
    index = PrefixIndex("0")
    context = tokens((1, B), (2, B), (3, 10))
    first = index.add(7, index.root, context[:B])
    assert first is not None
    second = index.add(8, first, context[B : 2 * B])
    assert second is not None
    index.add(9, second, context[2 * B :])
    found = index.find(context, len(context) - 1)
    assert [node.block for node in found.nodes] == [7, 8]
    assert (found.part, found.part_tokens, found.num_tokens) == (9, 9, 2 * B + 9)
    other = index.find(tokens((1, B), (2, 5), (9, B)), 2 * B)
    assert ([node.block for node in other.nodes], other.part, other.part_tokens) == ([7], 8, 5)
    assert index.find(tokens((2, B), (1, B)), 2 * B).num_tokens == 0
    # The same tokens after something else are not the same context.
    assert index.find(tokens((5, B), (2, B)), 2 * B).num_tokens == 0
    index.forget(7)
    assert index.find(context, len(context)).num_tokens == 0
    assert 8 not in index
    index.restart("1")
    assert index.add(8, second, context[:B]) is None


def no_hash(parent: bytes, piece: bytes) -> bytes:
    return b"same"


def short_hash(parent: bytes, piece: bytes) -> bytes:
    return chain(parent, piece)[:1]


PIECES = st.lists(st.integers(0, 2), min_size=1, max_size=5)


@pytest.mark.parametrize("hasher", [chain, short_hash, no_hash])
@given(known=st.lists(PIECES, max_size=12), asked=st.lists(PIECES, min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_tokens_decide_whatever_the_hash_says(
    hasher: Callable[[bytes, bytes], bytes], known: list[list[int]], asked: list[list[int]]
) -> None:
    index = PrefixIndex("0", hasher)
    holds: dict[int, tuple[int, ...]] = {}
    fresh = iter(range(1000))
    for pieces in known:
        node = index.root
        for end in range(1, len(pieces) + 1):
            block = next(fresh)
            placed = index.add(block, node, np.full(B, pieces[end - 1], np.int32))
            if placed is None:
                break
            holds.setdefault(placed.block, tuple(pieces[:end]))
            node = placed
    for pieces in asked:
        found = index.find(tokens(*((piece, B) for piece in pieces)), len(pieces) * B)
        for end, held in enumerate(found.nodes, start=1):
            assert holds[held.block] == tuple(pieces[:end])
        if hasher is chain:
            longest = max(
                (end for end in range(len(pieces) + 1) if not end or tuple(pieces[:end]) in holds.values()),
            )
            assert len(found.nodes) == longest


# Placing -------------------------------------------------------------------------------------------------------------


SHORT = st.lists(st.sampled_from([0, 1, 255, 256, 65_536, 2**31 - 1]), min_size=1, max_size=5)


@given(known=st.lists(SHORT, max_size=12), gone=st.sets(st.integers(0, 11)), asked=SHORT)
def test_of_all_parts_the_one_that_agrees_longest_is_found(
    known: list[list[int]], gone: set[int], asked: list[int]
) -> None:
    index = PrefixIndex("0")
    held: dict[int, list[int]] = {}
    for block, part in enumerate(known):
        node = index.add(block, index.root, np.array(part, dtype=np.int32))
        if node is not None and node.block == block:
            held[block] = part
    for block in gone:
        index.forget(block)
        held.pop(block, None)

    def agrees(part: list[int]) -> int:
        pairs = zip(part, asked, strict=False)
        return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(part), len(asked)))

    found = index.find(np.array(asked, dtype=np.int32), len(asked))
    assert found.part_tokens == max((agrees(part) for part in held.values()), default=0)
    assert found.part is None if not found.part_tokens else agrees(held[found.part or 0]) == found.part_tokens


def test_a_session_goes_on_where_its_blocks_lie() -> None:
    memory = make_memory()
    context = tokens((1, B), (2, 20))
    run(memory, 0, context)
    before = memory.table[0, :2].tolist()
    memory.release(0)
    longer = np.concatenate([context, tokens((3, 50))])
    placed = memory.place(1, longer)
    assert placed == Placement(len(context), ())
    assert memory.table[1, :2].tolist() == before
    assert memory.count[1] == num_blocks_of(len(longer))


def test_what_others_read_is_copied_if_short_and_read_with_them_if_long() -> None:
    context = tokens((1, B), (2, B), (3, B), (4, 5))
    for share_from, expected in ((3, 0), (4, 3)):
        memory = make_memory(share_from=share_from)
        run(memory, 0, context)
        placed = memory.place(1, np.concatenate([context, tokens((5, 2))]))
        assert isinstance(placed, Placement)
        assert placed.reused == len(context)
        # The part at the end is being written by its owner: copied in any case.
        assert len(placed.copies) == expected + 1
        assert (memory.table[0, :3] == memory.table[1, :3]).all() == (expected == 0)
        assert memory.table[0, 3] != memory.table[1, 3]


def test_who_begins_alike_waits_for_who_computes_it() -> None:
    memory = make_memory(share_from=9)
    context = tokens((1, B), (2, 20))
    assert memory.place(0, context) == Placement(0, ())
    assert memory.place(1, context) == Wait(0)
    assert memory.place(1, tokens((1, B), (9, B))) == Wait(0)
    assert memory.place(1, tokens((9, B))) == Placement(0, ())
    memory.seal(0, context, len(context))
    placed = memory.place(2, context)
    assert isinstance(placed, Placement)
    assert placed.reused == len(context) - 1


def test_room_is_left_for_those_that_grow_and_nothing_is_taken_where_there_is_none() -> None:
    memory = make_memory(blocks=6)
    run(memory, 0, tokens((1, 3 * B)))
    assert memory.place(1, tokens((2, 3 * B)), headroom=1) == Wait(None)
    assert (memory.pool.num_read, memory.pool.available) == (3, 3)
    assert isinstance(memory.place(1, tokens((2, 3 * B))), Placement)
    assert not memory.grow(0)
    memory.release(1)
    assert memory.grow(0)
    assert memory.count[0] == 4


# Interleavings -------------------------------------------------------------------------------------------------------

WORDS = [tokens((1, B)), tokens((1, B - 1), (2, 1)), tokens((3, 7)), tokens((2, 2 * B))]


class Interleavings(RuleBasedStateMachine):
    """Rows of shared, diverging and nearly equal contexts against a store that knows what was computed for each token.

    What stands for a token's keys and values is the whole context up to it, and the weights that computed it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory = make_memory(rows=4, blocks=14)
        self.version = 0
        self.store: dict[tuple[int, int], tuple[int, bytes]] = {}
        self.rows: dict[int, Tokens] = {}
        self.cached: dict[int, int] = {}
        self.stale: set[int] = set()

    @precondition(lambda self: len(self.rows) < 4)
    @rule(
        words=st.lists(st.sampled_from(range(len(WORDS))), min_size=1, max_size=4), headroom=st.integers(0, 3)
    )
    def place(self, words: list[int], headroom: int) -> None:
        row = min(set(range(4)) - set(self.rows))
        context = np.concatenate([WORDS[word] for word in words])[: 6 * B]
        available = self.memory.pool.available
        placed = self.memory.place(row, context, headroom=headroom)
        if isinstance(placed, Wait):
            assert self.memory.pool.available == available
            if placed.leader is None:
                assert available < num_blocks_of(len(context)) + headroom
            else:
                assert self.cached[placed.leader] < len(self.rows[placed.leader])
            return
        copied = {
            (target, offset): self.store[source, offset]
            for source, target in placed.copies
            for offset in range(B)
            if (source, offset) in self.store
        }
        self.store |= copied
        self.rows[row], self.cached[row] = context, placed.reused
        assert placed.reused < len(context)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(1, 3 * B))
    def compute(self, data: st.DataObject, count: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        context, begin = self.rows[row], self.cached[row]
        end = min(begin + count, len(context))
        for position in range(begin, end):
            block = int(self.memory.table[row, position // B])
            assert self.memory.pool.readers(block) == 1, "a block that others read is written"
            self.store[block, position % B] = (self.version, context[: position + 1].tobytes())
        self.cached[row] = end
        if end == len(context):
            self.memory.seal(row, context, end)
        else:
            self.memory.computed(row, context, end)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def compute_all(self, data: st.DataObject) -> None:
        self.compute(data, 6 * B)

    @precondition(lambda self: any(self.cached[row] == len(self.rows[row]) < 6 * B for row in self.rows))
    @rule(data=st.data(), token=st.integers(1, 3))
    def sample(self, data: st.DataObject, token: int) -> None:
        ready = [row for row in sorted(self.rows) if self.cached[row] == len(self.rows[row]) < 6 * B]
        row = data.draw(st.sampled_from(ready))
        if self.cached[row] >= self.memory.count[row] * B and not self.memory.grow(row):
            assert self.memory.pool.available == 0
            return
        self.rows[row] = np.concatenate([self.rows[row], np.array([token], np.int32)])

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), whole=st.booleans())
    def leave(self, data: st.DataObject, whole: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        if whole:
            self.memory.seal(row, self.rows[row], self.cached[row])
        self.memory.release(row)
        del self.rows[row], self.cached[row]
        self.stale.discard(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        for block in self.memory.discard(row):
            for offset in range(B):
                self.store.pop((block, offset), None)
        del self.rows[row], self.cached[row]
        self.stale.discard(row)

    @rule()
    def publish(self) -> None:
        self.version += 1
        self.memory.restart(str(self.version))
        for row in list(self.rows):
            if self.cached[row] < len(self.rows[row]):
                self.memory.release(row)
                del self.rows[row], self.cached[row]
            else:
                self.stale.add(row)

    @invariant()
    def each_row_sees_its_own_context(self) -> None:
        for row, context in self.rows.items():
            for position in range(self.cached[row]):
                place = (int(self.memory.table[row, position // B]), position % B)
                version, upto = self.store[place]
                assert upto == context[: position + 1].tobytes()
                assert row in self.stale or version == self.version

    @invariant()
    def blocks_are_counted(self) -> None:
        used = {
            block for row in self.rows for block in self.memory.table[row, : self.memory.count[row]].tolist()
        }
        assert self.memory.pool.num_read == len(used)
        for row in self.rows:
            assert num_blocks_of(self.cached[row]) <= self.memory.count[row]


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_interleavings() -> None:
    run_state_machine_as_test(
        Interleavings, settings=settings(max_examples=250, stateful_step_count=50, deadline=None)
    )
