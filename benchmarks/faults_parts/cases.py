"""Which faults are tried: each kind that means something at each named place, and the runs that are to meet them.

Owns the list, and when in a run each fault bites. Knows no process and no judgement.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from hotpot.testing.faults import Fault, Kind

TOPOLOGIES = ("sync", "batched_async", "async")

FOR_EVER = None

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Faults that one run meets, and what is asked of the message where they end it.

    ``faults`` are met by the run as it starts, ``on_resume`` by the process that takes it up first (if that is not empty).
    ``culprits`` are words of which the last message, or the watchdog's file, has one. ``overrides`` are the recipe's.
    """

    name: str
    faults: tuple[Fault, ...]
    culprits: tuple[str, ...]
    on_resume: tuple[Fault, ...] = ()
    overrides: tuple[str, ...] = ()
    topologies: tuple[str, ...] = TOPOLOGIES
    processes: bool = False
    """Whether actors have processes of their own, in topologies that can have them."""

    @property
    def waits(self) -> bool:
        """Whether most of the case's time goes by until somebody notices."""
        return any(fault.kind in (Kind.HANG, Kind.FREEZE) for fault in self.faults)

    def settings(self, topology: str) -> tuple[str, ...]:
        """Return the recipe's overrides in a topology."""
        own = ("actors.kind=processes",) if self.processes and topology != "sync" else ()
        return (*self.overrides, *own)

    def at(self, turn: int, seed: int) -> "Case":
        """Return the case as it is tried in its ``turn`` (from 0): at another pass of its place each time."""
        return replace(self, faults=tuple(_moved(fault, turn, seed) for fault in self.faults))


CULPRITS = {
    "environment": ("environment", "actor"),
    "engine": ("engine",),
    "actor": ("actor",),
    "learner": ("learner", "learn"),
    "learning": ("learner",),
    "weights": ("learner",),
    "checkpoint": ("checkpoint", "save", "learner"),
    "log": ("log segment", "the log", "journal", "hotpot-log"),
    "wal": ("log segment", "the log", "journal", "hotpot-log"),
    "ledger": ("ledger",),
    "lake": ("lake", "archive"),
    "before": ("ledger", "lake", "archive"),
    "after": ("ledger", "lake", "archive"),
    "kept": ("environment", "engine", "learner", "store"),
    "evaluated": ("evaluat",),
    "publish": ("publish",),
}
"""By the first word of a place: what the message may call the part."""

ENDINGS = (Kind.CRASH, Kind.EXIT, Kind.KILL)
WAITS = (Kind.HANG, Kind.SLOW)

PLACES: dict[str, tuple[Kind, ...]] = {
    "environment_make": (*ENDINGS, *WAITS, Kind.FAIL),
    "environment_reset": (*ENDINGS, *WAITS, Kind.FAIL),
    "environment_step": (*ENDINGS, *WAITS, Kind.FAIL, Kind.FREEZE, Kind.DEATH),
    "environment_close": (Kind.CRASH, Kind.HANG, Kind.FAIL),
    "environment_reset_answer": (Kind.GARBAGE,),
    "environment_step_answer": (Kind.GARBAGE,),
    "engine_submit": (Kind.CRASH, Kind.HANG, Kind.FAIL),
    "engine_step": (Kind.CRASH, *WAITS, Kind.FAIL, Kind.DEATH),
    "engine_info": (Kind.CRASH, Kind.HANG, Kind.FAIL),
    "engine_publish": (Kind.CRASH, *WAITS, Kind.FAIL),
    "engine_step_answer": (Kind.GARBAGE,),
    "engine_publish_answer": (Kind.GARBAGE,),
    "learner_begun": (*ENDINGS, *WAITS, Kind.FAIL, Kind.FREEZE),
    "learner_step": (*ENDINGS, *WAITS, Kind.FAIL),
    "checkpoint_weights": (*ENDINGS, *WAITS, Kind.FAIL),
    "log_write": (Kind.CRASH, Kind.KILL, *WAITS, Kind.FAIL),
    "log_sync": (Kind.CRASH, Kind.KILL, *WAITS, Kind.FAIL),
    "before_ledger": (Kind.CRASH, Kind.KILL),
    "after_ledger": (Kind.CRASH, Kind.KILL),
    "ledger_before_commit": (Kind.CRASH, Kind.HANG, Kind.FAIL),
    "lake_before_updates": (Kind.CRASH, Kind.KILL, *WAITS, Kind.FAIL),
    "lake_after_updates": (Kind.CRASH, Kind.KILL),
    "lake_sync": (Kind.CRASH, Kind.HANG, Kind.FAIL),
    "before_watermark": (Kind.CRASH, Kind.KILL),
    "evaluated": (Kind.CRASH, Kind.KILL),
    "actor_begun": (*ENDINGS, Kind.HANG),
    "actor_message_answer": (*ENDINGS, *WAITS, Kind.FREEZE, Kind.GARBAGE),
    "learner_built": (*ENDINGS, Kind.HANG),
    "learning_began": (*ENDINGS, Kind.HANG),
    "weights_written": (*ENDINGS, Kind.HANG),
    "learner_answers": (*ENDINGS, Kind.HANG),
    "learner_saved": (*ENDINGS, Kind.HANG),
}
"""What is tried where."""

