"""Whose turn it is, and what comes of it: each side has stated settings, each setting its rounds, a side its best setting.

Pure: knows no engine and no clock.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol


class Side(Protocol):
    """A running side with one of its settings."""

    def warm(self) -> None:
        """Do a short round that is not counted."""

    def round(self, number: int) -> float:
        """Do round ``number``; return its seconds."""

    def close(self) -> None:
        """End it."""


@dataclass(slots=True)
class Measured:
    """Seconds of the rounds, by setting."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def best(self) -> str:
        """The setting with the least median."""
        return min(self.seconds, key=self.median)

    def median(self, setting: str) -> float:
        """Median seconds of a round with ``setting``."""
        return statistics.median(self.seconds[setting])

    def rate(self, tokens: int) -> float:
        """Tokens a second with the best setting, of rounds of ``tokens``."""
        return tokens / self.median(self.best)


def in_turns(
    ours: Mapping[str, Callable[[], Side]], theirs: Mapping[str, Callable[[], Side]], rounds: int
) -> tuple[Measured, Measured]:
    """Measure both sides: setting by setting a process of each, warmed up, then their rounds in turn.

    Where one side has more settings than the other, these run on their own.
    """
    found = Measured(), Measured()
    for pair in zip_longest(ours.items(), theirs.items()):
        _measure([(one, into) for one, into in zip(pair, found, strict=True) if one is not None], rounds)
    return found


def _measure(sides: Sequence[tuple[tuple[str, Callable[[], Side]], Measured]], rounds: int) -> None:
    running: list[tuple[str, Side, Measured]] = []
    try:
        for (name, start), into in sides:
            side = start()
            running.append((name, side, into))
            side.warm()
        for number in range(rounds):
            for name, side, into in running:
                into.seconds.setdefault(name, []).append(side.round(number))
    finally:
        for _, side, _ in running:
            side.close()


def describe(name: str, measured: Measured, tokens: int) -> str:
    """Return one line for the reader: each setting's rounds, and the best rate."""
    rounds = "; ".join(
        f"{setting}: {' '.join(f'{seconds:.2f}' for seconds in of_it)} s"
        for setting, of_it in measured.seconds.items()
    )
    return f"{name}: {rounds}; best {measured.best}, {measured.rate(tokens):.1f} tokens/s"
