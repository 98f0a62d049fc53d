"""What goes to a server and what comes back, as values: one HTTP call, one answer in a server's own words.

Owns the two records, the interface of a *wire* (one way of putting a request into JSON), and reading JSON that others
wrote: each value is checked for its type before it is used, and what is wrong is a :class:`WireError`, which never leaves
this package. Pure: no socket, no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hotpot.types import GenerationRequest


class WireError(Exception):
    """A server's answer is not what the protocol says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One POST: ``body`` becomes JSON."""

    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Sampled tokens ``start`` to ``end``, exclusive, that the server sampled under the weights it calls ``label``."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a server says of one request; nothing of it is believed yet.

    ``stretches`` is None where it says nothing of its weights, ``reused_tokens`` 0 where it says nothing of its cache.
    """

    model: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    prompt_tokens: int
    reused_tokens: int
    stretches: tuple[Stretch, ...] | None = None


class Wire(Protocol):
    """One way of asking for tokens over HTTP."""

    def call(self, request: GenerationRequest, *, max_tokens: int, salt: str) -> Call:
        """Return the call that asks for at most ``max_tokens`` tokens; ``salt`` keeps cached prefixes of other weights out."""

    def read(self, payload: Any) -> Answer:
        """Return the answer in ``payload``, parsed JSON. Raises :class:`WireError`."""


class ScoringWire(Wire, Protocol):
    """A wire that can also ask what the raw model says of tokens that are there already."""

    def scoring_call(self, request: GenerationRequest, tokens: Sequence[int], *, salt: str) -> Call:
        """Return the call that scores ``tokens`` behind the request's prompt."""

    def read_scores(
        self, payload: Any, tokens: Sequence[int]
    ) -> tuple[tuple[float, ...], tuple[Stretch, ...]]:
        """Return the log-probabilities of ``tokens`` at temperature 1, and under which weights. Raises :class:`WireError`."""


def one_choice(payload: Any) -> Mapping[str, Any]:
    """Return the only entry of ``choices``. Raises :class:`WireError`."""
    choices = field(mapping(payload, "the answer"), "choices", list)
    if len(choices) != 1:
        raise WireError(f"{len(choices)} choices where one was asked for")
    return mapping(choices[0], "the choice")


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """Return ``value``, a JSON object. Raises :class:`WireError`."""
    if not isinstance(value, dict):
        raise WireError(f"{name} is {_shown(value)}, not an object")
    return value


def field(values: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return ``values[name]``, of type ``kind``. Raises :class:`WireError`."""
    value = values.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise WireError(f"{name} is {_shown(value)}, not of type {kind.__name__}")
    return value


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Return ``value``, a list of whole numbers. Raises :class:`WireError`."""
    if not isinstance(value, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in value):
        raise WireError(f"{name} is {_shown(value)}, not a list of token ids")
    return tuple(value)


def numbers(values: Sequence[Any], name: str) -> tuple[float, ...]:
    """Return ``values`` as floats; JSON null and text are refused. Raises :class:`WireError`."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WireError(f"{name} holds {_shown(value)}, not a number")
    return tuple(float(value) for value in values)


def usage(payload: Mapping[str, Any]) -> tuple[int, int]:
    """Return prompt tokens and how many of them came from the server's cache."""
    found = mapping(payload.get("usage"), "usage")
    details = found.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return field(found, "prompt_tokens", int), cached if isinstance(cached, int) else 0


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
