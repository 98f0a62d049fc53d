"""What faults do: the exception of each part, the garbage of each answer.

Knows the records that pass, and what their contracts forbid. Nothing here waits or ends a process.
"""

import errno
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from hotpot.errors import EngineError, EnvironmentFailure, HotpotError, LearnerError
from hotpot.testing.faults.plan import Fault
from hotpot.types import Generation, Message, Reward, Role, StepResult
from hotpot.versions import Version


class InjectedCrash(RuntimeError):
    """An exception that no code expects, raised by a fault."""


_DISK = ("log", "wal", "lake", "checkpoint", "before", "after")
"""First words of places where a device is written to."""


def failure(fault: Fault) -> Exception:
    """Return what infrastructure raises where the fault lies."""
    words = f"injected: {fault}"
    if fault.part in _DISK:
        return OSError(errno.ENOSPC, words)
    if fault.part == "ledger":
        return sqlite3.OperationalError(words)
    kinds: dict[str, type[Exception]] = {
        "environment": EnvironmentFailure,
        "engine": EngineError,
        "learner": LearnerError,
        "actor": ConnectionResetError,
    }
    # Our own parts name themselves in what they raise; a device doesn't, whoever uses it has to.
    return kinds.get(fault.part, HotpotError)(f"the {fault.part} refused: {words}")


def garbage(place: str, value: Any, rng: Random) -> tuple[Any, str] | None:
    """Return what takes the stead of ``value`` and a word for it; None where this value has nothing to spoil."""
    if place == "engine_step_answer":
        return _spoilt_generation(value, rng) if value else None
    spoilers = _SPOILERS.get(place, _ANYTHING)
    name, spoil = rng.choice(spoilers)
    return spoil(value), name


def upgraded(version: Version) -> Version:
    """Return the version that an environment has after somebody installed another release of it."""
    return replace(version, version=f"{version.version.partition('+')[0]}+upgraded")


def _spoilt_generation(answers: Sequence[Generation], rng: Random) -> tuple[list[Generation], str]:
    which = rng.randrange(len(answers))
    name, spoil = rng.choice(_GENERATIONS)
    return [*answers[:which], spoil(answers[which]), *answers[which + 1 :]], name


Spoil = Callable[[Any], Any]

_GENERATIONS: tuple[tuple[str, Callable[[Generation], Generation]], ...] = (
    ("answer to another request", lambda one: replace(one, request_id=f"{one.request_id}-other")),
    ("no tokens", lambda one: replace(one, tokens=one.tokens[:0])),
    ("a log-probability too few", lambda one: replace(one, behaviour_logprobs=one.behaviour_logprobs[1:])),
    ("log-probabilities not a number", lambda one: replace(one, model_logprobs=one.model_logprobs * np.nan)),
    ("positive log-probabilities", lambda one: replace(one, behaviour_logprobs=abs(one.model_logprobs) + 1)),
    ("tokens of no vocabulary", lambda one: replace(one, tokens=one.tokens + 1_000_000)),
    ("versions that cover nothing", lambda one: replace(one, versions=())),
)

_ANYTHING: tuple[tuple[str, Spoil], ...] = (
    ("nothing", lambda _: None),
    ("a number", lambda _: 42),
    ("text", lambda _: "garbage"),
)

_SPOILERS: dict[str, tuple[tuple[str, Spoil], ...]] = {
    "actor_message_answer": (
        ("noise", lambda _: b"noise " * 8),
        ("a flipped bit", lambda frame: frame[:-1] + bytes([frame[-1] ^ 1])),
        ("half a frame", lambda frame: frame[: len(frame) // 2]),
        ("noise ahead", lambda frame: b"print" + frame),
    ),
    "environment_reset_answer": (
        *_ANYTHING,
        ("no messages", lambda one: replace(one, messages=())),
        (
            "a system message",
            lambda one: replace(one, messages=(Message(role=Role.SYSTEM, content="obey"), *one.messages)),
        ),
        ("text instead of messages", lambda one: replace(one, messages="hello")),
        ("a lone surrogate", lambda one: replace(one, messages=(Message(role=Role.USER, content="\ud800"),))),
        ("tools that are none", lambda one: replace(one, tools=(7,))),
    ),
    "environment_step_answer": (
        *_ANYTHING,
        ("neither done nor a message", lambda _: StepResult(messages=())),
        (
            "a reward not a number",
            lambda one: replace(one, rewards=(Reward(name="right", value=float("nan")),)),
        ),
        ("an endless reward", lambda one: replace(one, rewards=(Reward(name="right", value=float("inf")),))),
        ("a tool error that is a word", lambda one: replace(one, tool_error="no")),
        ("text instead of messages", lambda one: replace(one, messages="hello")),
        ("no rewards at all", lambda one: replace(one, rewards=None)),
    ),
    "engine_publish_answer": (
        ("a version long gone", lambda one: replace(one, policy_version=0)),
        ("another checksum", lambda one: replace(one, checksum="0" * 16)),
    ),
    "engine_info_answer": (
        ("a version long gone", lambda one: replace(one, policy_version=0)),
        ("another checksum", lambda one: replace(one, checksum="0" * 16)),
        ("another precision", lambda one: replace(one, precision="int4")),
    ),
}
