"""Blocks: every one is free, kept or read; nobody's block is taken from them; the least recently used goes first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotpot.engine.embedded.blocks import BlockPool


def test_the_lowest_free_block_first_then_the_one_kept_longest() -> None:
    forgotten: list[int] = []
    pool = BlockPool(3, forgotten.append)
    assert [pool.take() for _ in range(4)] == [0, 1, 2, None]
    pool.release(2, keep=True)
    pool.release(0, keep=True)
    pool.release(1, keep=False)
    assert (pool.num_read, pool.num_idle, pool.available) == (0, 2, 3)
    assert pool.take() == 1
    pool.read(2)
    pool.release(2, keep=True)
    assert pool.take() == 0
    assert (forgotten, pool.evictions) == ([0], 1)
    pool.drop_idle()
    assert (pool.num_idle, pool.available, pool.take()) == (0, 1, 2)
    assert forgotten == [0]


def test_a_block_is_given_back_when_its_last_reader_goes() -> None:
    pool = BlockPool(1, lambda _: None)
    assert pool.take() == 0
    pool.read(0)
    assert pool.readers(0) == 2
    assert not pool.release(0, keep=True)
    assert pool.take() is None
    assert pool.release(0, keep=True)
    assert pool.readers(0) == 0
    with pytest.raises(KeyError):
        pool.release(0, keep=True)


class Pool(RuleBasedStateMachine):
    """Against a model that writes down who reads what."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: list[int] = []
        self.pool = BlockPool(5, self.forgotten.append)
        self.read: dict[int, int] = {}
        self.kept: list[int] = []

    @rule()
    def take(self) -> None:
        before = len(self.forgotten)
        block = self.pool.take()
        if block is None:
            assert len(self.read) == 5
            return
        assert block not in self.read
        if len(self.read) + len(self.kept) == 5:
            assert self.forgotten[before:] == [block] == [self.kept.pop(0)]
        else:
            assert len(self.forgotten) == before
            assert block not in self.kept
        self.read[block] = 1

    @precondition(lambda self: self.read or self.kept)
    @rule(data=st.data())
    def read_again(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([*self.read, *self.kept]))
        self.pool.read(block)
        self.read[block] = self.read.get(block, 0) + 1
        self.kept = [kept for kept in self.kept if kept != block]

    @precondition(lambda self: self.read)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        block = data.draw(st.sampled_from(list(self.read)))
        self.read[block] -= 1
        last = not self.read[block]
        assert self.pool.release(block, keep=keep) is last
        if last:
            del self.read[block]
            self.kept += [block] if keep else []

    @invariant()
    def every_block_is_one_thing(self) -> None:
        assert {
            block: self.pool.readers(block) for block in range(5) if self.pool.readers(block)
        } == self.read
        assert (self.pool.num_read, self.pool.num_idle) == (len(self.read), len(self.kept))
        assert self.pool.available == 5 - len(self.read)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
