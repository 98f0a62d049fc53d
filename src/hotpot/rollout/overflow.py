"""What becomes of a context that is getting full: the one place where that is decided.

::

                      leaves the reserve                    the model may be asked
    next prompt ──────────────────────► KEEP     SEGMENT ─────────────────────────► ASK ──► note ──► SEGMENT window
         │                                          ▲                                         │ cut, empty, too long
         └──► the window that keeps most and leaves it: TRUNCATE ◄────────────────────────────┘
                     │ none leaves any room
                     └──► END

Owns the decision and nothing else: it is given lengths in tokens and knows no token, template, engine or environment. An
*exchange* is what the model said and all that the environment answered; the *opening* is what stands before the first.
A *window* is the opening, a bridge (a fixed marker, or the note that was handed over) and the newest exchanges, whole.

Invariants: a window that is chosen leaves room for at least one token, and is shorter than what it stands for; the newest
exchange is never left out; an exchange is left out only after all older ones; equal lengths give equal decisions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Policy = Literal["end", "truncate", "segment"]


class Verdict(StrEnum):
    """What to do about the next prompt."""

    KEEP = "keep"  # it goes out as it is
    SHORTEN = "shorten"  # the window goes out in its place
    ASK = "ask"  # the model writes a note first; the window is for the case that none comes of it
    END = "end"  # there is no room: the episode ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Sizes that hold for a whole episode, in tokens.

    ``context`` holds prompt and output. ``step`` is the longest output. ``request`` is what asking for a note adds to the
    context and ``note`` the longest note, both 0 where none is ever asked for.
    """

    context: int
    step: int
    request: int = 0
    note: int = 0

    def leaves_reserve(self, length: int) -> bool:
        """Whether a prompt of ``length`` leaves room for the longest step, and for a note after it."""
        return length + self.step + self.request + self.note <= self.context

    def holds(self, length: int) -> bool:
        """Whether a prompt of ``length`` leaves room for a token at all."""
        return length < self.context

    def allows_note(self, length: int) -> bool:
        """Whether the longest note fits behind a request that makes the context ``length`` long."""
        return self.note > 0 and length + self.note <= self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of the parts of a conversation in tokens, template text aside: the least that a window needs.

    ``exchanges`` from the oldest to the newest, at least one.
    """

    opening: int
    exchanges: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Which exchanges stay: all but the ``left_out`` oldest. ``bridged``: something stands in their place."""

    left_out: int
    bridged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, and the window where something is left out."""

    verdict: Verdict
    window: Window | None = None


Measure = Callable[[Window], int]
"""The length in tokens of the whole prompt that shows a window."""

_KEEP, _END = Decision(verdict=Verdict.KEEP), Decision(verdict=Verdict.END)


def decide(
    policy: Policy, room: Room, lengths: Lengths, *, whole: int, asked: int, measure: Measure, noted: bool
) -> Decision:
    """Decide what becomes of the next prompt.

    ``whole`` is its length as it is, ``asked`` that of the context in which the model would be asked for a note, ``noted``
    whether a note was handed over before. What has room for a token but not for the reserve is shortened if that helps, and
    goes out with what room there is if it does not.
    """
    if policy == "end":
        return _KEEP if room.holds(whole) else _END
    if room.leaves_reserve(whole):
        return _KEEP
    window = choose(room, lengths, whole=whole, measure=measure, noted=noted)
    if window is None:
        return _KEEP if room.holds(whole) else _END
    older = len(lengths.exchanges) > 1
    if policy == "segment" and older and room.allows_note(asked):
        return Decision(verdict=Verdict.ASK, window=window)
    return Decision(verdict=Verdict.SHORTEN, window=window)


def choose(room: Room, lengths: Lengths, *, whole: int, measure: Measure, noted: bool) -> Window | None:
    """Return the window that leaves out least and leaves the reserve, or the shortest that leaves any room.

    None where no window is shorter than ``whole`` and leaves room. A bridge is given up only where nothing else helps.
    """
    newest = len(lengths.exchanges) - 1
    for left_out in range(_first_promising(room, lengths), newest + 1):
        window = Window(left_out=left_out, bridged=True)
        if room.leaves_reserve(measure(window)):
            return window
    last = [Window(left_out=newest, bridged=True)] if newest else []
    if newest or noted:
        last.append(Window(left_out=newest, bridged=False))
    return next((window for window in last if measure(window) < whole and room.holds(measure(window))), None)


def hand_over(room: Room, lengths: Lengths, measure: Measure, *, whole: int) -> Window | None:
    """Return the window behind a note: the newest exchange alone; None where that has no room or gains none."""
    window = Window(left_out=len(lengths.exchanges) - 1, bridged=True)
    length = measure(window)
    return window if room.holds(length) and length < whole else None


def _first_promising(room: Room, lengths: Lengths) -> int:
    """Return the fewest exchanges, at least one, without which the rest can leave the reserve."""
    sizes: Sequence[int] = lengths.exchanges
    left = lengths.opening + sum(sizes)
    for left_out, size in enumerate(sizes):
        if left_out and room.leaves_reserve(left):
            return left_out
        left -= size
    return len(sizes)
