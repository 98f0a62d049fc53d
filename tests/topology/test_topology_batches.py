"""Whole batches side by side: how many, in which order, and learned once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.testing.records import make_trajectory
from hotpot.topology.collecting.batches import BatchesAhead
from hotpot.topology.collecting.groups import CompleteGroup


def complete(name: str) -> CompleteGroup:
    number = int(name[1:])
    trajectory = make_trajectory(issue=number, num_steps=1)
    return CompleteGroup(group_id=name, trajectories=(trajectory,), arrivals=(number,), issued=1)


def test_with_none_ahead_nothing_is_collected_while_something_is_learned() -> None:
    batches = BatchesAhead(0)
    batches.begin(["g0"])
    assert batches.take() is None
    with pytest.raises(ValueError, match="1 batches are under way or wait"):
        batches.begin(["g1"])
    batches.end("g0", complete("g0"))
    assert batches.depth == 1
    assert batches.take() is not None
    assert batches.depth == 0
    assert (
        batches.hold() == "0 batches are under way or wait while one is learned (topology.batches_ahead = 0)"
    )
    batches.learned()
    assert batches.hold() is None
    assert batches.take() is None


def test_a_group_is_in_one_batch_and_ends_once() -> None:
    batches = BatchesAhead(2)
    batches.begin(["g0", "g1"])
    with pytest.raises(ValueError, match=r"\['g1'\] belong to a batch already"):
        batches.begin(["g1", "g2"])
    batches.end("g1", None)
    with pytest.raises(ValueError, match="is in no batch"):
        batches.end("g1", complete("g1"))
    batches.end("g0", None)
    taken = batches.take()
    assert taken is not None
    assert not taken.is_batch


@given(st.integers(0, 3), st.integers(1, 3), st.data())
@settings(deadline=None, max_examples=60)
def test_batches_are_whole_in_order_and_never_too_many(ahead: int, size: int, data: st.DataObject) -> None:
    batches, begun, out, learned, learning = BatchesAhead(ahead), 0, list[str](), list[str](), False
    for _ in range(data.draw(st.integers(5, 40))):
        move = data.draw(st.sampled_from(["begin", "end", "take", "learned"]))
        outstanding = begun - len(learned) // size
        if move == "begin":
            assert (batches.hold() is None) == (outstanding + learning <= ahead)
            if batches.hold() is None:
                out += [f"g{begun * size + place}" for place in range(size)]
                batches.begin(out[-size:])
                begun += 1
        elif move == "end" and out:
            name = out.pop(data.draw(st.integers(0, len(out) - 1)))
            batches.end(name, complete(name))
        elif move == "take":
            first = [f"g{len(learned) + place}" for place in range(size)]
            taken = batches.take()
            assert (taken is not None) == (bool(outstanding) and not learning and not set(first) & set(out))
            if taken is not None:
                learning = True
                assert sorted(group.group_id for group in taken.groups) == sorted(first)
                learned += first
        elif move == "learned" and learning:
            batches.learned()
            learning = False
