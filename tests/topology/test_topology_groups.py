"""Groups of episodes: when they are complete, what counts, what is cut."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.rollout import EpisodePlan
from hotpot.testing.records import make_fork, make_trajectory
from hotpot.topology.collecting.groups import Groups, Turned
from hotpot.types import Split, Task, Trajectory

TASK = Task(env="fake", content="{}", split=Split.TRAIN)


def plans(issue: int, samples: int) -> list[EpisodePlan]:
    return [EpisodePlan(task=TASK, issue=issue, sample=sample) for sample in range(samples)]


@cache
def done(issue: int, sample: int) -> Trajectory:
    return make_trajectory(issue=issue, sample=sample, num_steps=1, prompt_tokens=2, sampled_tokens=2)


def names(trajectories: tuple[Trajectory, ...]) -> list[str]:
    return [trajectory.row.trajectory_id for trajectory in trajectories]


def test_a_group_without_over_issue_waits_for_each_end_and_keeps_the_order_of_finishing() -> None:
    groups = Groups(3)
    groups.issue(plans(4, 3))
    assert groups.turn([done(4, 2)]) == Turned()
    assert groups.turn([], ["4.0"]) == Turned()
    assert list(groups.under_way) == ["g4"]
    assert groups.standing()[1] == 2
    (group,) = groups.turn([done(4, 1)]).complete
    assert (group.group_id, names(group.trajectories)) == ("g4", ["4.2.0", "4.1.0"])
    assert (group.issued, group.lost, group.cut, group.arrivals) == (3, 1, 0, (0, 1))
    assert not groups.under_way
    assert groups.standing()[1] == 0


def test_the_tail_is_cut_and_of_one_turn_the_lowest_samples_count() -> None:
    groups = Groups(2)
    groups.issue(plans(0, 5))
    groups.turn([done(0, 3)])
    turned = groups.turn([done(0, 4), done(0, 1)])
    (group,) = turned.complete
    assert names(group.trajectories) == ["0.3.0", "0.1.0"]
    assert turned.cut == ("0.0", "0.2")
    assert names(turned.surplus) == ["0.4.0"]
    late = groups.turn([done(0, 0)], ["0.2"])
    assert names(late.surplus) == ["0.0.0"]
    assert not late.complete
    counts = groups.counts
    assert (counts.issued, counts.finished, counts.surplus, counts.cut, counts.late) == (5, 2, 1, 2, 1)


def test_forks_belong_to_their_attempt_and_count_with_it() -> None:
    groups, root = Groups(2), done(0, 1)
    groups.issue(plans(0, 3))
    fork = make_fork(root, 0)
    (group,) = groups.turn([root, fork, done(0, 2), done(0, 0)]).complete
    assert names(group.trajectories) == ["0.1.0", "0.1.0/1", "0.0.0"]
    assert group.num_sampled_tokens == sum(t.row.num_sampled_tokens for t in group.trajectories)


def test_a_group_in_which_nothing_finished_ends_empty_and_is_counted() -> None:
    groups = Groups(2)
    groups.issue(plans(0, 2))
    assert groups.turn([], ["0.0", "0.1"]).empty == ("g0",)
    assert groups.counts.empty_groups == 1


def test_an_episode_ends_once_and_an_issue_is_used_once() -> None:
    groups = Groups(3)
    groups.issue(plans(0, 3))
    with pytest.raises(ValueError, match=r"0\.0 of group g0 was issued before"):
        groups.issue(plans(0, 3))
    groups.turn([done(0, 0)])
    with pytest.raises(ValueError, match="isn't under way"):
        groups.turn([done(0, 0)])
    with pytest.raises(ValueError, match="isn't under way"):
        groups.turn([], ["0.0"])


@given(st.integers(1, 4), st.integers(0, 3), st.integers(1, 4), st.data())
@settings(deadline=None, max_examples=80)
def test_every_episode_ends_as_exactly_one_thing(
    wanted: int, more: int, num_groups: int, data: st.DataObject
) -> None:
    """Against a reference that looks at one group's whole history: nothing is lost, counted twice, or waited for."""
    groups, samples = Groups(wanted), wanted + more
    groups.issue(plan for issue in range(num_groups) for plan in plans(issue, samples))
    out = {(issue, sample) for issue in range(num_groups) for sample in range(samples)}
    history: dict[int, list[list[int]]] = {issue: [] for issue in range(num_groups)}
    ended: dict[int, Turned] = {}
    surplus: list[str] = []
    cut: set[str] = set()
    lost: dict[int, int] = dict.fromkeys(range(num_groups), 0)
    while out:
        ends = data.draw(st.permutations(sorted(out)))[: data.draw(st.integers(1, 4))]
        gone = [end for end in ends if data.draw(st.booleans())]
        came = [end for end in ends if end not in gone]
        turned = groups.turn([done(*end) for end in came], [f"{i}.{s}" for i, s in gone])
        for issue in {issue for issue, _ in came}:
            history[issue].append([s for i, s in came if i == issue])
        for issue, _ in gone:
            lost[issue] += 1
        out -= set(ends) | {(int(i), int(s)) for i, s in (name.split(".") for name in turned.cut)}
        cut |= set(turned.cut)
        surplus += names(turned.surplus)
        for group in turned.complete:
            issue = int(group.group_id[1:])
            assert issue not in ended
            ended[issue] = replace(turned, complete=(group,))
        for name in turned.empty:
            ended[int(name[1:])] = turned
    assert sorted(ended) == list(range(num_groups))
    assert not groups.under_way
    for issue, turns in history.items():
        first = [sample for turn in turns for sample in sorted(turn)][:wanted]
        in_order = [sample for turn in turns for sample in turn if sample in first]
        counted = [f"{issue}.{sample}.0" for sample in in_order]
        group_ended = ended[issue].complete if in_order else ()
        assert [name for one in group_ended for name in names(one.trajectories)] == counted
        rest = {f"{issue}.{s}" for s in range(samples)} - {name[:-2] for name in counted}
        rest -= {name for name in cut if name.startswith(f"{issue}.")}
        rest -= {name[:-2] for name in surplus}
        assert len(rest) == lost[issue]
        assert len(first) >= min(wanted, samples - lost[issue])
        for one in group_ended:
            assert list(one.arrivals) == sorted(one.arrivals)
    counts = groups.counts
    assert counts.issued == counts.finished + counts.surplus + counts.lost + counts.cut
    assert (counts.surplus, counts.late) == (len(surplus), 0)


def test_what_rests_is_not_waited_for() -> None:
    groups = Groups(2)
    groups.issue([*plans(1, 3), *plans(2, 3)])
    groups.turn([done(1, 0)])
    assert groups.standing() == (2, 4)
    assert groups.standing({"1.1", "1.2"}) == (1, 3)
    assert groups.standing({"1.1", "2.0"}) == (2, 4)
    assert groups.standing({"1.1", "1.2", "2.0", "2.1", "2.2"}) == (0, 1)
