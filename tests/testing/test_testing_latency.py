import itertools
import math
import pickle
import statistics

import pytest
from pydantic import ValidationError

from hotpot.envs import load_environment
from hotpot.envs.check import Level, check_environment
from hotpot.testing.coin import coin_environment
from hotpot.testing.latency import DelayedEnvironment, Latency
from hotpot.types import Action, Split, ToolCall

COIN = "hotpot.testing.latency:COIN"


def waits(latency: Latency, count: int) -> list[float]:
    return [latency.seconds(f"task-{number % 50}", number // 50, number % 7) for number in range(count)]


def test_a_fixed_wait_is_always_the_mean() -> None:
    assert set(waits(Latency(kind="fixed", mean_s=0.25), 100)) == {0.25}
    assert set(waits(Latency(), 100)) == {0.0}


@pytest.mark.parametrize("kind", ["exponential", "lognormal"])
def test_laws_have_the_mean_they_were_given(kind: str) -> None:
    drawn = waits(Latency(kind=kind, mean_s=2.0, sigma=1.0), 20_000)
    # Standard error of the mean: 2 / sqrt(n) (exponential), 2 sqrt(e - 1) / sqrt(n) (log-normal): 0.019 at most.
    assert statistics.fmean(drawn) == pytest.approx(2.0, abs=0.08)
    assert len(set(drawn)) == len(drawn)


def test_the_tail_of_the_log_normal_is_long_and_that_of_the_exponential_is_not() -> None:
    def beyond(latency: Latency, times_the_mean: float) -> float:
        return statistics.fmean(wait > times_the_mean for wait in waits(latency, 20_000))

    heavy = Latency(kind="lognormal", mean_s=1.0, sigma=1.5)
    assert beyond(heavy, 10.64) == pytest.approx(0.01, abs=0.003)
    assert beyond(Latency(kind="exponential", mean_s=1.0), math.log(100)) == pytest.approx(0.01, abs=0.003)
    assert beyond(Latency(kind="exponential", mean_s=1.0), 10.64) < 0.001


def test_a_wait_is_a_function_of_task_episode_and_call() -> None:
    latency = Latency(kind="lognormal", mean_s=1.0)
    keys = list(itertools.product(("a", "b"), (0, 1), (0, 1, 2)))
    drawn = [latency.seconds(*key) for key in keys]
    assert drawn == [latency.seconds(*key) for key in keys]
    assert len(set(drawn)) == len(keys)
    assert drawn[0] != latency.model_copy(update={"seed": 1}).seconds(*keys[0])


def test_the_longest_wait_cuts_the_tail() -> None:
    latency = Latency(kind="lognormal", mean_s=1.0, sigma=1.5, longest_s=3.0)
    assert max(waits(latency, 2_000)) == 3.0


def test_the_environment_waits_before_every_call_and_changes_nothing_else() -> None:
    plain, asked, latency = coin_environment(), list[float](), Latency(kind="exponential", mean_s=1.0)
    task = plain.task(Split.TRAIN, 0, 3)
    peek, answer = Action(tool_call=ToolCall(name="peek", arguments="{}")), Action(answer="heads")
    late, now = DelayedEnvironment(plain.make(), latency, wait=asked.append), plain.make()
    assert late.reset(task, 7) == now.reset(task, 7)
    assert [late.step(peek), late.step(answer)] == [now.step(peek), now.step(answer)]
    assert asked == [latency.seconds(task.task_id, 7, call) for call in (0, 1, 2)]

    asked.clear()
    quick = DelayedEnvironment(
        plain.make(), latency.model_copy(update={"at_reset": False}), wait=asked.append
    )
    quick.reset(task, 7)
    assert asked == []


def test_it_is_found_by_name_and_parameters_in_any_process() -> None:
    params = {"latency": {"kind": "lognormal", "mean_s": 0.001}}
    desk = load_environment("hotpot.testing.latency:ORDER_DESK", {"max_lines": 2, **params})
    assert pickle.loads(pickle.dumps(desk)).env_version == desk.env_version
    findings = check_environment(desk, num_tasks=4, num_episodes=2)
    assert [one for one in findings if one.level is Level.ERROR] == []
    plain = load_environment("order_desk", {"max_lines": 2})
    assert desk.task(Split.TRAIN, 0, 0) == plain.task(Split.TRAIN, 0, 0)
    assert desk.reward_version.version == plain.reward_version.version
    assert desk.env_version.version != plain.env_version.version


def test_waiting_belongs_to_the_environment_and_not_to_the_reward() -> None:
    one, other = (load_environment(COIN, {"latency": {"mean_s": seconds}}) for seconds in (0.0, 1.0))
    assert one.env_version.version != other.env_version.version
    assert one.reward_version.version == other.reward_version.version


def test_a_law_that_cannot_be_is_refused() -> None:
    for wrong in ({"mean_s": -1.0}, {"mean_s": math.inf}, {"kind": "uniform"}, {"mean": 1.0}):
        with pytest.raises(ValidationError):
            Latency.model_validate(wrong)
