"""Running a demonstrator through an episode: what the warm start imitates, and a transcript to compare.

The texts a tokenizer must know are those of demonstrator episodes; there is no other list of them. Knows neither
tokens nor chat templates.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hotpot.envs.base import BoundEnvironment
from hotpot.errors import EnvironmentSpecError
from hotpot.types import Action, Observation, StepResult, Task

MAX_STEPS = 32
"""Steps after which a demonstrator that has not come to an end is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One step: what was done, and what the environment returned."""

    action: Action
    result: StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One finished episode. ``success`` is the environment's verdict."""

    task: Task
    seed: int
    system_prompt: str
    observation: Observation
    exchanges: tuple[Exchange, ...]
    success: bool


def demonstrate(
    env: BoundEnvironment,
    task: Task,
    seed: int,
    *,
    system_prompt: str | None = None,
    max_steps: int = MAX_STEPS,
) -> Demonstration:
    """Run the environment's demonstrator on ``task`` to the end; deterministic given (task, seed).

    ``system_prompt`` is recorded in place of the environment's own. Raises EnvironmentSpecError where there is no
    demonstrator or it does not end within ``max_steps``.
    """
    agent = env.demonstrator(task, seed)
    if agent is None:
        raise EnvironmentSpecError(f"environment {env.name!r} has no demonstrator; a warm start needs one")
    world = env.make()
    try:
        observation = world.reset(task, seed)
        messages = observation.messages
        exchanges: list[Exchange] = []
        while not exchanges or not exchanges[-1].result.done:
            if len(exchanges) == max_steps:
                raise EnvironmentSpecError(
                    f"the demonstrator of {env.name!r} did not end task {task.task_id} within {max_steps} steps"
                )
            action = agent.act(messages)
            result = world.step(action)
            exchanges.append(Exchange(action=action, result=result))
            messages = result.messages
    finally:
        world.close()
    return Demonstration(
        task=task,
        seed=seed,
        system_prompt=env.system_prompt() if system_prompt is None else system_prompt,
        observation=observation,
        exchanges=tuple(exchanges),
        success=bool(exchanges[-1].result.success),
    )


def replay(
    env: BoundEnvironment, task: Task, seed: int, actions: Iterable[Action]
) -> tuple[Observation, list[StepResult]]:
    """Run recorded actions in a fresh environment, up to its end; return what it showed."""
    world = env.make()
    try:
        observation = world.reset(task, seed)
        results: list[StepResult] = []
        for action in actions:
            results.append(world.step(action))
            if results[-1].done:
                break
        return observation, results
    finally:
        world.close()
