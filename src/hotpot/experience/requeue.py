"""Refused records looked at, and brought back: what became of each, and through the door once more.

Owns the link between a refusal and what came of it, two kinds of event written in one frame with the outcome, so that
nothing is accepted twice however often it is asked for or cut off:

``requeued``         quarantine_id, trajectory_id    accepted after all, as a new attempt
``requeue_refused``  quarantine_id, replaced_by      refused again, and that refusal's own quarantine id

Knows the store's door and the reader; decides no rule. The records of one attempt are brought back together.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotpot.errors import UsageError
from hotpot.experience.gate.entrance import Admitted
from hotpot.experience.lake.lake import ROW_COLUMN, SEGMENT_COLUMN
from hotpot.experience.reading.reader import RunReader
from hotpot.experience.store import ExperienceStore
from hotpot.ids import again

REQUEUED, REFUSED_AGAIN = "requeued", "requeue_refused"

_NOT_JSON = object()

_LISTED = """
SELECT quarantine_id, record_id, producer, reason, time_us, sha256(payload) AS digest
FROM quarantine ORDER BY time_us"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """One quarantine record without its payload. ``state`` is waiting, requeued (accepted as ``became``) or replaced (refused
    again under the quarantine id ``became``)."""

    quarantine_id: str
    record_id: str
    producer: str
    reason: str
    time_us: int
    digest: str
    state: str
    became: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueReport:
    """What became of what was asked for: (quarantine id, trajectory id) of the accepted, (quarantine id, new quarantine id,
    reason) of those refused again, and (quarantine id, why) of those left alone."""

    accepted: tuple[tuple[str, str], ...]
    refused: tuple[tuple[str, str, str], ...]
    skipped: tuple[tuple[str, str], ...]


def list_refused(reader: RunReader) -> list[Refused]:
    """Return every quarantine record of a run in the order of refusal, with what became of it."""
    became: dict[str, tuple[str, str]] = {}
    for kind, detail in _links(reader):
        target = ("requeued", "trajectory_id") if kind == REQUEUED else ("replaced", "replaced_by")
        became[detail["quarantine_id"]] = (target[0], detail[target[1]])
    rows = reader.sql(_LISTED).to_pylist()
    found = [(row, *became.get(row["quarantine_id"], ("waiting", ""))) for row in rows]
    return [Refused(**row, state=state, became=name) for row, state, name in found]


def requeue(store: ExperienceStore, ids: Collection[str]) -> RequeueReport:
    """Bring the named refused records back through the door of ``store``, with the siblings of their attempts.

    Those already accepted or replaced are left alone. Raises :class:`UsageError` where an id is unknown, before
    anything is done, and what the store raises.
    """
    reader = RunReader.open(store.run_folder)
    listed = list_refused(reader)
    known = {one.quarantine_id: one for one in listed}
    unknown = [each for each in ids if each not in known]
    if unknown:
        raise UsageError(
            f"no quarantine record {unknown[0]!r}; `hotpot lake quarantine list` shows their ids"
        )
    chosen = [known[each] for each in dict.fromkeys(ids)]
    skipped = [(one.quarantine_id, f"{one.state}: {one.became}") for one in chosen if one.state != "waiting"]
    taken = {(one.record_id, one.digest) for one in listed if one.state == "requeued"}
    accepted: list[tuple[str, str]] = []
    refused: list[tuple[str, str, str]] = []
    for group in _attempts([one for one in chosen if one.state == "waiting"], listed):
        double = [one for one in group if (one.record_id, one.digest) in taken]
        skipped += [(one.quarantine_id, "the same record was requeued already") for one in double]
        payloads = _payloads(reader, [one.quarantine_id for one in group if one not in double])
        skipped += [
            (each, "its payload is no JSON") for each, record in payloads.items() if record is _NOT_JSON
        ]
        records = {each: record for each, record in payloads.items() if record is not _NOT_JSON}
        fresh = [one for one in group if one.quarantine_id in records]
        if fresh:
            good, bad = _bring(store, records, producer=fresh[0].producer)
            accepted += good
            refused += bad
            done = {each for each, _ in good}
            taken |= {(one.record_id, one.digest) for one in fresh if one.quarantine_id in done}
    return RequeueReport(accepted=tuple(accepted), refused=tuple(refused), skipped=tuple(skipped))


def same_content(reader: RunReader, trajectory_id: str) -> tuple[tuple[int, int], ...]:
    """Return the hidden (segment, row) of quarantine records under other names that hold what a trajectory holds: what
    it came back from, what that was refused as before or after, and identical doubles of those."""
    rows, found = _refusals_of(reader, trajectory_id)
    return tuple(
        (row[SEGMENT_COLUMN], row[ROW_COLUMN])
        for row in rows
        if row["quarantine_id"] in found and row["record_id"] != trajectory_id
    )


def accepted_from(reader: RunReader, trajectory_id: str) -> tuple[str, ...]:
    """Return the other trajectories on record that were requeued from the refusals a name stands for."""
    _, found = _refusals_of(reader, trajectory_id)
    names = [
        detail["trajectory_id"]
        for kind, detail in _links(reader)
        if kind == REQUEUED and detail["quarantine_id"] in found and detail["trajectory_id"] != trajectory_id
    ]
    there = reader.sql(
        "SELECT trajectory_id FROM trajectories WHERE trajectory_id IN (SELECT unnest(?))", [names]
    )
    return tuple(str(name) for name in there.column("trajectory_id").to_pylist())


def _refusals_of(reader: RunReader, trajectory_id: str) -> tuple[list[dict[str, Any]], set[str]]:
    """Return all quarantine records, and the ids of those that hold what a trajectory, or refused record, holds."""
    query = f"SELECT {SEGMENT_COLUMN}, {ROW_COLUMN}, quarantine_id, record_id, sha256(payload) AS digest"
    rows = reader.sql(f"{query} FROM recorded_quarantine AS quarantine").to_pylist()
    pairs = [(row["quarantine_id"], f"{row['record_id']} {row['digest']}") for row in rows]
    found = {row["quarantine_id"] for row in rows if row["record_id"] == trajectory_id}
    for kind, detail in _links(reader):
        if kind == REFUSED_AGAIN:
            pairs.append((detail["quarantine_id"], detail["replaced_by"]))
        elif detail["trajectory_id"] == trajectory_id:
            found.add(detail["quarantine_id"])
    while more := {each for pair in pairs if found.intersection(pair) for each in pair} - found:
        found |= more
    return rows, found


def _links(reader: RunReader) -> Iterator[tuple[str, dict[str, Any]]]:
    query = f"SELECT kind, detail FROM events WHERE kind IN ('{REQUEUED}', '{REFUSED_AGAIN}')"
    for row in reader.sql(query).to_pylist():
        yield row["kind"], json.loads(row["detail"])


def _attempts(chosen: Sequence[Refused], listed: Sequence[Refused]) -> Iterator[list[Refused]]:
    """Yield the chosen by attempt, each record once, with the waiting siblings; a record's doubles come after it."""
    waiting: dict[str, list[Refused]] = {}
    for one in listed:
        if one.state == "waiting":
            waiting.setdefault(_attempt(one), []).append(one)
    groups: dict[str, list[Refused]] = {}
    for one in chosen:
        groups.setdefault(_attempt(one), []).append(one)
    for attempt, group in groups.items():
        rest, others = group, [one for one in waiting[attempt] if one not in group]
        while rest:
            first = {one.record_id: one for one in reversed([*rest, *others])}
            others = []
            yield list(first.values())
            rest = [one for one in rest if first[one.record_id] is not one]


