from hotpot.rollout import EpisodePlan, TaskSampler
from hotpot.testing.environments import echo_environment
from hotpot.types import Split

ENVIRONMENT = echo_environment()


def sampler(next_issue: int = 0, seed: int = 7, marks: list[int] | None = None) -> TaskSampler:
    return TaskSampler(
        ENVIRONMENT,
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

    one = TaskSampler(ENVIRONMENT, seed=7, samples_per_task=2, advance=fail)
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
