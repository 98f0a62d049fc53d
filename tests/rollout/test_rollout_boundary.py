"""What an environment raises or returns against its contract is a failure, and no trajectory."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from episode_parts import ANSWER, make_engine, make_episode, play
from rollout_parts import TOOL, ScriptedEnvironment, done, message, reply

from hotpot.errors import EnvironmentFailure
from hotpot.types import Message, Observation, Reward, Role, StepResult


def _raise(error: BaseException) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


OPENING = Observation(messages=(message("user", "a"),), tools=())
BAD_OPENINGS = {
    "raises": (_raise(KeyError("db")), "reset raised KeyError: 'db'"),
    "exits": (_raise(SystemExit(3)), "reset raised SystemExit"),
    "unspeakable": (_raise(_Unspeakable()), "_Unspeakable"),
    "failure": (_raise(EnvironmentFailure("server down")), "^server down$"),
    "none": (lambda: None, "NoneType"),
    "empty": (Observation(messages=(), tools=()), "no user message"),
    "system": (Observation(messages=(message("system", "a"),), tools=()), "role"),
    "assistant": (
        Observation(messages=(message("user", "a"), message("assistant", "b")), tools=()),
        "role",
    ),
    "list": (dataclasses.replace(OPENING, messages=[message("user", "a")]), "list, not a tuple"),  # type: ignore[arg-type]
    "text": (dataclasses.replace(OPENING, messages=("a",)), "str, not Message"),  # type: ignore[arg-type]
    "bytes": (dataclasses.replace(OPENING, messages=(Message(role=Role.USER, content=b"a"),)), "bytes"),  # type: ignore[arg-type]
    "surrogate": (dataclasses.replace(OPENING, messages=(message("user", "\ud800"),)), "surrogate"),
    "tools": (dataclasses.replace(OPENING, tools=None), "tools"),  # type: ignore[arg-type]
    "tool list": (
        dataclasses.replace(OPENING, tools=(dataclasses.replace(TOOL, name=["echo"]),)),  # type: ignore[arg-type]
        "not text",
    ),
    "calls": (
        dataclasses.replace(OPENING, messages=(Message(role=Role.USER, content="a", tool_calls=("f",)),)),  # type: ignore[arg-type]
        "str, not ToolCall",
    ),
}


@pytest.mark.parametrize("name", BAD_OPENINGS)
def test_a_bad_opening_is_a_failure(name: str) -> None:
    opening, words = BAD_OPENINGS[name]
    with pytest.raises(EnvironmentFailure, match=words):
        make_episode(ScriptedEnvironment([], opening)).start()


BAD_RESULTS = {
    "raises": (_raise(OSError("disk")), "step raised OSError: disk"),
    "ends": (_raise(StopIteration()), "step raised StopIteration"),
    "failure": (_raise(EnvironmentFailure("server down")), "^server down$"),
    "none": (None, "NoneType"),
    "empty": (StepResult(messages=()), "no message and is not done"),
    "assistant": (StepResult(messages=(message("assistant", "a"),)), "role"),
    "list": (StepResult(messages=[message("tool", "a")]), "not a tuple"),  # type: ignore[arg-type]
    "number": (StepResult(messages=(Message(role=Role.TOOL, content=5),)), "int, not str"),  # type: ignore[arg-type]
    "nan": (dataclasses.replace(done(), rewards=(Reward(name="a", value=float("nan")),)), "not finite"),
    "reward text": (dataclasses.replace(done(), rewards=(Reward(name="a", value="1"),)), "not finite"),  # type: ignore[arg-type]
    "nameless": (dataclasses.replace(done(), rewards=(Reward(name="", value=1.0),)), "no name"),
    "bare reward": (dataclasses.replace(done(), rewards=(1.0,)), "float, not Reward"),  # type: ignore[arg-type]
    "reward list": (dataclasses.replace(done(), rewards=[]), "rewards"),  # type: ignore[arg-type]
    "success": (dataclasses.replace(done(), success=1), "success"),  # type: ignore[arg-type]
    "done": (dataclasses.replace(done(), done=1), "done is 1"),  # type: ignore[arg-type]
    "error": (reply(tool_error="yes"), "tool_error"),
}


@pytest.mark.parametrize("name", BAD_RESULTS)
def test_a_bad_result_is_a_failure_and_no_trajectory(name: str) -> None:
    result, words = BAD_RESULTS[name]
    episode = make_episode(ScriptedEnvironment([result]))
    with pytest.raises(EnvironmentFailure, match=words):
        play(episode, make_engine([ANSWER]))
    assert not episode.finished
    with pytest.raises(EnvironmentFailure, match="no trajectory"):
        episode.trajectory()


def test_an_environment_that_cannot_be_made_or_closed_is_a_failure() -> None:
    with pytest.raises(EnvironmentFailure, match="make raised RuntimeError: no port"):
        make_episode(_raise(RuntimeError("no port"))).start()

    class Sticky(ScriptedEnvironment):
        def close(self) -> None:
            super().close()
            raise RuntimeError("stuck")

    environment = Sticky([])
    episode = make_episode(environment)
    episode.start()
    with pytest.raises(EnvironmentFailure, match="close raised RuntimeError: stuck"):
        episode.close()
    episode.close()
    assert environment.closed == 1


def test_keyboard_interrupt_is_no_failure() -> None:
    with pytest.raises(KeyboardInterrupt):
        make_episode(ScriptedEnvironment([], _raise(KeyboardInterrupt()))).start()
