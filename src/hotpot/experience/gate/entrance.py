"""The entrance: everything between records being brought and what the log is to hold of them.

::

    records ─► door (other programs') ─► attempts ─► breaker ─► rules ─► accepted | quarantine rows, events

Owns what the gate remembers between calls: the versions that were explained, each producer's breaker, and what forks of
the trajectories accepted last are compared with. Reads ledger
and record, writes nothing; the store logs what comes out as one frame.

Whose attempt a record of another program belongs to: its ``trajectory_id`` is its ``attempt_id``, or that and ``/...`` behind
it. An attempt that is leased is used; one the ledger does not know is leased with the append; one that ended is refused.
Attempts that are spelled as the run's own sampler spells them are the run's alone, whatever their state: another
program's record neither uses nor ends one.
"""

import hashlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from hotpot.config import GateSection
from hotpot.errors import StoreError
from hotpot.experience.gate.admission import PARENT_UNREADABLE, Judgement, judge
from hotpot.experience.gate.breaker import Breaker, BreakerPolicy
from hotpot.experience.gate.door import read_record
from hotpot.experience.gate.forks import FoundParents, ParentStep, parent_steps
from hotpot.experience.gate.gate import Refusal, claimed_attempt, part, quarantine_row, readable
from hotpot.experience.gate.known import KnownVersions
from hotpot.experience.gate.rules import Limits
from hotpot.experience.log.ledger import Lease, Ledger
from hotpot.experience.reading.reader import RunReader
from hotpot.experience.records.schema import to_table
from hotpot.ids import canonical_json, is_own_attempt
from hotpot.types import SCHEMA_VERSION, EventRow, QuarantineRow, Trajectory

_PARENTS = """
SELECT trajectory_id, segment, len(prompt_tokens) AS num_prompt, len(sampled_tokens) AS num_sampled, prefix_hash
FROM steps WHERE trajectory_id IN (SELECT unnest(?)) ORDER BY trajectory_id, step"""


REMEMBERED_PARENTS = 4_096
"""Trajectories accepted last whose lengths and hashes are kept, so that most forks are judged without a look at the record."""

_NO_FAULT_OF_THE_PRODUCER = frozenset({"breaker_open", PARENT_UNREADABLE})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Admitted:
    """What is to be logged of one call: tables of the accepted, quarantine rows of the refused, events, leases that
    the accepted attempts still need, and the leased attempts that end with a refusal, with the reason."""

    accepted: tuple[Trajectory, ...]
    refused: tuple[tuple[Any, Refusal], ...]
    quarantine: tuple[QuarantineRow, ...]
    tables: Mapping[str, pa.Table]
    events: tuple[EventRow, ...]
    leases: tuple[Lease, ...]
    dropped: Mapping[str, str]