ONLY_WITH_PROCESSES = ("actor", "learning", "weights", "learner_built", "learner_answers", "learner_saved")
"""Beginnings of the places that topology ``sync`` does not pass."""

_UPDATES = ("engine_publish", "engine_publish_answer", "learner_begun", "learning_began", "weights_written")
SELDOM = {
    **dict.fromkeys((*_UPDATES, "learner_answers", "learner_saved", "checkpoint_weights"), 3),
    **dict.fromkeys(("actor_begun", "learner_built"), 1),
    "evaluated": 2,
    # All updates may go to the lake together.
    **dict.fromkeys(("lake_before_updates", "lake_after_updates"), 1),
    "learner_step": 6,
    **dict.fromkeys(("before_watermark", "lake_sync", "actor_message_answer"), 4),
}
"""How often a short run passes a place, where that is not often."""

PASSES = 9
"""As many passes as any other place certainly has, in each process that passes there at all."""


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for place, kinds in PLACES.items():
        for kind in kinds:
            yield _case(place, kind)
    yield from _outages()
    yield from _clocks()
    yield from _upgrades()
    yield _overflow()


def _case(place: str, kind: Kind) -> Case:
    part = place.partition("_")[0]
    fault = Fault(
        kind=kind,
        place=place,
        seconds=0.3 if kind is Kind.SLOW else HOUR_S,
        process="actors" if part == "actor" else "",
    )
    # A process that stands still can't tell; only where another one watches it is anything asked of it.
    watched = kind is Kind.FREEZE or place.startswith(ONLY_WITH_PROCESSES)
    return Case(
        name=f"{place}/{kind}",
        faults=(fault,),
        culprits=culprits(place),
        processes=part in ("actor", "environment"),
        topologies=TOPOLOGIES[1:] if watched else TOPOLOGIES,
    )


def culprits(place: str) -> tuple[str, ...]:
    """Return the words that name the part ``place`` lies in."""
    return CULPRITS[place.partition("_")[0]]


def chosen(names: Sequence[str], topologies: Sequence[str]) -> list[tuple[str, Case]]:
    """Return the cases whose name begins with one of ``names`` (all, where that is empty), by topology."""
    found = [one for one in cases() if not names or one.name.startswith(tuple(names))]
    return [(topology, one) for topology in topologies for one in found if topology in one.topologies]


def _outages() -> Iterator[Case]:
    """Yield faults that do not pass: storage that stays full, tools that stay down, engines that are slow for good."""
    for place in ("lake_before_updates", "log_write"):
        fault = Fault(kind=Kind.FAIL, place=place, times=FOR_EVER)
        yield Case(
            name=f"{place}/outage",
            faults=(fault,),
            culprits=culprits(place),
            overrides=("store.max_backlog=2", "store.backpressure_s=1", "store.flush_timeout_s=2"),
        )
    for place in ("environment_step", "engine_step"):
        slow = Fault(kind=Kind.SLOW, place=place, seconds=0.02, times=FOR_EVER)
        yield Case(name=f"{place}/always_slow", faults=(slow,), culprits=culprits(place))


def _clocks() -> Iterator[Case]:
    for place in ("environment_step", "learner_begun", "log_write"):
        for kind, seconds in (
            (Kind.WALL_JUMP, HOUR_S), (Kind.WALL_JUMP, -HOUR_S), (Kind.MONOTONIC_JUMP, HOUR_S),
        ):  # fmt: skip
            way = "forth" if seconds > 0 else "back"
            fault = Fault(kind=kind, place=place, seconds=seconds)
            every = tuple(word for words in CULPRITS.values() for word in words)
            yield Case(name=f"{place}/{kind}_{way}", faults=(fault,), culprits=every)


def _upgrades() -> Iterator[Case]:
    upgrade = Fault(kind=Kind.UPGRADE, place="environment_version_answer")
    yield Case(
        name="environment_version/upgrade_before_resume",
        faults=(Fault(kind=Kind.KILL, place="log_write", at=9),),
        on_resume=(upgrade,),
        culprits=("env version",),
    )
    yield Case(
        name="environment_version/partial_upgrade",
        faults=(replace(upgrade, process="actors"),),
        culprits=("environment",),
        topologies=TOPOLOGIES[1:],
        processes=True,
    )


def _overflow() -> Case:
    return Case(
        name="queue/overflow",
        faults=(Fault(kind=Kind.SLOW, place="learner_step", seconds=0.4, times=FOR_EVER),),
        culprits=("queue",),
        topologies=("async",),
        overrides=("queue.depth=16",),
    )


def _moved(fault: Fault, turn: int, seed: int) -> Fault:
    if fault.at != 1:
        return fault
    most = SELDOM.get(fault.place, PASSES)
    most = 1 if fault.kind is Kind.UPGRADE else most
    ats, rng = (1, (most + 1) // 2, most), Random(f"{seed} {turn} {fault.place} {fault.kind}")
    return replace(fault, at=ats[turn] if turn < len(ats) else rng.randint(1, most))
