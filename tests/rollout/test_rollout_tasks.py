import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.config.sections import TasksSection
from hotpot.errors import RecipeError
from hotpot.rollout import (
    EpisodePlan,
    GroupOutcome,
    Mix,
    MixedEnvironment,
    Pool,
    TaskSampler,
    Verdict,
)
from hotpot.testing.environments import echo_environment
from hotpot.types import Split

ENVIRONMENT, LONG = echo_environment(), echo_environment({"num_calls": 2})


def sampler(next_issue: int = 0, seed: int = 7, marks: list[int] | None = None) -> TaskSampler:
    return TaskSampler(
        Mix.of(ENVIRONMENT),
        seed=seed,
        samples_per_task=2,
        next_issue=next_issue,
        advance=None if marks is None else marks.append,
    )


def test_issues_are_consecutive_and_groups_whole() -> None:
    one = sampler()
    plans = one.issue(2) + one.issue(3)
    assert [(plan.issue, plan.sample) for plan in plans] == [(i, s) for i in range(5) for s in range(2)]
    for issue in range(5):
        assert len({plan.task.task_id for plan in plans if plan.issue == issue}) == 1
    assert len({plan.task.task_id for plan in plans}) == 5
    assert {(plan.task.split, plan.evaluation) for plan in plans} == {(Split.TRAIN, None)}
    assert one.next_issue == 5


def test_a_run_goes_on_at_its_mark() -> None:
    whole = sampler().issue(6)
    again = sampler(next_issue=4)
    assert again.issue(2) == whole[8:]


def test_the_mark_is_advanced_before_plans_are_out() -> None:
    marks: list[int] = []
    one = sampler(marks=marks)
    one.issue(3)
    one.issue(1)
    assert marks == [2, 3]


def test_a_mark_that_cannot_be_made_durable_uses_no_number() -> None:
    def fail(_: int) -> None:
        raise OSError("disk full")

    one = TaskSampler(Mix.of(ENVIRONMENT), seed=7, samples_per_task=2, advance=fail)
    try:
        one.issue(1)
    except OSError:
        assert one.next_issue == 0
    else:
        raise AssertionError("the error was swallowed")


def test_every_evaluation_has_the_same_tasks() -> None:
    def tasks(plans: list[EpisodePlan]) -> list[str]:
        return [plan.task.task_id for plan in plans]

    first, second = sampler().holdout(0, 8), sampler(next_issue=5).holdout(1, 16)
    assert tasks(first) == tasks(second)[:8]
    assert [plan.evaluation for plan in first + second] == [0] * 8 + [1] * 16
    assert {plan.task.split for plan in first} == {Split.HOLDOUT}
    assert tasks(sampler(seed=8).holdout(0, 8)) != tasks(first)
    assert not set(tasks(first)) & set(tasks(sampler().issue(50)))


TASK_LIST = TasksSection(num_tasks=6)
POOLED = TasksSection(num_tasks=40, pools=True)


def mixed() -> Mix:
    return Mix(
        [
            MixedEnvironment(name="long", environment=LONG, weight=3.0),
            MixedEnvironment(name="short", environment=ENVIRONMENT),
        ]
    )


def pooled(mix: Mix | None = None, next_issue: int = 0) -> TaskSampler:
    return TaskSampler(
        mix or mixed(), seed=7, samples_per_task=2, next_issue=next_issue, num_holdout=5, settings=POOLED
    )


def outcomes(plans: list[EpisodePlan], update: int) -> list[GroupOutcome]:
    """What might become of the groups of some plans: some verdict, by issue."""
    found = []
    for plan in plans:
        if plan.sample == 0:
            env, reward = mixed()[plan.environment].versions
            verdict = list(Verdict)[(plan.issue * 7 + update) % 3]
            found.append(
                GroupOutcome(
                    task_id=plan.task.task_id, env_version=env, reward_version=reward, verdict=verdict
                )
            )
    return found


