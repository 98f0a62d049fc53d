"""Replay on a real store: what is eligible, hot and cold, epochs, restart, deletion, damage."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

import hotpot.experience.replay.cold
from hotpot.config import ReplaySection, StoreSection
from hotpot.errors import StoreError
from hotpot.experience import ExperienceStore, RunReader, open_run, read_trajectories, sequences
from hotpot.experience.replay import Replay
from hotpot.testing.records import make_group, make_leases, make_row, make_trajectory
from hotpot.types import ConsumptionRow, EndReason, GroupRow, Purpose, UpdateRow

VOCABULARY = 64
GROUP = (0.0, 1.0, 0.5, 1.0, 0.0)
SETTINGS = ReplaySection(share=0.5, hot_rounds=3)


class Run:
    """A run that learns groups, replays beside them and records it, as a topology does."""

    def __init__(self, folder: Path, settings: ReplaySection = SETTINGS, *, resume: bool = False) -> None:
        self.folder, self.settings = folder, settings
        self.store = ExperienceStore.open(
            folder, run_id="run", settings=StoreSection(), vocabulary_size=VOCABULARY, resume=resume
        )
        self.replay = self.reopened()

    def reopened(self, settings: ReplaySection | None = None, cache: str = "cache") -> Replay:
        return Replay.open(
            open_run(self.folder), settings or self.settings, seed=3, cache_folder=self.folder.parent / cache
        )

    def collect(self, update: int, num_groups: int = 2, *, rewards=GROUP, **keywords) -> list:
        fresh = [
            trajectory
            for number in range(num_groups)
            for trajectory in make_group(
                issue=10 * update + number,
                size=len(rewards),
                rewards=rewards,
                policy_version=update,
                **keywords,
            )
        ]
        self.keep(fresh)
        return fresh

    def keep(self, trajectories) -> None:
        self.store.ledger.lease(make_leases(trajectories))
        report = self.store.append(trajectories)
        assert not report.quarantined

    def record(self, update: int, fresh, draw=None) -> None:
        used = [(t.row.trajectory_id, "fresh", 1.0) for t in fresh]
        used += [(item.trajectory_id, item.source, item.weight) for item in (draw.items if draw else ())]
        self.store.record_update(
            make_row(UpdateRow, update=update),
            [make_row(GroupRow, group_id=name, update=update) for name in {t.row.group_id for t in fresh}],
            [],
            [
                make_row(ConsumptionRow, trajectory_id=name, update=update, source=source, weight=weight)
                for name, source, weight in used
            ],
        )

    def update(self, update: int, num_fresh: int = 6, **keywords):
        draw = self.replay.draw(update, num_fresh)
        fresh = self.collect(update, **keywords)
        self.record(update, fresh, draw)
        self.replay.add(update, fresh)
        return draw


def summary(draw) -> tuple:
    return (
        [(item.trajectory_id, item.source, item.weight, item.peers) for item in draw.items],
        draw.events,
    )


def ids(draw) -> list[str]:
    return [item.trajectory_id for item in draw.items]


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    yield run
    run.store.close()


def test_nothing_to_replay_is_an_event_and_share_0_is_off(run):
    draw = run.replay.draw(1, 6)
    assert (draw.items, draw.events) == ((), (("replay_empty", {"wanted": 6}),))
    off = run.reopened(ReplaySection())
    run.update(1)
    assert (off.draw(2, 100).items, off.draw(2, 100).events) == ((), ())


def test_only_training_trajectories_with_signal_are_drawn(run):
    learned = run.collect(1, 1, rewards=(0.0, 1.0, 0.5))
    equal = run.collect(2, 1, rewards=(1.0, 1.0))
    slow = [
        dataclasses.replace(
            t, row=dataclasses.replace(t.row, end_reason=EndReason.MAX_SECONDS.value, success=False)
        )
        for t in make_group(issue=90, size=2)
    ]
    run.keep(slow)
    held_out = [make_trajectory(issue=91, sample=s, reward=s, purpose=Purpose.EVALUATION) for s in range(2)]
    run.keep(held_out)
    never_learned = run.collect(5, 1)
    run.record(1, [*learned, *equal, *slow])
    run.replay.add(1, [*learned, *equal, *slow, *held_out])
    for replay in (run.replay, run.reopened()):
        draw = replay.draw(2, 50)
        # The middle reward is the group's mean: nothing to learn from it, but it is a peer.
        assert set(ids(draw)) == {learned[0].row.trajectory_id, learned[1].row.trajectory_id}
        for item in draw.items:
            others = {t.row.trajectory_id: t.row.reward for t in learned} | {}
            del others[item.trajectory_id]
            assert {peer.trajectory_id: peer.reward for peer in item.peers} == others
            assert {peer.group_id for peer in item.peers} == {item.group_id} == {learned[0].row.group_id}
        assert draw.events == (("replay_short", {"wanted": 50, "drawn": 2}),)
    assert never_learned


def test_hot_and_cold_come_in_their_shares_and_as_recorded(run):
    for update in range(1, 8):
        run.update(update, num_fresh=0)
    draw = run.replay.draw(8, 16)
    assert [item.source for item in draw.items].count("hot") == 12
    assert np.mean([item.weight for item in draw.items]) == pytest.approx(1)
    recorded = {t.row.trajectory_id: t for t in read_trajectories(open_run(run.folder))}
    for item in draw.items:
        original = recorded[item.trajectory_id]
        assert item.trajectory.row == original.row or item.trajectory.row.reward == original.row.reward
        for one, two in zip(sequences(item.trajectory), sequences(original), strict=True):
            for field in dataclasses.fields(one):
                np.testing.assert_array_equal(getattr(one, field.name), getattr(two, field.name))
        if item.source == "hot":
            group = [t.row.reward for t in recorded.values() if t.row.group_id == item.group_id]
            assert original.row.reward > np.mean(group)
            assert original.row.policy_version > 7 - SETTINGS.hot_rounds


@pytest.mark.slow
@pytest.mark.parametrize("flushed", [True, False])
def test_a_restart_draws_what_the_process_would_have_drawn(run, flushed):
    run.settings = ReplaySection(
        share=0.5,
        hot_rounds=2,
        hot_bytes=30_000,
        weighting="recency",
        half_life_updates=2,
        quotas={"fake": 0.9},
    )
    run.replay = run.reopened()
    again = 0
    for update in range(1, 9):
        if flushed and update % 3 == 0:
            run.store.flush()
        draw = run.replay.draw(update, 14)
        # Asked again, by this process or by one that opens the record here, it is the same draw.
        if update % 2:
            assert summary(draw) == summary(run.replay.draw(update, 14))
        reopened = run.reopened(cache=f"cache-{update}")
        assert summary(draw) == summary(reopened.draw(update, 14))
        assert reopened.index.epoch_since == run.replay.index.epoch_since
        for replay in (reopened, run.replay):
            assert 0 < replay.hot.num_bytes <= 30_000 or update < 3
        assert sorted(reopened.index.ids[reopened.hot.places]) == sorted(
            run.replay.index.ids[run.replay.hot.places]
        )
        again += any(kind == "consumed_again" for kind, _ in draw.events)
        fresh = run.collect(update, 1)
        run.record(update, fresh, draw)
        run.replay.add(update, fresh)
    assert again


@pytest.mark.parametrize("early", [False, True])
def test_archiving_before_an_update_learns_loses_nothing(run, early):
    """``early``: everything is recorded and archived before replay opens or draws at all."""
    run.settings = ReplaySection(share=0.5, hot_rounds=1)
    fresh = {update: run.collect(update) for update in range(1, 7)} if early else {}
    run.store.flush()
    run.replay = run.reopened()
    for update in range(1, 7):
        if not early:
            fresh[update] = run.collect(update)
            if update % 3:
                run.store.flush()
        draw = run.replay.draw(update, 8)
        assert summary(draw) == summary(run.reopened(cache=f"cache-{update}").draw(update, 8))
        assert "replay_gone" not in dict(draw.events)
        assert draw.items or update == 1
        run.record(update, fresh[update], draw)
        run.replay.add(update, fresh[update])
    assert run.replay.index.present.all()


def test_where_archived_lines_lie_is_found_near_the_last_ones(run, monkeypatch):
    """The search begins where the last round was found, not at the beginning of the record."""
    asked, read_places = [], hotpot.experience.replay.cold.read_places

    def noted(reader, ids, *, above):
        asked.append(above)
        return read_places(reader, ids, above=above)

    monkeypatch.setattr(hotpot.experience.replay.cold, "read_places", noted)
    run.settings = ReplaySection(share=0.5, hot_rounds=1)
    run.replay = run.reopened()
    for update in range(1, 6):
        fresh = run.collect(update)
        run.store.flush()
        run.record(update, fresh, run.replay.draw(update, 14))
        run.replay.add(update, fresh)
    # One search a draw: update 1's lines lie in segment 1, so that for update 2's begins above 0, and so on.
    assert asked == [0, 0, 1, 2]


def test_a_draw_that_was_never_recorded_did_not_happen(run):
    for update in range(1, 4):
        run.update(update, num_fresh=0)
    lost = run.replay.draw(4, 6)
    # The process dies here; the next one takes the next number.
    reopened = run.reopened()
    draws = [ids(reopened.draw(5, 6))]
    run.replay.draw(4, 6)
    assert draws == [ids(run.replay.draw(5, 6))]
    assert lost.items


def test_nothing_repeats_inside_an_epoch_and_a_repeat_is_told(run):
    run.update(1, num_groups=4)
    eligible = int(run.replay.index.eligible.sum())
    seen: list[str] = []
    epochs = 1
    for update in range(2, 12):
        draw = run.replay.draw(update, 6)
        run.record(update, [], draw)
        run.replay.add(update, [])
        events = dict(draw.events)
        if "consumed_again" in events:
            # All that was left came first, then as few repeats as needed.
            assert len(seen) + len(draw.items) - events["consumed_again"]["num"] == eligible
            seen, epochs = [], epochs + 1
        assert not set(seen) & set(ids(draw))
        seen += ids(draw)
    assert epochs > 2


def test_quotas_staleness_and_rounds(run):
    run.settings = ReplaySection(
        share=0.5, max_staleness_updates=2, hot_rounds=1, quotas={"fake": 0.5, "fkae": 0.5}
    )
    run.replay = run.reopened()
    told = [event for update in range(1, 6) for event in run.update(update, num_fresh=2).events]
    draw = run.replay.draw(6, 8)
    assert len(draw.items) == 4
    assert ("replay_short", {"wanted": 8, "drawn": 4}) in draw.events
    unused = ("replay_quota_unused", {"envs": ["fkae"], "known": ["fake"]})
    assert [*told, *draw.events].count(unused) == 1
    assert {item.trajectory.row.policy_version for item in draw.items} <= {4, 5}
    assert {item.trajectory.row.policy_version for item in draw.items if item.source == "hot"} == {5}


def test_the_cache_may_go_or_break_at_any_time(run):
    settings = ReplaySection(share=0.5, hot_share=0.0, hot_rounds=1)
    for update in range(1, 5):
        run.update(update, num_fresh=0)
        run.store.flush()
    replay = run.reopened(settings)
    expected = summary(replay.draw(9, 12))
    cache = run.folder.parent / "cache"
    files = sorted(cache.glob("*.block"))
    assert files
    for damage in (b"", files[0].read_bytes()[:-1], files[0].read_bytes()[:-200] + b"x" * 200):
        for file in files:
            file.write_bytes(damage)
        assert summary(run.reopened(settings).draw(9, 12)) == expected
    flipped = bytearray(files[0].read_bytes())
    flipped[len(flipped) // 3] ^= 1
    files[0].write_bytes(flipped)
    assert summary(run.reopened(settings).draw(9, 12)) == expected
    shutil.rmtree(cache)
    # Under the feet of a process, too.
    assert summary(replay.draw(9, 12)) == expected
    assert list(cache.glob("*.block"))


@pytest.mark.parametrize("max_bytes", [1, 60_000])
def test_the_cache_keeps_its_bound(run, max_bytes):
    settings = ReplaySection(share=0.5, hot_share=0.0, hot_rounds=1, cold_cache_bytes=max_bytes)
    for update in range(1, 7):
        run.update(update, num_fresh=0)
        run.store.flush()
    cache = run.folder.parent / "small"
    small, large = (
        run.reopened(settings, cache="small"),
        run.reopened(SETTINGS.model_copy(update={"hot_share": 0.0})),
    )
    for update in range(9, 12):
        assert {i.trajectory_id for i in small.draw(update, 4).items}
        assert sum(path.stat().st_size for path in cache.glob("*.block")) <= max_bytes
        assert len(list(cache.iterdir())) == len(list(cache.glob("*.block")))
    assert large.cold


def test_a_disk_that_takes_nothing_costs_time_and_is_told(run, monkeypatch):
    for update in range(1, 4):
        run.update(update, num_fresh=0)
    run.store.flush()
    settings = ReplaySection(share=0.5, hot_share=0.0, hot_rounds=1)
    expected = run.reopened(settings, cache="other").draw(9, 4)
    replay = run.reopened(settings)
    shutil.rmtree(run.folder.parent / "cache")
    (run.folder.parent / "cache").write_text("no folder")
    draw = replay.draw(9, 4)
    assert summary(draw)[0] == summary(expected)[0]
    assert {kind for kind, _ in draw.events} == {"replay_cache_failed"}


def test_what_the_lake_holds_no_more_is_not_drawn(run, monkeypatch):
    for update in range(1, 4):
        run.update(update, num_fresh=0)
    run.store.flush()
    settings = ReplaySection(share=0.5, hot_share=0.0, hot_rounds=1)
    replay = run.reopened(settings)
    first = replay.draw(9, 4)
    deleted = ids(first)[:2]
    # A deletion by another program: the rows are gone from the views, and the cache folder with them.
    import duckdb

    query = RunReader._query

    def without(self, text, params, tables):
        found = query(self, text, params, tables)
        if "trajectory_id" not in found.column_names:
            return found
        database = duckdb.connect()
        database.register("found", found)
        return database.sql(
            "SELECT * FROM found WHERE trajectory_id NOT IN (SELECT unnest(?))", params=[deleted]
        ).to_arrow_table()

    monkeypatch.setattr("hotpot.experience.reading.reader.RunReader._query", without)
    shutil.rmtree(run.folder.parent / "cache")
    second = replay.draw(9, 4)
    assert not set(deleted) & set(ids(second))
    assert len(second.items) == 4
    (kind, detail) = second.events[0]
    assert kind == "replay_gone"
    assert set(detail["trajectories"]) == set(deleted)
    assert all(peer.trajectory_id not in deleted for item in second.items for peer in item.peers)
    assert not set(deleted) & set(run.reopened(settings).index.ids.tolist())


def test_flat_arrays_are_the_sequences(run):
    for update in range(1, 4):
        fresh = [
            make_trajectory(
                issue=update, sample=s, num_steps=1 + s, new_segment_at=2 if s > 2 else None, reward=s % 3, policy_version=update
            )
            for s in range(6)
        ]  # fmt: skip
        run.keep(fresh)
        run.record(update, fresh)
        run.replay.add(update, fresh)
        if update == 2:
            run.store.flush()
    replay = run.reopened()
    lines = np.random.default_rng(0).permutation(replay.index.num_lines)
    batch, gone = replay.cold.sample_arrays(lines)
    assert not len(gone)
    recorded = {t.row.trajectory_id: t for t in read_trajectories(open_run(run.folder))}
    expected = [s for line in lines for s in sequences(recorded[str(replay.index.ids[line])])]
    found = batch.sequences()
    assert len(found) == len(expected) > len(lines)
    for one, two in zip(found, expected, strict=True):
        for field in dataclasses.fields(one):
            if field.name == "rewards":
                assert one.rewards is None
                continue
            left, right = getattr(one, field.name), getattr(two, field.name)
            np.testing.assert_array_equal(left, right)
            assert not isinstance(left, np.ndarray) or left.dtype == right.dtype
    empty, _ = replay.cold.sample_arrays(lines[:0])
    assert (empty.sequences(), empty.offsets.tolist()) == ([], [0])


def test_an_update_is_added_once_and_in_order(run):
    fresh = run.collect(1)
    run.record(1, fresh)
    run.replay.add(1, fresh)
    with pytest.raises(StoreError, match="not after 1"):
        run.replay.add(1, fresh)
    with pytest.raises(StoreError, match="already"):
        run.replay.add(2, fresh)
