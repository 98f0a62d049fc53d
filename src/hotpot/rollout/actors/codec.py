"""Records as JSON and back: what parent and child of an actor say to each other. Nothing is pickled.

Owns the messages and their text. A record is the list of its fields' values, in order; both sides run the same code, so
no names travel. Whatever does not come back as exactly the declared types raises :class:`GarbageError`.
"""

import json
import signal
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from hotpot.errors import EnvironmentFailure, EnvironmentOverrideError, HotpotError
from hotpot.rollout.actors.calls import Call, Reply

STACKS_SIGNAL = signal.SIGUSR1
"""Has a child write the stacks of its threads to its log, whatever it is at."""


class GarbageError(HotpotError):
    """What came over a pipe is not what the other side of it writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a child gets an environment from: its ``name`` in the mix, and what the registry is asked for.

    ``params`` is JSON. The versions are those that the parent computed.
    """

    name: str
    kind: str
    params: str
    perturbation: str
    unverifiable: bool
    env_version: str
    reward_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message to a child: who it is, and what it works with."""

    actor_id: str
    parent: int
    call_timeout_s: float
    max_hung: int
    beat_s: float
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A child has its environments."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    """A child can't make the environments of the run, for ``reason``, and ends."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A call for a child; its answer has the same ticket."""

    ticket: int
    call: Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What came of a call."""

    ticket: int
    reply: Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """How a child stands: calls that ended, and why it takes no more; empty where it does."""

    progress: int
    broken: str


Said = Hello | Ready | Unfit | Asked | Answered | Beat
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in typing.get_args(Said)}
_FAILURES: dict[str, type[EnvironmentFailure]] = {
    kind.__name__: kind for kind in (EnvironmentFailure, EnvironmentOverrideError)
}


def encode(said: Said) -> bytes:
    """Return a message as ASCII: JSON with every other character escaped, so lone surrogates pass too."""
    return json.dumps([type(said).__name__, _plain(said)], separators=(",", ":")).encode("ascii")


def decode(payload: bytes) -> Said:
    """Return the message. Raises :class:`GarbageError`."""
    try:
        kind, values = json.loads(payload)
        said: Said = _reader(_KINDS[kind])(values)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise GarbageError(f"not a message: {payload[:60]!r} ({type(error).__name__}: {error})") from error
    return said


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        kind: Any = type(value)
        return [_plain(getattr(value, name)) for name in _names(kind)]
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if isinstance(value, EnvironmentFailure):
        override = isinstance(value, EnvironmentOverrideError)
        return [(EnvironmentOverrideError if override else EnvironmentFailure).__name__, str(value)]
    return value


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@cache
def _reader(hint: Any) -> Callable[[Any], Any]:
    """Return what reads a value of the declared type ``hint``; it raises ValueError, TypeError or KeyError."""
    if isinstance(hint, types.UnionType):  # X | None
        (kind,) = (part for part in typing.get_args(hint) if part is not type(None))
        some = _reader(kind)
        return lambda value: None if value is None else some(value)
    if typing.get_origin(hint) is tuple:
        part = _reader(typing.get_args(hint)[0])
        return lambda value: tuple(part(one) for one in _exactly(list, value))
    if is_dataclass(hint):
        return _record_reader(typing.cast("type", hint))
    if hint is EnvironmentFailure:
        return lambda value: _FAILURES[value[0]](_exactly(str, value[1]))
    if issubclass(hint, StrEnum):
        return typing.cast("Callable[[Any], Any]", hint)
    if hint is float:  # whole numbers may stand for it, as in Python
        return lambda value: value if type(value) is int else _exactly(float, value)
    return lambda value: _exactly(hint, value)


def _record_reader(kind: type) -> Callable[[Any], Any]:
    names = _names(kind)
    hints = typing.get_type_hints(kind)
    readers = [_reader(hints[name]) for name in names]

    def read(value: Any) -> Any:
        parts = [reader(part) for reader, part in zip(readers, _exactly(list, value), strict=True)]
        return kind(**dict(zip(names, parts, strict=True)))

    return read


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
