"""Hot's bounds, the index's signal, blocks: rules that must hold for any history."""

import dataclasses
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.errors import StoreError
from hotpot.experience.replay.block import Block
from hotpot.experience.replay.flat import FlatBlock
from hotpot.experience.replay.hot import Hot, good, kept
from hotpot.experience.replay.index import SCHEMA, Index, lines_of
from hotpot.experience.replay.keys import id_keys
from hotpot.learner.estimators.advantages import Member, group_advantages
from hotpot.testing.records import make_group, make_trajectory

ROUNDS = st.lists(
    st.lists(st.tuples(st.floats(0.1, 5), st.integers(1, 400)), max_size=6), min_size=1, max_size=12
)


@settings(max_examples=150, deadline=None)
@given(history=ROUNDS, rounds=st.integers(1, 5), max_bytes=st.integers(1, 1500))
def test_what_stays_in_hot_hangs_on_the_history_not_on_the_path(history, rounds, max_bytes):
    lines = [
        (update, advantage, size, f"{update}.{number}")
        for update, entries in enumerate(history, 1)
        for number, (advantage, size) in enumerate(entries)
    ]

    def stays(entries, newest):
        updates, advantages, sizes, ids = (
            [np.array(column) for column in zip(*entries, strict=True)] if entries else [np.zeros(0, int)] * 4
        )
        keep = kept(
            updates, advantages.astype(float), id_keys(map(str, ids)), sizes.astype(np.int64),
            oldest=newest - rounds + 1, max_bytes=max_bytes,
        )  # fmt: skip
        return [entry for entry, stay in zip(entries, keep, strict=True) if stay]

    held: list = []
    for update in range(1, len(history) + 1):
        held = stays([*held, *(line for line in lines if line[0] == update)], update)
        assert sum(line[2] for line in held) <= max_bytes
        assert all(line[0] > update - rounds for line in held)
    assert sorted(held) == sorted(stays(lines, len(history)))
    # What went is older, or of the same round and no better, than everything that stayed.
    gone = [line for line in lines if line not in held and line[0] > len(history) - rounds]
    assert all((line[0], line[1]) <= (stay[0], stay[1]) for line in gone for stay in held)


def test_hot_holds_no_more_bytes_than_it_may():
    hot, index = Hot(rounds=4, max_bytes=60_000), Index()
    for update in range(1, 10):
        group = make_group(issue=update, size=8, rewards=(0.0, 1.0, 2.0, 3.0), prompt_tokens=40)
        places = index.extend(lines_of(update, group))
        best = np.flatnonzero(good(index.advantages[places], index.eligible[places], 0.5))
        hot.add(update, places[best], index.advantages[places[best]], Block.of([group[i] for i in best]))
        held = sum(block.rows.nbytes + block.steps.nbytes for block in hot.blocks())
        assert 0 < held <= hot.num_bytes <= 60_000
        assert set(index.updates[hot.places]) <= set(range(update - 3, update + 1))
    assert len(hot.places) == sum(len(block.keys) for block in hot.blocks())
    first = hot.places[:1]
    hot.discard(first)
    assert first[0] not in hot.places


def test_good_is_better_than_its_group_and_the_quantile():
    advantages = np.array([-1.0, 0.2, 0.4, 0.6, 0.8, 9.0])
    signal = np.array([True, True, True, True, True, False])
    assert good(advantages, signal, 0.0).tolist() == [False, True, True, True, True, False]
    assert good(advantages, signal, 0.5).tolist() == [False, False, True, True, True, False]
    assert not good(-advantages[1:], signal[1:], 0.0).any()


@settings(max_examples=100, deadline=None)
@given(
    groups=st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0 + 1e-9, -3.0, 1e6, 1e6 + 0.5]), min_size=1, max_size=6),
        min_size=1,
        max_size=6,
    ),
    split=st.integers(0, 36),
    random=st.randoms(),
)
def test_the_signal_is_the_learners_in_any_order_of_arrival(groups, split, random):
    trajectories = [
        make_trajectory(issue=issue, sample=sample, reward=reward, num_steps=1)
        for issue, rewards in enumerate(groups)
        for sample, reward in enumerate(rewards)
    ]
    members = [
        Member(trajectory_id=t.row.trajectory_id, group_id=t.row.group_id, reward=t.row.reward)
        for t in trajectories
    ]
    found = group_advantages(members, "group_mean")
    random.shuffle(trajectories)
    index = Index()
    index.extend(lines_of(1, trajectories[:split]))
    index.extend(lines_of(1, trajectories[split:]))
    for place, name in enumerate(index.ids.tolist()):
        advantage = found.by_trajectory[name]
        magnitude = max(1.0, *(abs(r) for r in groups[int(name.partition(".")[0])]))
        assert index.eligible[place] == (abs(advantage) > 1e-6 * magnitude)
        if index.eligible[place]:
            assert index.advantages[place] == pytest.approx(advantage)


@pytest.mark.slow
def test_the_index_takes_little_and_the_same_for_each():
    def lines(begin: int, count: int) -> pa.Table:
        numbers = np.arange(begin, begin + count)
        columns = {
            "trajectory_id": [f"{number // 8}.{number % 8}.0" for number in numbers],
            "group_id": [f"g{number // 8}" for number in numbers],
            "env": ["fake"] * count,
            "reward": (numbers % 2).astype(float),
            "success": numbers % 2 == 1,
            "num_tokens": numbers * 0 + 1000,
            "update": numbers // 128 + 1,
            "segment": numbers // 2048,
        }
        return pa.table(columns).cast(SCHEMA)

    index = Index()
    tracemalloc.start()
    try:
        index.extend(lines(0, 65_536))
        first = tracemalloc.get_traced_memory()[0]
        index.extend(lines(65_536, 65_536))
        second = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert second <= 2.1 * first
    assert second / 131_072 < 200
    assert index.eligible.all()
    assert index.places_of(id_keys(["77.3.0", "nothing"])).tolist() == [77 * 8 + 3, -1]
    assert len(index.peers(np.array([0, 5]))[1]) == 7
    with pytest.raises(StoreError, match="already"):
        index.extend(lines(100, 2))


def test_blocks_give_back_what_they_took():
    trajectories = [
        make_trajectory(issue=issue, num_steps=1 + issue, new_segment_at=1 if issue > 1 else None)
        for issue in range(5)
    ]
    whole = Block.of(trajectories)
    # Steps of several trajectories between each other, and one trajectory without all of its own.
    mixed = np.argsort(np.concatenate([np.arange(1 + issue) for issue in range(5)]), kind="stable")[:-1]
    arranged = Block.arranged(whole.rows, whole.steps.take(pa.array(mixed)))
    assert arranged.rows.column("trajectory_id").to_pylist() == [f"{issue}.0.0" for issue in range(4)]
    places = np.array([3, 0, 2])
    for found in (
        arranged.trajectories(places),
        FlatBlock.of(arranged).trajectories(places),
        whole.take(places).trajectories(np.arange(3)),
    ):
        for place, trajectory in zip(places, found, strict=True):
            original = trajectories[place]
            for one, two in [
                (trajectory.row, original.row),
                *zip(trajectory.steps, original.steps, strict=True),
            ]:
                for field in dataclasses.fields(one):
                    left, right = getattr(one, field.name), getattr(two, field.name)
                    np.testing.assert_array_equal(left, right)
                    assert type(left) is type(right)
    np.testing.assert_array_equal(whole.take(places).sizes(), whole.sizes()[places])