def test_a_mix_is_drawn_by_weight_and_a_group_stays_in_one_environment() -> None:
    one = TaskSampler(mixed(), seed=7, samples_per_task=3)
    plans = one.issue(400)
    for issue in range(400):
        assert len({(p.environment, p.task.task_id) for p in plans if p.issue == issue}) == 1
    assert 250 < sum(p.environment == "long" for p in plans) / 3 < 350
    assert [(c.issue, c.environment) for c in one.take_choices()] == [
        (p.issue, p.environment) for p in plans if p.sample == 0
    ]
    assert one.take_choices() == []
    again = TaskSampler(mixed(), seed=7, samples_per_task=3, next_issue=100)
    assert again.issue(300) == plans[300:]


def test_a_mix_evaluates_every_environment() -> None:
    one = TaskSampler(mixed(), seed=7, samples_per_task=1)
    plans = one.holdout(3, 4, environment="short")
    assert {plan.environment for plan in plans} == {"short"}
    assert {plan.task.split for plan in plans} == {Split.HOLDOUT}


def test_the_same_environment_twice_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"'a' and 'b' are the same environment"):
        Mix([MixedEnvironment(name=name, environment=ENVIRONMENT) for name in "ab"])


def test_a_finite_list_is_gone_through_in_a_new_order_each_time() -> None:
    one = TaskSampler(Mix.of(ENVIRONMENT), seed=7, samples_per_task=1, settings=TASK_LIST)
    rounds = [[plan.task.task_id for plan in one.issue(6)] for _ in range(8)]
    assert all(set(found) == set(rounds[0]) and len(set(found)) == 6 for found in rounds)
    assert len({tuple(found) for found in rounds}) > 4
    assert all(choice.pool == "" and choice.probability == 1.0 for choice in one.take_choices())


def test_one_environment_and_new_tasks_leave_nothing_to_tell() -> None:
    one = sampler()
    one.issue(5)
    assert one.take_choices() == []


@given(st.integers(1, 6), st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_a_sampler_told_the_record_goes_on_as_the_one_that_was_there(updates: int, cut: int) -> None:
    whole, record, sizes = pooled(), [], []
    for update in range(updates):
        plans = whole.issue(3) + whole.issue(2)
        record.append((plans, whole.take_choices(), outcomes(plans, update)))
        whole.hear(record[-1][2])
        sizes.append(whole.pool_sizes())
    cut = min(cut, updates)
    resumed = pooled(next_issue=5 * cut)
    for _, _, heard in record[:cut]:
        resumed.hear(heard)
    for update, (plans, choices, heard) in enumerate(record[cut:], start=cut):
        assert resumed.issue(3) + resumed.issue(2) == plans
        assert resumed.take_choices() == choices
        resumed.hear(heard)
        assert resumed.pool_sizes() == sizes[update]


def test_pools_steer_the_draw_and_no_task_comes_twice_in_an_update() -> None:
    one = pooled()
    for update in range(12):
        plans = one.issue(10)
        drawn = [(p.environment, p.task.task_id) for p in plans if p.sample == 0]
        assert len(set(drawn)) == 10
        one.hear(outcomes(plans, update))
    heard = {pool: sum(by[pool] for by in one.pool_sizes().values()) for pool in list(Pool)}
    assert sum(heard.values()) == 80
    assert min(heard.values()) > 0
    choices = []
    for _ in range(60):
        one.issue(5)
        choices += one.take_choices()
        one.hear([])
    chosen = [choice for choice in choices if choice.pool == "learnable"]
    assert len(chosen) / len(choices) > heard[Pool.LEARNABLE] / 80
    assert all(0 < choice.probability < 1 for choice in choices)


def test_verdicts_on_other_versions_are_not_about_these_tasks() -> None:
    one = pooled()
    (heard, *_) = outcomes(one.issue(1), 0)
    one.hear([dataclasses.replace(heard, env_version="echo@0+other")])
    assert {by["unseen"] for by in one.pool_sizes().values()} == {40}
    one.hear([heard])
    assert {by["unseen"] for by in one.pool_sizes().values()} == {40, 39}
