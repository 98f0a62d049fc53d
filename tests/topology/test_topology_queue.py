"""The queue between actors and learner: nothing lost or twice, bounds that hold, and the order."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.config.sections import QueueSection
from hotpot.testing.records import make_trajectory
from hotpot.topology.collecting.discards import Discard, discard_rows, discards, oldest_version
from hotpot.topology.collecting.groups import CompleteGroup
from hotpot.topology.collecting.queue import Taken, TrajectoryQueue
from hotpot.types import DiscardReason, Trajectory


@cache
def member(issue: int, sample: int, version: int) -> Trajectory:
    return make_trajectory(issue=issue, sample=sample, num_steps=1, policy_version=version)


def group(issue: int, versions: list[int], *, first: int = 0) -> CompleteGroup:
    """Return a group with a trajectory for each of the ``versions`` that sampled it; ``first`` is its first arrival."""
    members = tuple(member(issue, sample, version) for sample, version in enumerate(versions))
    arrivals = tuple(range(first, first + len(members)))
    return CompleteGroup(group_id=f"g{issue}", trajectories=members, arrivals=arrivals, issued=len(members))


def queue(batch_groups: int = 2, group_size: int = 2, **settings: Any) -> TrajectoryQueue:
    return TrajectoryQueue(QueueSection(**settings), batch_groups=batch_groups, group_size=group_size)


def ids(taken: Taken) -> list[str]:
    return [one.group_id for one in taken.groups]


def gone(discards: tuple[Discard, ...]) -> list[tuple[str, str, int]]:
    return [(each.trajectory_id, each.reason.value, each.staleness) for each in discards]


def test_the_oldest_groups_go_but_never_what_one_batch_needs() -> None:
    waiting = queue(depth=5)
    assert waiting.put(group(0, [1, 1]), policy_version=3) == ()
    assert waiting.put(group(1, [2, 2]), policy_version=3) == ()
    discards = waiting.put(group(2, [3, 3]), policy_version=4)
    assert gone(discards) == [("0.0.0", "overflow_oldest", 3), ("0.1.0", "overflow_oldest", 3)]
    assert waiting.put(group(3, [3] * 9), policy_version=4)[0].group_id == "g1"
    assert waiting.depth == 11, "two groups are a batch, however large"


def test_the_newest_group_goes_whole() -> None:
    waiting = queue(depth=5, when_full="drop_newest")
    for issue in range(2):
        assert waiting.put(group(issue, [1, 1]), policy_version=1) == ()
    assert gone(waiting.put(group(2, [1, 1]), policy_version=1)) == [
        ("2.0.0", "overflow_newest", 0),
        ("2.1.0", "overflow_newest", 0),
    ]
    assert ids(waiting.take(0.0, policy_version=1)) == ["g0", "g1"]


def test_the_oldest_token_says_how_stale_a_trajectory_is_and_only_it_goes() -> None:
    waiting = queue(max_staleness=2)
    old = group(0, [5, 5])
    swapped = replace(
        old.trajectories[1],
        steps=(
            replace(
                old.trajectories[1].steps[0], span_policy_version=(5, 6, 2, 7), span_policy_length=(1,) * 4
            ),
        ),
    )
    assert oldest_version(swapped, {}) == 2
    assert oldest_version(swapped, {2: 6}) == 5
    waiting.put(replace(old, trajectories=(old.trajectories[0], swapped)), policy_version=5)
    waiting.put(group(1, [4, 4], first=2), policy_version=5)
    taken = waiting.take(0.0, policy_version=6)
    assert gone(taken.discarded) == [("0.1.0", "stale", 4)]
    assert [t.row.trajectory_id for t in taken.trajectories] == ["0.0.0", "1.0.0", "1.1.0"]
    assert taken.groups[0].arrivals == (0,)


def test_weights_that_are_served_under_another_number_are_as_old_as_that_one() -> None:
    waiting = TrajectoryQueue(QueueSection(max_staleness=0), batch_groups=1, group_size=1, aliases={3: 7})
    waiting.put(group(0, [3]), policy_version=7)
    assert waiting.take(0.0, policy_version=7).is_batch


def test_a_discard_has_its_row() -> None:
    found = discards(group(3, [4]).trajectories, DiscardReason.SURPLUS, policy_version=6, aliases={4: 5})
    (row,) = discard_rows(found, run_id="run", update=7, time_us=8)
    assert (row.trajectory_id, row.group_id, row.reason, row.staleness) == ("3.0.0", "g3", "surplus", 1)
    assert (row.run_id, row.update, row.policy_version, row.time_us) == ("run", 7, 6, 8)


def test_a_batch_is_in_order_of_finishing_over_its_groups() -> None:
    waiting = queue()
    one, other = group(0, [1, 1]), group(1, [1, 1])
    waiting.put(replace(one, arrivals=(0, 3)), policy_version=1)
    waiting.put(replace(other, arrivals=(1, 2)), policy_version=1)
    taken = waiting.take(0.0, policy_version=1)
    assert [t.row.trajectory_id for t in taken.trajectories] == ["0.0.0", "1.0.0", "1.1.0", "0.1.0"]


@pytest.mark.parametrize(
    ("when_late", "groups", "missing"), [("smaller", ["g0"], 0), ("skip", [], 0), ("replay", ["g0"], 2)]
)
def test_after_the_longest_wait(when_late: str, groups: list[str], missing: int) -> None:
    waiting = queue(batch_groups=3, when_late=when_late, longest_wait_s=10.0)
    waiting.put(group(0, [1, 1]), policy_version=1)
    early = waiting.take(100.0, policy_version=1), waiting.take(109.9, policy_version=1)
    assert not any(taken.is_batch or taken.late for taken in early)
    taken = waiting.take(110.0, policy_version=1)
    assert (ids(taken), taken.missing, taken.late, taken.waited_s) == (groups, missing, True, 10.0)
    assert taken.is_batch == (when_late != "skip")
    again = waiting.take(115.0, policy_version=1)
    assert not again.late, "the wait begins anew"
    assert waiting.take(130.0, policy_version=1).late


def test_nothing_at_all_is_waited_for_again_unless_replay_has_something() -> None:
    for when_late, is_batch in (("smaller", False), ("replay", True)):
        waiting = queue(when_late=when_late, longest_wait_s=1.0)
        waiting.take(0.0, policy_version=1)
        taken = waiting.take(1.0, policy_version=1)
        assert taken.late
        assert taken.is_batch is is_batch
        assert not taken.groups
        assert waiting.counts.skipped_batches == (not is_batch)


def test_a_batch_of_tokens_is_of_whole_groups() -> None:
    one, other, large = group(0, [1, 1]), group(1, [1, 1]), group(2, [1] * 20)
    waiting = queue(batch_tokens=one.num_sampled_tokens + other.num_sampled_tokens, depth=2)
    waiting.put(one, policy_version=1)
    assert not waiting.take(0.0, policy_version=1).is_batch
    assert waiting.put(other, policy_version=1) == (), "a batch needs both"
    assert ids(waiting.take(0.0, policy_version=1)) == ["g0", "g1"]
    waiting.put(one, policy_version=1)
    waiting.put(other, policy_version=1)
    assert {each.group_id for each in waiting.put(large, policy_version=1)} == {"g0", "g1"}
    assert ids(waiting.take(0.0, policy_version=1)) == ["g2"]


def test_where_it_is_full_actors_wait_but_never_for_a_batch_that_could_not_come() -> None:
    waiting = queue(depth=6, when_full="block", when_stale="drop")
    free: dict[str, Any] = {"policy_version": 1, "served_version": 1, "learning": False}
    assert waiting.hold(under_way=0, expected=0, **free) is None
    assert waiting.hold(under_way=2, expected=4, **free) is None
    held = waiting.hold(under_way=3, expected=6, **free)
    assert held is not None
    assert "0 trajectories wait and up to 6 are under way (queue.depth = 6" in held
    assert waiting.put(group(0, [1] * 20), policy_version=1) == ()
    assert waiting.hold(under_way=0, expected=0, **free) is None, "one group is no batch yet"
    assert waiting.put(group(1, [1] * 20), policy_version=1) == (), "what is there is kept"
    assert waiting.hold(under_way=0, expected=0, **free) is not None


def test_actors_wait_where_what_they_begin_would_come_to_be_too_old() -> None:
    waiting = queue(max_staleness=1, when_stale="wait")
    free: dict[str, Any] = {"expected": 0, "policy_version": 5, "served_version": 5}
    assert waiting.hold(under_way=3, learning=False, **free) is None
    assert waiting.hold(under_way=4, learning=False, **free) is not None
    assert waiting.hold(under_way=1, learning=True, **free) is None
    held = waiting.hold(under_way=2, learning=True, **free)
    assert held is not None
    assert "would be 2 updates old" in held
    assert "1 batches are ahead" in held
    assert "it is learning" in held
    assert waiting.hold(under_way=0, learning=False, **{**free, "served_version": 3}) is not None
    assert queue(max_staleness=None, when_stale="wait").hold(under_way=99, learning=True, **free) is None


def test_who_begins_when_told_and_finishes_in_order_is_never_too_old() -> None:
    """The rule of waiting, tried on the whole loop: with groups that end in order nothing is ever dropped as stale, and
    the bound is really reached."""
    for bound in (0, 1, 3):
        waiting = queue(batch_groups=2, group_size=1, max_staleness=bound, when_stale="wait", depth=100)
        version, issue, learning, worst = 1, 0, False, 0
        under_way: list[CompleteGroup] = []
        for turn in range(200):
            while (
                waiting.hold(
                    under_way=len(under_way),
                    expected=0,
                    policy_version=version,
                    served_version=version,
                    learning=learning,
                )
                is None
            ):
                under_way.append(group(issue, [version]))
                issue += 1
            if turn % 3 == 0 and learning:
                learning, version = False, version + 1
            elif under_way:
                waiting.put(under_way.pop(0), policy_version=version)
            if not learning:
                taken = waiting.take(0.0, policy_version=version)
                learning = taken.is_batch
                assert not taken.discarded
                worst = max([worst, *(version - oldest_version(t, {}) for t in taken.trajectories)])
        assert worst == bound


class Reference:
    """The queue as a plain list of (group, trajectory, version, tokens), with the rules spelled out one by one."""

    def __init__(self, settings: QueueSection, batch_groups: int) -> None:
        self.settings, self.batch_groups = settings, batch_groups
        self.rows: list[tuple[str, str, int, int]] = []

    def groups(self) -> list[str]:
        return list(dict.fromkeys(row[0] for row in self.rows))

    def whole(self, rows: list[tuple[str, str, int, int]]) -> list[str]:
        """Return the groups of the first whole batch among ``rows``; none where there is none."""
        names = list(dict.fromkeys(row[0] for row in rows))
        for number in range(1, len(names) + 1):
            tokens = sum(row[3] for row in rows if row[0] in names[:number])
            wanted = self.settings.batch_tokens
            if (number == self.batch_groups) if wanted is None else (tokens >= wanted):
                return names[:number]
        return []

    def put(self, rows: list[tuple[str, str, int, int]]) -> list[str]:
        self.rows += rows
        gone: list[str] = []
        while self.settings.when_full != "block" and len(self.rows) > self.settings.depth:
            victim = self.groups()[0 if self.settings.when_full == "drop_oldest" else -1]
            rest = [row for row in self.rows if row[0] != victim]
            if not self.whole(rest):
                break
            gone += [row[1] for row in self.rows if row[0] == victim]
            self.rows = rest
        return gone

    def take(self, version: int, late: bool) -> tuple[list[str], list[str]]:
        bound = self.settings.max_staleness
        stale = [row[1] for row in self.rows if bound is not None and version - row[2] > bound]
        self.rows = [row for row in self.rows if row[1] not in stale]
        names = self.whole(self.rows)
        if not names and late and self.settings.when_late != "skip":
            names = self.groups()
        self.rows = [row for row in self.rows if row[0] not in names]
        return names, stale


SETTINGS = st.builds(
    QueueSection,
    depth=st.integers(1, 12),
    when_full=st.sampled_from(["drop_oldest", "drop_newest", "block"]),
    max_staleness=st.none() | st.integers(0, 3),
    when_stale=st.sampled_from(["drop", "wait"]),
    batch_tokens=st.none() | st.integers(1, 60),
    longest_wait_s=st.just(5.0),
    when_late=st.sampled_from(["smaller", "skip", "replay"]),
)


@given(SETTINGS, st.integers(1, 3), st.data())
@settings(deadline=None, max_examples=80)
def test_nothing_is_lost_or_twice_and_the_bounds_hold(
    section: QueueSection, batch_groups: int, data: st.DataObject
) -> None:
    tested = TrajectoryQueue(section, batch_groups=batch_groups, group_size=2)
    reference = Reference(section, batch_groups)
    put, taken, discarded = list[str](), list[str](), list[Discard]()
    version, now_s, since_s = 1, 0.0, None
    for issue in range(data.draw(st.integers(1, 25))):
        now_s += data.draw(st.sampled_from([0.0, 1.0, 4.0]))
        version += data.draw(st.integers(0, 1))
        if data.draw(st.booleans()):
            new = group(
                issue, data.draw(st.lists(st.integers(max(1, version - 3), version), min_size=1, max_size=4))
            )
            put += [t.row.trajectory_id for t in new.trajectories]
            rows = [
                (new.group_id, t.row.trajectory_id, t.row.policy_version, _tokens(t))
                for t in new.trajectories
            ]
            found = tested.put(new, policy_version=version)
            assert [each.trajectory_id for each in found] == reference.put(rows)
            assert not (found and section.when_full == "block")
            discarded += found
        else:
            since_s = now_s if since_s is None else since_s
            late = now_s - since_s >= 5.0
            whole = bool(
                reference.whole([r for r in reference.rows if not _is_stale(r[2], version, section)])
            )
            got = tested.take(now_s, policy_version=version)
            names, stale = reference.take(version, late)
            assert ids(got) == names
            assert [each.trajectory_id for each in got.discarded] == stale
            assert got.late == (late and not whole)
            assert got.missing == 0 or (got.late and section.when_late == "replay")
            bound = section.max_staleness
            assert bound is None or all(version - t.row.policy_version <= bound for t in got.trajectories)
            since_s = None if got.is_batch else now_s if got.late else since_s
            taken += [t.row.trajectory_id for t in got.trajectories]
            discarded += got.discarded
        waiting = [t.row.trajectory_id for one in tested.waiting for t in one.trajectories]
        assert waiting == [row[1] for row in reference.rows]
        assert sorted(put) == sorted([*taken, *waiting, *(each.trajectory_id for each in discarded)])
        counts = tested.counts
        assert (counts.put, counts.taken, counts.discarded) == (len(put), len(taken), len(discarded))
    assert all(each.reason in DiscardReason and each.staleness >= 0 for each in discarded)


def _tokens(trajectory: Trajectory) -> int:
    return trajectory.row.num_sampled_tokens


def _is_stale(sampled_by: int, version: int, section: QueueSection) -> bool:
    return section.max_staleness is not None and version - sampled_by > section.max_staleness