def _attempt(one: Refused) -> str:
    return one.record_id.partition("/")[0] or one.quarantine_id


def _payloads(reader: RunReader, ids: Sequence[str]) -> dict[str, Any]:
    """Return the records of quarantine ids as the door takes them, in that order; _NOT_JSON where one can't be read."""
    stored = reader.table(
        "quarantine",
        ["quarantine_id", "payload", "payload_schema_version"],
        where="quarantine_id IN (SELECT unnest(?))",
        params=[list(ids)],
    ).to_pylist()
    found = {row["quarantine_id"]: _record(row) for row in stored}
    return {each: found[each] for each in ids}


def _bring(
    store: ExperienceStore, payloads: Mapping[str, Any], *, producer: str
) -> tuple[list[tuple[str, str]], list[tuple[str, str, str]]]:
    ids = list(payloads)
    records = _renamed(list(payloads.values()), store)
    came_from = {id(record): each for record, each in zip(records, ids, strict=True)}
    by_name = {_name(record): each for record, each in zip(records, ids, strict=True)}
    good: list[tuple[str, str]] = []
    bad: list[tuple[str, str, str]] = []

    def follow(admitted: Admitted) -> list[tuple[str, Mapping[str, Any]]]:
        names = [one.row.trajectory_id for one in admitted.accepted]
        good.extend((by_name[name], name) for name in names)
        for (record, refusal), row in zip(admitted.refused, admitted.quarantine, strict=True):
            bad.append((came_from[id(record)], row.quarantine_id, refusal.reason))
        links = [(REQUEUED, {"quarantine_id": each, "trajectory_id": name}) for each, name in good]
        links += [(REFUSED_AGAIN, {"quarantine_id": each, "replaced_by": new}) for each, new, _ in bad]
        return [*links]

    store.append_records(records, producer=producer, follow=follow)
    return good, bad


def _record(row: Mapping[str, Any]) -> Any:
    """Return a payload as the door takes it. Those of our own dataclasses name their version inside only."""
    try:
        payload = json.loads(row["payload"])
    except (ValueError, RecursionError):
        return _NOT_JSON
    if isinstance(payload, dict) and "schema_version" not in payload:
        payload = {"schema_version": row["payload_schema_version"], **payload}
    return payload


def _name(record: Any) -> str | None:
    row = record.get("row") if isinstance(record, dict) else None
    name = row.get("trajectory_id") if isinstance(row, dict) else None
    return name if isinstance(name, str) else None


def _renamed(records: list[Any], store: ExperienceStore) -> list[Any]:
    """Return the records of one attempt under the id of a new one, as far as they can be read."""
    rows = [
        record["row"]
        for record in records
        if isinstance(record, dict) and isinstance(record.get("row"), dict)
    ]
    named = [row.get("attempt_id") for row in rows]
    old = next((each for each in named if isinstance(each, str)), None)
    if old is None:
        return records
    number = 1
    while store.ledger.states([again(old, number)]):
        number += 1
    new = again(old, number)

    def moved(value: Any) -> Any:
        head, slash, tail = value.partition("/") if isinstance(value, str) else ("", "", "")
        return f"{new}{slash}{tail}" if head == old else value

    def rename(row: Any) -> Any:
        names = ("attempt_id", "trajectory_id", "parent_trajectory_id")
        return (
            row | {name: moved(row[name]) for name in names if name in row} if isinstance(row, dict) else row
        )

    result = []
    for record in records:
        if isinstance(record, dict):
            steps = record.get("steps")
            renamed = {"row": rename(record.get("row"))} | (
                {"steps": [rename(step) for step in steps]} if isinstance(steps, list) else {}
            )
            record = {**record, **{name: value for name, value in renamed.items() if name in record}}
        result.append(record)
    return result
