"""A scripted environment for tests of what runs environments: it can fail, dawdle and misbehave on request.

``echo`` says a word and wants it back: ``say w17`` is solved by calling ``echo(text=w17)`` any number of times and
answering ``w17``. It keeps the contract unless a switch is set.
"""

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from hotpot.envs import (
    BoundEnvironment,
    Demonstrator,
    Environment,
    EnvironmentSpec,
    Toolbox,
    bind,
    clip,
    error_reply,
)
from hotpot.errors import EnvironmentFailure, EnvironmentSpecError
from hotpot.ids import canonical_json, sha256_hex
from hotpot.types import (
    Action,
    Message,
    Observation,
    Reward,
    Role,
    Split,
    StepResult,
    Task,
    ToolCall,
)


class EchoParams(BaseModel):
    """Switches of the echo environment."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    num_calls: Annotated[int, Field(ge=0)] = 1
    """Calls the demonstrator makes before it answers."""
    fail_at_step: Annotated[int, Field(ge=0)] | None = None
    """Raise EnvironmentFailure at this step, counted from 1; at 0 in reset."""
    slow_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds every step takes."""
    malformed_observation: bool = False
    """Break the contract in reset: return a system message and no user message."""
    malformed_result: bool = False
    """Break the contract in step: go on with no message at all."""
    padding: Annotated[int, Field(ge=0)] = 0
    """Dots behind every reply to a call: long tool results, for tests of what happens where a context is full."""
    stateful: bool = False
    """Break the contract in step: number the replies across all environments of the process."""


_REPLIES = 0


def echo(text: str) -> str:
    """say a text back"""
    return text


_TOOLBOX = Toolbox(echo)


class EchoEnvironment(Environment):
    """One episode: it ends on an answer, which is right if it is the word."""

    def __init__(self, params: EchoParams) -> None:
        self._params = params
        self._word = ""
        self._step = 0
        self._state = "fresh"

    def reset(self, task: Task, seed: int) -> Observation:  # noqa: ARG002 - nothing random in it
        """Say the task's word."""
        if self._state != "fresh":
            raise EnvironmentFailure(
                f"an echo environment is single-use and this one is {self._state}; make a fresh one"
            )
        self._fail_at(0)
        self._state = "running"
        self._word = _word(task)
        role = Role.SYSTEM if self._params.malformed_observation else Role.USER
        return Observation(messages=(Message(role=role, content=f"say {self._word}"),), tools=_TOOLBOX.specs)

    def step(self, action: Action) -> StepResult:
        """Echo a call, refuse a malformed one, judge an answer."""
        if self._state != "running":
            raise EnvironmentFailure(f"a step needs a running echo environment and this one is {self._state}")
        self._step += 1
        self._fail_at(self._step)
        if self._params.slow_s:
            time.sleep(self._params.slow_s)
        if action.answer is not None:
            self._state = "over"
            success = action.answer.strip() == self._word
            return StepResult(
                messages=(),
                rewards=(Reward(name="echoed", value=float(success)),),
                done=True,
                success=success,
            )
        if self._params.malformed_result:
            return StepResult(messages=())
        call = action.tool_call
        reply = error_reply(clip(action.malformed or "")) if call is None else _TOOLBOX.run(call)
        content = reply.text + "." * self._params.padding + self._count()
        message = Message(role=Role.TOOL, content=content, name="" if call is None else clip(call.name))
        return StepResult(messages=(message,), tool_error=reply.error)

    def close(self) -> None:
        """End the episode."""
        self._state = "closed"

    def _fail_at(self, step: int) -> None:
        if self._params.fail_at_step == step:
            raise EnvironmentFailure(f"echo fails at step {step}, as fail_at_step tells it to")

    def _count(self) -> str:
        global _REPLIES  # noqa: PLW0603 - the breach that the switch is for
        if not self._params.stateful:
            return ""
        _REPLIES += 1
        return f" {_REPLIES}"


class EchoDemonstrator(Demonstrator):
    """Calls ``echo`` num_calls times and answers the word."""

    def __init__(self, params: EchoParams, task: Task, seed: int) -> None:  # noqa: ARG002 - nothing random in it
        self._calls_left = params.num_calls
        self._word = _word(task)

    def act(self, observation: tuple[Message, ...]) -> Action:  # noqa: ARG002 - it knows the word
        """Return the next call, then the answer."""
        if self._calls_left:
            self._calls_left -= 1
            return Action(tool_call=ToolCall(name="echo", arguments=canonical_json({"text": self._word})))
        return Action(answer=self._word)


class FailingStarts:
    """Makes echo environments of which the first ``count`` fail in reset; for tests of retries. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()

    def make(self, params: EchoParams) -> EchoEnvironment:
        """Return a fresh environment, one that fails while there are failures left."""
        with self._lock:
            fails = self._left > 0
            self._left -= fails
        return EchoEnvironment(params.model_copy(update={"fail_at_step": 0}) if fails else params)


def echo_prompt(_params: EchoParams) -> str:
    """Return the system prompt."""
    return "say it back."


def echo_task(_params: EchoParams, split: Split, seed: int, index: int) -> Task:
    """Return a task with a word of its own: even numbers in training, odd ones in hold-out."""
    rng = Random(int(sha256_hex(f"echo\n{split.value}\n{seed}\n{index}")[:16], 16))
    number = 2 * int(rng.random() * 10**6) + (split is Split.HOLDOUT)
    return Task(env="echo", split=split, content=canonical_json({"word": f"w{number}"}))


def verify_echo(_params: EchoParams, task: Task) -> None:
    """Check that the word is of the task's split."""
    if (int(_word(task)[1:]) % 2 == 1) != (task.split is Split.HOLDOUT):
        raise EnvironmentSpecError(
            f"task {task.task_id}: its word is of the other split; draw tasks with the spec"
        )


def _word(task: Task) -> str:
    return str(json.loads(task.content)["word"])


ECHO = EnvironmentSpec(
    name="echo",
    declared="1",
    params=EchoParams,
    package=__name__,
    reward_package=__name__,
    system_prompt=echo_prompt,
    make=EchoEnvironment,
    task=echo_task,
    verify=verify_echo,
    demonstrator=EchoDemonstrator,
    reward_params=(),
)
"""Declaration of the echo environment; not installed under an entry point."""


def echo_environment(params: Mapping[str, Any] | None = None, *, failing_starts: int = 0) -> BoundEnvironment:
    """Return the echo environment, bound. Of those it makes, the first ``failing_starts`` fail in reset.

    With ``failing_starts`` its version is marked unverifiable, since a counter is behind it.
    """
    if not failing_starts:
        return bind(ECHO, params)
    return bind(replace(ECHO, make=FailingStarts(failing_starts).make), params, allow_unverifiable=True)
