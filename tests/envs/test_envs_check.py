import dataclasses
import itertools
from typing import Any

import pytest

from hotpot.envs import BoundEnvironment, Environment, Level, bind, check_environment
from hotpot.errors import EnvironmentFailure
from hotpot.testing.contracts_environment import demonstrator_contract, environment_contract
from hotpot.testing.environments import ECHO, EchoEnvironment, EchoParams, echo_environment, echo_task
from hotpot.types import Action, Observation, Reward, Split, StepResult, Task


def rules(env: BoundEnvironment, level: Level = Level.ERROR) -> set[str]:
    return {f.rule for f in check_environment(env, num_tasks=12, num_episodes=4) if f.level is level}


def test_a_sound_environment_has_no_findings() -> None:
    assert check_environment(echo_environment()) == []
    assert check_environment(bind(dataclasses.replace(ECHO, demonstrator=None))) == []
    environment_contract(echo_environment())


@pytest.mark.parametrize(
    ("params", "rule"),
    [
        ({"malformed_observation": True}, "episodes"),
        ({"malformed_result": True}, "episodes"),
        ({"malformed_result": True}, "bad_actions"),
        ({"stateful": True}, "determinism"),
        ({"stateful": True}, "isolation"),
        ({"fail_at_step": 1}, "episodes"),
        ({"fail_at_step": 0}, "bad_actions"),
        ({"num_calls": 40}, "episodes"),
    ],
)
def test_switches_of_the_echo_environment_are_found(params: dict[str, Any], rule: str) -> None:
    assert rule in rules(echo_environment(params))


def same_task(params: EchoParams, split: Split, seed: int, index: int) -> Task:
    return Task(env="echo", split=split, content='{"word":"w2"}')


COUNTER = itertools.count()


def impure_task(params: EchoParams, split: Split, seed: int, index: int) -> Task:
    return echo_task(params, split, seed, next(COUNTER))


def other_name(params: EchoParams, split: Split, seed: int, index: int) -> Task:
    return dataclasses.replace(echo_task(params, split, seed, index), env="ohce")


def other_split(params: EchoParams, split: Split, seed: int, index: int) -> Task:
    return dataclasses.replace(echo_task(params, split, seed, index), split=Split.TRAIN)


def loose_json(params: EchoParams, split: Split, seed: int, index: int) -> Task:
    task = echo_task(params, split, seed, index)
    return dataclasses.replace(task, content=task.content.replace(":", ": "))


def broken_task(params: EchoParams, split: Split, seed: int, index: int) -> Task:
    raise RuntimeError("no tasks today")


@pytest.mark.parametrize(
    ("task", "rule", "level"),
    [
        (same_task, "splits", Level.ERROR),
        (same_task, "tasks", Level.WARNING),
        (impure_task, "tasks", Level.ERROR),
        (other_name, "tasks", Level.ERROR),
        (other_split, "tasks", Level.ERROR),
        (loose_json, "tasks", Level.ERROR),
        (broken_task, "tasks", Level.ERROR),
    ],
)
def test_faults_of_tasks_are_found(task: Any, rule: str, level: Level) -> None:
    spec = dataclasses.replace(ECHO, task=task, verify=accept, shares=(__name__,))
    assert rule in rules(bind(spec), level)


def accept(params: EchoParams, task: Task) -> None:
    return


def reject(params: EchoParams, task: Task) -> None:
    raise ValueError("wrong answer")


def one_key(params: EchoParams, task: Task) -> tuple[str, ...]:
    return ("bolt",)


def no_prompt(params: EchoParams) -> str:
    return ""


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"verify": reject}, "tasks"),
        ({"held_apart": one_key}, "splits"),
        ({"system_prompt": no_prompt}, "versions"),
    ],
)
def test_faults_of_the_declaration_are_found(changes: dict[str, Any], rule: str) -> None:
    assert rule in rules(bind(dataclasses.replace(ECHO, shares=(__name__,), **changes)))


def test_an_unverifiable_version_is_a_warning() -> None:
    env = echo_environment(failing_starts=0)
    marked = bind(dataclasses.replace(ECHO, system_prompt=lambda params: "hi"), allow_unverifiable=True)
    assert "versions" not in rules(env, Level.WARNING)
    assert rules(marked, Level.WARNING) == {"versions"}


class Sloppy(EchoEnvironment):
    """Takes everything: a second reset, steps after the end, bad rewards."""

    def reset(self, task: Task, seed: int) -> Observation:
        self._state = "fresh"
        return super().reset(task, seed)

    def step(self, action: Action) -> StepResult:
        self._state = "running"
        result = super().step(action)
        if result.done:
            nan = (Reward(name="a", value=float("nan")), Reward(name="a", value=1.0))
            return dataclasses.replace(result, rewards=nan)
        return result


class Raising(EchoEnvironment):
    """Raises on what a model wrote."""

    def step(self, action: Action) -> StepResult:
        if action.malformed is not None:
            raise ValueError("malformed")
        return super().step(action)


class Parrot(EchoEnvironment):
    """Repeats a tool's name as it came, be it text or not."""

    def step(self, action: Action) -> StepResult:
        result = super().step(action)
        if action.tool_call is None or not result.messages:
            return result
        message = dataclasses.replace(result.messages[0], name=action.tool_call.name)
        return dataclasses.replace(result, messages=(message,))


class Silent(EchoEnvironment):
    """Returns no record at all."""

    def reset(self, task: Task, seed: int) -> Any:
        super().reset(task, seed)
        return "say something"


@pytest.mark.parametrize(
    ("make", "rule", "level"),
    [
        (Sloppy, "episodes", Level.ERROR),
        (Sloppy, "single_use", Level.WARNING),
        (Raising, "bad_actions", Level.ERROR),
        (Parrot, "bad_actions", Level.ERROR),
        (Silent, "episodes", Level.ERROR),
    ],
)
def test_faults_of_the_environment_are_found(make: type[Environment], rule: str, level: Level) -> None:
    assert rule in rules(bind(dataclasses.replace(ECHO, make=make, shares=(__name__,))), level)


def test_contracts_fail_with_what_they_found() -> None:
    with pytest.raises(AssertionError, match="breaks its contract:\nerror determinism"):
        environment_contract(echo_environment({"stateful": True}))
    marked = bind(dataclasses.replace(ECHO, system_prompt=lambda params: "hi"), allow_unverifiable=True)
    with pytest.raises(AssertionError, match="warning versions"):
        environment_contract(marked)
    environment_contract(marked, allow=("versions",))
    assert demonstrator_contract(echo_environment(), low=1.0, high=1.0, num_tasks=5) == 1.0
    with pytest.raises(AssertionError, match=r"succeeds on 1\.000"):
        demonstrator_contract(echo_environment(), low=0.0, high=0.5, num_tasks=5)


def test_failing_starts_end_after_their_number() -> None:
    env = echo_environment(failing_starts=2)
    task = env.task(Split.TRAIN, 0, 0)
    for _ in range(2):
        with pytest.raises(EnvironmentFailure, match="fails at step 0"):
            env.make().reset(task, 0)
    assert env.make().reset(task, 0).messages[0].content.startswith("say w")


def test_the_echo_environment_fails_where_it_is_told() -> None:
    env = echo_environment({"fail_at_step": 2})
    world = env.make()
    world.reset(env.task(Split.TRAIN, 0, 0), 0)
    world.step(Action(malformed="x"))
    with pytest.raises(EnvironmentFailure, match="fails at step 2"):
        world.step(Action(answer="x"))
