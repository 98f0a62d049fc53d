"""The supervisor: who is taken for dead, and what becomes of it. A pure state machine.

::

    beats of all parts, now ──► turn() ──► decisions (replace, stop, warn) and events for the record
                                               │
                  the loop acts, and says what it did ──► replaced() ──► event

    silent with work for dead_after_s:    actor            ──► Replace, max_replacements times; then Stop
                                          engine, learner  ──► Stop
                                          store, queue     ──► Warn, once for each silence (the store ends the run itself)

Owns the judgement. Acts on nothing, reads no clock (the caller's monotonic one comes in), and has no thread.
A part that says itself that it is broken is treated like the dead, at once.
Invariants: a part without work, or one whose progress changed within its bound, is never taken for dead; one that stops
with work is, ``dead_after_s`` and two turns later at most; no pause between two turns of its own counts for more than a
quarter of ``dead_after_s``, so that nobody dies of a machine that slept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hotpot.config import SupervisionSection
from hotpot.topology.supervision.beats import Beat, PartKind
from hotpot.topology.supervision.counted_time import CountedTime

TURNS_PER_BEAT = 2
"""Turns that :attr:`Supervisor.due` asks for in one ``beat_s``: then a death is seen within ``dead_after_s + beat_s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """End an actor and put a fresh one in its place."""

    actor_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the run: it cannot go on, and ``culprit`` is why."""

    culprit: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Warn:
    """Tell the operator; the run goes on."""

    part: str
    reason: str


Decision = Replace | Stop | Warn
Event = tuple[str, dict[str, Any]]
"""Kind and detail of a row of table ``events``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """What came of one turn: what is to be done, in the order of the parts, and what goes on the record."""

    decisions: tuple[Decision, ...] = ()
    events: tuple[Event, ...] = ()


@dataclass(slots=True)
class _Part:
    progress: float
    since_s: float
    """Counted time since when it has been silent with work."""
    told: bool = False


class Supervisor:
    """Watches the parts of one run; a resumed run begins with a fresh one."""

    def __init__(self, settings: SupervisionSection) -> None:
        self._settings = settings
        self._clock = CountedTime(settings.dead_after_s / 4)
        self._parts: dict[str, _Part] = {}
        self._next_turn_s = self._next_beat_s = float("-inf")
        self._last_s = float("-inf")
        self._at_s = 0.0
        self._began_s: float | None = None
        self._gap_s = 0.0
        self.moves = 0
        self.replacements = 0
        self.dead_parts = 0

    def due(self, now_s: float) -> bool:
        """Return whether a turn is due: beats need to be gathered only then. True also where the clock was set back."""
        return now_s >= self._next_turn_s or now_s < self._last_s

    def turn(self, now_s: float, beats: Sequence[Beat]) -> Verdicts:
        """Hear how every part stands at ``now_s``, seconds of a monotonic clock; parts left out are forgotten.

        :attr:`moves` grows by each part whose progress changed: the progress of the whole.
        """
        at_s = self._at_s = self._clock.at(now_s)
        self._gap_s += self._clock.gap_s
        self._last_s, self._next_turn_s = now_s, now_s + self._settings.beat_s / TURNS_PER_BEAT
        self._began_s = now_s if self._began_s is None else self._began_s
        known = self._parts
        self._parts = {beat.part: self._heard(known.get(beat.part), beat, at_s) for beat in beats}
        decisions: list[Decision] = []
        events: list[Event] = []
        for beat in beats:
            part = self._parts[beat.part]
            silent_s = at_s - part.since_s
            late = bool(beat.work) and silent_s >= self._bound_s(beat)
            if not part.told and (beat.broken or late):
                decision, event = self._dead(part, beat, silent_s, at_s)
                decisions.append(decision)
                events.append(event)
        if self._gap_s > self._settings.dead_after_s:
            events.append(("supervision_gap", {"seconds": round(self._gap_s, 3)}))
        # On the record as often as is asked for, and whenever something was found.
        if events or now_s >= self._next_beat_s or now_s + self._settings.beat_s < self._next_beat_s:
            self._next_beat_s = now_s + self._settings.beat_s
            events.append(("beats", self._state(now_s - self._began_s, beats, at_s)))
            self._gap_s = 0.0
        return Verdicts(decisions=tuple(decisions), events=tuple(events))

    def replaced(self, actor_id: str, fresh_id: str, reason: str) -> Event:
        """Hear that the loop put actor ``fresh_id`` in the place of ``actor_id``; return the event that says so."""
        self._parts.pop(actor_id, None)
        detail = {
            "actor_id": actor_id,
            "fresh_id": fresh_id,
            "reason": reason,
            "replacements": self.replacements,
        }
        return "actor_replaced", detail

    def silent(self) -> str:
        """Return the part with work that has been silent for longest, and for how long; empty where there is none."""
        waiting = [(self._at_s - part.since_s, name) for name, part in self._parts.items()]
        silent_s, name = max(waiting, default=(0.0, ""))
        return f"{name}, silent for {silent_s:.0f} s" if silent_s else ""

    def _heard(self, part: _Part | None, beat: Beat, at_s: float) -> _Part:
        if part is None:
            return _Part(beat.progress, at_s)
        if part.progress != beat.progress:
            self.moves += 1
            return _Part(beat.progress, at_s)
        return part if beat.work else _Part(beat.progress, at_s)

    def _bound_s(self, beat: Beat) -> float:
        # What calls out its own time-out gets a beat to do so.
        patience_s = beat.patience_s + self._settings.beat_s if beat.patience_s else 0.0
        return max(self._settings.dead_after_s, patience_s)

    def _dead(self, part: _Part, beat: Beat, silent_s: float, at_s: float) -> tuple[Decision, Event]:
        silence = f"{beat.part} made no progress for {silent_s:.1f} s with {beat.work} waiting for it"
        reason = beat.broken or silence
        detail = {
            "part": beat.part,
            "kind": beat.kind.value,
            "silent_s": round(silent_s, 3),
            "work": beat.work,
            "progress": beat.progress,
            "broken": beat.broken,
        }
        if beat.kind in (PartKind.STORE, PartKind.QUEUE):
            part.told = True
            return Warn(part=beat.part, reason=reason), ("part_silent", detail)
        self.dead_parts += 1
        if beat.kind is PartKind.ACTOR and self.replacements < self._settings.max_replacements:
            self.replacements += 1
            part.since_s = at_s  # the fresh one begins now, should it carry the name of the old
            return Replace(actor_id=beat.part, reason=reason), (
                "part_dead",
                {**detail, "decision": "replace"},
            )
        part.told = True
        if beat.kind is PartKind.ACTOR:
            reason += f", and supervision.max_replacements = {self._settings.max_replacements} are used up"
        return Stop(culprit=beat.part, reason=reason), ("part_dead", {**detail, "decision": "stop"})

    def _state(self, elapsed_s: float, beats: Sequence[Beat], at_s: float) -> dict[str, Any]:
        parts = [
            {
                "part": beat.part,
                "kind": beat.kind.value,
                "progress": beat.progress,
                "work": beat.work,
                "silent_s": round(at_s - self._parts[beat.part].since_s, 3),
            }
            for beat in beats
        ]
        return {
            "elapsed_s": round(elapsed_s, 3),
            "parts": parts,
            "moves": self.moves,
            "replacements": self.replacements,
            "dead_parts": self.dead_parts,
        }
