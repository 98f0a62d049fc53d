"""The boundary to an environment's code: what it raises is a failure with a reason, what it returns is checked.

Owns the rule that nothing an environment does can look like a reward or end the run: whatever crosses the boundary
and breaks the contract raises :class:`EnvironmentFailure`. Knows no tokens. It cannot interrupt code that hangs.

What crosses is exactly one of our records, so nothing can ride along with it: how the agent is sampled is nowhere among
their fields, and a subclass that adds it, or a task that asks for it, is refused as :class:`EnvironmentOverrideError`.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from hotpot.envs import Environment
from hotpot.errors import EnvironmentFailure, EnvironmentOverrideError
from hotpot.experience.crashpoints import reach, through
from hotpot.types import (
    Action,
    Message,
    Observation,
    Reward,
    Role,
    SamplingParams,
    StepResult,
    Task,
    ToolCall,
    ToolSpec,
)

_SAMPLING_NAMES = frozenset(field.name for field in fields(SamplingParams))
_SAMPLING_KEYS = ("sampling", "sampling_params", "generation_config")
"""Keys under which other programs look for sampling parameters."""


def make(factory: Callable[[], Environment]) -> Environment:
    """Return a fresh environment."""
    with _crossing("make"):
        return factory()


def reset(environment: Environment, task: Task, seed: int) -> Observation:
    """Reset an environment and return its checked first observation."""
    with _crossing("reset"):
        _check_task(task)
        observation = through("environment_reset_answer", environment.reset(task, seed))
        _check_kind(observation, Observation, "reset returned")
        _check_messages(observation.messages, (Role.USER,))
        _require(bool(observation.messages), "the opening messages hold no user message")
        _check_tools(observation.tools)
        return observation


def step(environment: Environment, action: Action) -> StepResult:
    """Take a step and return its checked result."""
    with _crossing("step"):
        result = through("environment_step_answer", environment.step(action))
        _check_kind(result, StepResult, "step returned")
        _check_messages(result.messages, (Role.TOOL, Role.USER))
        _require(isinstance(result.rewards, tuple), "rewards is not a tuple of Reward")
        for reward in result.rewards:
            _check_reward(reward)
        for name in ("done", "tool_error"):
            _require(
                isinstance(getattr(result, name), bool), f"{name} is {getattr(result, name)!r}, not a bool"
            )
        _require(
            result.success is None or isinstance(result.success, bool),
            f"success is {result.success!r}, not a bool",
        )
        _require(result.done or bool(result.messages), "step returned no message and is not done")
        return result


def close(environment: Environment) -> None:
    """Close an environment."""
    with _crossing("close"):
        environment.close()


@contextmanager
def _crossing(place: str) -> Iterator[None]:
    try:
        reach(f"environment_{place}")
        yield
    except EnvironmentFailure:
        raise
    except (Exception, SystemExit) as error:
        # Whatever a user's code raises must end this attempt and nothing else; the cause stays attached.
        raise EnvironmentFailure(f"{place} raised {words(error)}") from error


def words(error: BaseException) -> str:
    """Return the kind and the text of what was raised."""
    try:
        text = str(error)
    except Exception as second:  # noqa: BLE001 (an exception whose text can't be had is still named)
        text = f"(its text can't be had: {type(second).__name__})"
    return f"{type(error).__name__}: {text}"


def _check_task(task: Task) -> None:
    """Refuse a task that asks for sampling parameters under a key that other programs obey."""
    if not any(f'"{key}"' in task.content for key in _SAMPLING_KEYS):
        return
    content = json.loads(task.content)
    for key in _SAMPLING_KEYS:
        asked = content.get(key) if isinstance(content, dict) else None
        if isinstance(asked, dict) and (names := sorted(_SAMPLING_NAMES & asked.keys())):
            raise EnvironmentOverrideError(
                f"task {task.task_id} of environment {task.env!r} asks for {key}.{names[0]} = {asked[names[0]]!r}; "
                "sampling parameters are frozen in the recipe's [sampling]: set them there, or rename the key"
            )


def _check_kind(value: Any, kind: type, place: str) -> None:
    """Require a record of exactly ``kind``: what a subclass adds would ride along unseen."""
    found = type(value)
    if found is kind:
        return
    _require(isinstance(value, kind), f"{place} {found.__name__}, not {kind.__name__}")
    added = sorted(name for name in {*dir(value)} - {*dir(kind)} if not name.startswith("_"))
    if names := [name for name in added if name in _SAMPLING_NAMES or name in _SAMPLING_KEYS]:
        raise EnvironmentOverrideError(
            f"{place} {found.__name__}, which adds {names[0]} = {getattr(value, names[0])!r} to {kind.__name__}; sampling "
            "parameters are frozen in the recipe's [sampling] and no environment can set them"
        )
    raise EnvironmentFailure(
        f"the environment broke its contract: {place} {found.__name__}, which adds {added} to {kind.__name__}; return a plain {kind.__name__}"
    )


def _check_messages(messages: Any, roles: tuple[Role, ...]) -> None:
    _require(isinstance(messages, tuple), f"messages is {type(messages).__name__}, not a tuple")
    for message in messages:
        _check_kind(message, Message, "a message is")
        _require(
            message.role in roles, f"a message has role {message.role!r}, allowed here: {', '.join(roles)}"
        )
        for text in (message.content, message.name):
            _require(isinstance(text, str), f"a message's text is {type(text).__name__}, not str")
            _require(_is_unicode(text), "a message's text holds a lone surrogate")
        if message.tool_calls:
            _check_calls(message.tool_calls)


def _check_calls(calls: Any) -> None:
    _require(isinstance(calls, tuple), f"tool_calls is {type(calls).__name__}, not a tuple of ToolCall")
    for call in calls:
        _check_kind(call, ToolCall, "a tool call is")
    _require(
        all(_is_text(text) for call in calls for text in (call.name, call.arguments)),
        "a tool call's name or arguments are not text",
    )


def _check_tools(tools: Any) -> None:
    _require(isinstance(tools, tuple), f"tools is {type(tools).__name__}, not a tuple of ToolSpec")
    for tool in tools:
        _check_kind(tool, ToolSpec, "a tool is")
    _require(
        all(_is_text(text) for tool in tools for text in (tool.name, tool.description, tool.parameters)),
        "a tool's name, description or parameters are not text",
    )


def _check_reward(reward: Any) -> None:
    _check_kind(reward, Reward, "a reward is")
    _require(isinstance(reward.name, str) and bool(reward.name), "a reward has no name")
    value = reward.value
    _require(
        isinstance(value, (int, float)) and math.isfinite(value),
        f"reward {reward.name} is {value!r}, not finite",
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and _is_unicode(value)


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _require(holds: bool, fault: str) -> None:  # noqa: FBT001 (reads as an assertion)
    if not holds:
        raise EnvironmentFailure(f"the environment broke its contract: {fault}")