class Entrance:
    """The gate of one run, with its memory. Not safe for several threads; the store holds its lock around it."""

    def __init__(self, run_folder: Path, limits: Limits, ledger: Ledger, settings: GateSection) -> None:
        self._folder = run_folder
        self._limits = limits
        self._ledger = ledger
        self.breaker = Breaker(
            BreakerPolicy(
                window=settings.breaker_window,
                min_records=settings.breaker_min_records,
                share=settings.breaker_share,
                probe_every=settings.breaker_probe_every,
                probes_to_close=settings.breaker_probes_to_close,
            )
        )
        self._numbers = itertools.count()
        self._parents: OrderedDict[str, list[ParentStep]] = OrderedDict()

    def recall(self) -> None:
        """Learn the versions that the run has explained so far. Raises StoreError where its record can't be read."""
        found = RunReader.open(self._folder).table("versions", ["kind", "version"]).to_pylist()
        known = KnownVersions.of((row["kind"], row["version"]) for row in found)
        self._limits = replace(self._limits, versions=known)

    def learn(self, rows: Collection[Any], trajectories: Collection[Trajectory] = ()) -> None:
        """Hear of rows and trajectories that are on record now."""
        self._limits = replace(self._limits, versions=self._limits.versions.with_rows(rows))
        for one in trajectories:
            self._parents[one.row.trajectory_id] = parent_steps(one)
        while len(self._parents) > REMEMBERED_PARENTS:
            self._parents.popitem(last=False)

    def admit(
        self, records: Sequence[Any], *, producer: str | None = None, versions: Collection[Any] = ()
    ) -> Admitted:
        """Judge one call's records. ``producer`` is None for trajectories of our own, else who brought them; ``versions``
        are rows that will be recorded with them.

        Never raises for what the records hold, nor where the record behind a fork can't be read: the fork is refused then
        (``parent_unreadable``), and its producer's breaker hears nothing of it.
        """
        limits = replace(self._limits, versions=self._limits.versions.with_rows(versions))
        read, before, unknown = self._read(records, foreign=producer is not None)
        before = self._hold(read, before, producer)
        judged = judge(read, limits, before=before, find_parents=self._find_parents)
        brought = {id(one): record for one, record in zip(read, records, strict=True)}
        refused = tuple((brought[id(one)], refusal) for one, refusal in judged.refused)
        quarantine = tuple(self._quarantine(record, refusal, producer) for record, refusal in refused)
        tables: dict[str, pa.Table] = {}
        if judged.accepted:
            tables |= {"steps": judged.steps, "trajectories": judged.rows}
        if quarantine:
            tables["quarantine"] = to_table("quarantine", quarantine)
        leases = {t.row.attempt_id: t for t in judged.accepted if t.row.attempt_id in unknown}
        return Admitted(
            accepted=judged.accepted,
            refused=refused,
            quarantine=quarantine,
            tables=tables,
            events=tuple(self._observe(judged, producer)),
            leases=tuple(Lease.of(each.row) for each in leases.values()),
            dropped=self._dropped(refused, foreign=producer is not None),
        )

    def event(self, kind: str, detail: Mapping[str, Any]) -> EventRow:
        """Return an event of the gate's at the run's position, now."""
        return EventRow(
            run_id=self._limits.run_id,
            kind=kind,
            detail=canonical_json(detail),
            update=max(0, self._ledger.mark("update")),
            policy_version=max(0, self._ledger.mark("policy_version")),
            time_us=_now_us(),
            schema_version=SCHEMA_VERSION,
        )

    def _read(
        self, records: Sequence[Any], *, foreign: bool
    ) -> tuple[list[Any], list[Refusal | None], frozenset[str]]:
        """Return each record as a trajectory where it is one, why it is refused already, and the attempts to lease."""
        if not foreign:
            return list(records), [None] * len(records), frozenset()
        found = [read_record(record) for record in records]
        read = [
            record if isinstance(one, Refusal) else one for one, record in zip(found, records, strict=True)
        ]
        trajectories = [one for one in found if isinstance(one, Trajectory)]
        states = self._ledger.states(one.row.attempt_id for one in trajectories)
        before = [one if isinstance(one, Refusal) else _attempt_refusal(one, states) for one in found]
        return read, before, frozenset(one.row.attempt_id for one in trajectories) - states.keys()

    def _dropped(self, refused: Sequence[tuple[Any, Refusal]], *, foreign: bool) -> dict[str, str]:
        reasons: dict[str, str] = {}
        for record, refusal in refused:
            attempt_id = claimed_attempt(record)
            # A record too broken to say whose attempt it was closes none; the lease ends with the run.
            if attempt_id is None or (foreign and is_own_attempt(attempt_id)):
                continue
            if self._ledger.is_leased(attempt_id):
                reasons.setdefault(attempt_id, f"quarantined:{refusal.reason}")
        return reasons

    def _hold(
        self, read: Sequence[Any], before: Sequence[Refusal | None], producer: str | None
    ) -> list[Refusal | None]:
        """Refuse unjudged what the breakers hold back; an attempt's trajectories are held or judged together."""
        judged: dict[str, bool] = {}
        result: list[Refusal | None] = []
        for one, refusal in zip(read, before, strict=True):
            if refusal is None:
                who = _producer_of(one, producer)
                attempt = claimed_attempt(one)
                may = judged.get(attempt) if attempt is not None else None
                if may is None:
                    may = self.breaker.decide(who)
                if attempt is not None:
                    judged[attempt] = may
                refusal = None if may else _held(who)
            result.append(refusal)
        return result

    def _observe(self, judged: Judgement, producer: str | None) -> list[EventRow]:
        counts: dict[str, list[int]] = {}
        for one in judged.accepted:
            counts.setdefault(_producer_of(one, producer), [0, 0])[0] += 1
        reasons: dict[str, str] = {}
        for one, refusal in judged.refused:
            if refusal.reason not in _NO_FAULT_OF_THE_PRODUCER:
                who = _producer_of(one, producer)
                counts.setdefault(who, [0, 0])[1] += 1
                reasons.setdefault(who, f"{refusal.reason}: {refusal.detail}")
        events = []
        for who, (accepted, refused) in counts.items():
            change = self.breaker.observe(who, accepted, refused)
            if change is not None:
                detail = {"producer": who, "example": readable(reasons.get(who, ""))}
                events.append(self.event(f"breaker_{change}", detail))
        return events

    def _quarantine(self, record: Any, refusal: Refusal, producer: str | None) -> QuarantineRow:
        # Token and number never come again in a run; hashed, so that an id shows neither order nor origin.
        number = f"{self._limits.run_id}\n{self._ledger.token}\n{next(self._numbers)}\n{_now_us()}"
        return quarantine_row(
            record,
            refusal,
            run_id=self._limits.run_id,
            quarantine_id=hashlib.sha256(number.encode()).hexdigest()[:16],
            time_us=_now_us(),
            producer=producer,
        )

    def _find_parents(self, ids: Collection[str]) -> FoundParents:
        """Look the trajectories up: those accepted last in memory, the others on record."""
        found = {each: self._parents[each] for each in ids if each in self._parents}
        asked = [each for each in ids if each not in found and readable(each) == each]
        if not asked:
            return FoundParents(steps=found)
        try:
            rows = RunReader.open(self._folder).sql(_PARENTS, [asked]).to_pylist()
        except StoreError as error:
            return FoundParents(steps=found, unreadable=str(error))
        for row in rows:
            found.setdefault(row.pop("trajectory_id"), []).append(ParentStep(**row))
        return FoundParents(steps=found)


def _attempt_refusal(trajectory: Trajectory, states: Mapping[str, str]) -> Refusal | None:
    row = trajectory.row
    if row.trajectory_id.partition("/")[0] != row.attempt_id:
        words = f"trajectory_id {row.trajectory_id!r} is not attempt_id {row.attempt_id!r}, or that and /... behind it"
    elif is_own_attempt(row.attempt_id):
        words = f"attempt {row.attempt_id!r} is spelled like the run's own; put your program's name before ids of your own"
    elif states.get(row.attempt_id, "leased") != "leased":
        words = f"attempt {row.attempt_id!r} is {states[row.attempt_id]} already; an attempt ends once: use a new id"
    else:
        return None
    return Refusal(reason="attempt", detail=words)


def _held(producer: str) -> Refusal:
    return Refusal(
        reason="breaker_open",
        detail=f"most of what {producer!r} brought last was refused, so this was not judged; mend the producer, then "
        "requeue it: hotpot lake quarantine requeue",
    )


def _producer_of(record: Any, producer: str | None) -> str:
    return readable(part(part(record, "row"), "actor_id", "") if producer is None else producer)


def _now_us() -> int:
    return time.time_ns() // 1_000
