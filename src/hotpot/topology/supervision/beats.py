"""Beats: how far each part of a run has come, and whether it has anything to do.

A beat says progress, not liveness: a part that answers and gets nowhere does not progress. What has no work is never dead,
however long it is quiet.

Owns the records and how each part's state becomes one. Reads no clock and knows no part's insides.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from hotpot.rollout.actors import ActorState


class PartKind(StrEnum):
    """What a part is; from it follows what is done where it is dead (:mod:`hotpot.topology.supervision.supervisor`)."""

    ACTOR = "actor"
    ENGINE = "engine"
    LEARNER = "learner"
    STORE = "store"
    QUEUE = "queue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """How one part stands at one moment.

    ``progress`` is any number that changes with every piece of work done; ``work`` counts what waits for the part or is
    under way in it, 0 where there is nothing. ``patience_s`` is how long one piece of work may lawfully take: the part is
    not taken for dead before. ``broken`` is why it says itself that it can't go on, empty where it can.
    """

    part: str
    kind: PartKind
    progress: float
    work: int
    patience_s: float = 0.0
    broken: str = ""


def actor_beats(states: Iterable[ActorState], *, call_timeout_s: float) -> list[Beat]:
    """Return a beat of each actor. A call may take ``call_timeout_s`` seconds until it counts as hung itself."""
    return [
        Beat(
            part=state.actor_id,
            kind=PartKind.ACTOR,
            progress=state.progress,
            work=state.calls,
            patience_s=call_timeout_s,
            broken=state.broken,
        )
        for state in states
    ]


def engine_beat(part: str, *, progress: float, requests: int, patience_s: float = 0.0) -> Beat:
    """Return the beat of an engine: ``progress`` in tokens, or in answers where tokens are not seen to come (then one request
    may take ``patience_s`` seconds), and the requests in it."""
    return Beat(part=part, kind=PartKind.ENGINE, progress=progress, work=requests, patience_s=patience_s)


def learner_beat(part: str, *, busy: bool, beat: tuple[int, float]) -> Beat:
    """Return the beat of the learner, of what :meth:`hotpot.topology.learning.protocol.Learning.beat` returns."""
    return Beat(part=part, kind=PartKind.LEARNER, progress=beat[0], work=int(busy))


def store_beat(part: str, *, archived: float, backlog: int) -> Beat:
    """Return the beat of the store's way into the lake: log segments ``archived`` so far, and those that wait.

    Where no count of the archived is at hand, minus ``backlog`` will do: it changes whenever one goes or comes.
    """
    return Beat(part=part, kind=PartKind.STORE, progress=archived, work=backlog)


def queue_beat(part: str, *, moved: float, waiting: int) -> Beat:
    """Return the beat of the queue: trajectories that went in or out so far, and those that wait for a learner at rest (0
    where the learner is busy)."""
    return Beat(part=part, kind=PartKind.QUEUE, progress=moved, work=waiting)
