"""What a store has promised by answering, and whether a run folder keeps it after a crash.

Owns the model: a few sets. An operation that was under way when the process died may have happened wholly or not at
all, so its outcome is read back, and from then on it is as binding as an answer. Knows no process.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hotpot.testing.killable import NUM_STEPS

Ask = Callable[[str], list[dict[str, Any]]]


@dataclass(slots=True)
class Violations:
    """Broken promises: acknowledged and not there, there twice, there in part, and anything else, in words."""

    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.lost or self.duplicated or self.torn or self.other)


@dataclass(slots=True)
class Promises:
    """The model. ``kept`` trajectories, ``ended`` attempts (id to state), ``learned`` updates (number to the
    trajectories consumed), ``refused`` records, ``noted`` numbers. ``open_groups``, ``open_updates``, ``open_notes``:
    what was under way when the process died (all or nothing each)."""

    kept: set[str] = field(default_factory=set)
    ended: dict[str, str] = field(default_factory=dict)
    learned: dict[int, frozenset[str]] = field(default_factory=dict)
    refused: int = 0
    noted: set[int] = field(default_factory=set)
    open_groups: list[tuple[frozenset[str], int]] = field(default_factory=list)
    open_updates: dict[int, frozenset[str]] = field(default_factory=dict)
    open_notes: set[int] = field(default_factory=set)

    def settle(self, ask: Ask) -> Violations:
        """Read back what became of what was under way, and return what is half there."""
        found = Violations()
        ids = {row["i"] for row in ask("SELECT trajectory_id AS i FROM trajectories")}
        for group, refused in self.open_groups:
            there = group & ids
            if there and there != group:
                found.torn.append(f"of one call {sorted(there)} are there, {sorted(group - there)} are not")
            self.kept |= there
            if not group:
                there = _came(ask, self.refused + refused)
            self.refused += refused if there else 0
        updates = {row["u"] for row in ask('SELECT "update" AS u FROM updates')}
        for number, used in self.open_updates.items():
            if number in updates:
                self.learned[number] = used
        noted = {row["n"] for row in ask("SELECT evaluation AS n FROM evaluations")}
        self.noted |= self.open_notes & noted
        self.open_groups, self.open_updates, self.open_notes = [], {}, set()
        return found

    def check(self, ask: Ask, *, at_rest: bool) -> Violations:
        """Compare everything promised with what ``ask`` (a SELECT over the run's tables to its rows) answers."""
        found = self.settle(ask)
        _check_trajectories(self, ask, found)
        _check_attempts(self, ask, found, at_rest=at_rest)
        _check_updates(self, ask, found)
        _check_rest(self, ask, found)
        return found


def _came(ask: Ask, refused: int) -> frozenset[str]:
    """Return something where as many records are in quarantine as with those of a call that brought nothing else."""
    (row,) = ask("SELECT count(*) AS n FROM quarantine")
    return frozenset({"quarantine"} if row["n"] == refused else ())


def _check_trajectories(promises: Promises, ask: Ask, found: Violations) -> None:
    ids = [row["i"] for row in ask("SELECT trajectory_id AS i FROM trajectories")]
    found.duplicated += _twice(ids)
    found.lost += sorted(promises.kept - set(ids))
    found.other += [f"{one} was never promised" for one in sorted(set(ids) - promises.kept)]
    found.torn += [
        f"{row['i']} has {row['n']} steps, {row['d']} different ones"
        for row in ask(
            "SELECT coalesce(t.trajectory_id, s.trajectory_id) AS i, count(s.step) AS n, count(DISTINCT s.step) AS d "
            "FROM trajectories t FULL JOIN steps s USING (trajectory_id) GROUP BY 1 "
            f"HAVING count(s.step) <> {NUM_STEPS} OR count(DISTINCT s.step) <> {NUM_STEPS} "
            "OR count(t.trajectory_id) = 0"
        )
    ]


def _check_attempts(promises: Promises, ask: Ask, found: Violations, *, at_rest: bool) -> None:
    rows = ask("SELECT attempt_id AS i, state AS s FROM attempts")
    found.duplicated += _twice(row["i"] for row in rows)
    states = {row["i"]: row["s"] for row in rows}
    for attempt, state in promises.ended.items():
        if states.get(attempt) != state:
            found.lost.append(f"attempt {attempt} was {state}, is {states.get(attempt)}")
    finished = {attempt for attempt, state in states.items() if state == "finished"}
    if finished != promises.kept:
        found.torn.append(
            f"finished attempts and trajectories differ by {sorted(finished ^ promises.kept)[:5]}"
        )
    if at_rest and "leased" in states.values():
        found.other.append("an attempt is leased by nobody")


def _check_updates(promises: Promises, ask: Ask, found: Violations) -> None:
    updates = [row["u"] for row in ask('SELECT "update" AS u FROM updates')]
    found.duplicated += _twice(f"update {number}" for number in updates)
    found.lost += [f"update {number}" for number in sorted(promises.learned.keys() - set(updates))]
    for table in ("consumptions", "learned_tokens"):
        rows = ask(f'SELECT "update" AS u, trajectory_id AS i FROM {table}')
        found.duplicated += _twice(f"{table} {row['u']} {row['i']}" for row in rows)
        used: dict[int, set[str]] = {}
        for row in rows:
            used.setdefault(row["u"], set()).add(row["i"])
        expected = {number: set(ids) for number, ids in promises.learned.items() if ids}
        if used != expected:
            wrong = [
                number for number in used.keys() | expected.keys() if used.get(number) != expected.get(number)
            ]
            found.torn.append(f"{table} do not agree with updates {sorted(wrong)}")
    for table in ("metrics", "groups"):
        numbers = [row["u"] for row in ask(f'SELECT "update" AS u FROM {table}')]
        if sorted(numbers) != sorted(updates):
            found.torn.append(f"{table} do not agree with updates")


def _check_rest(promises: Promises, ask: Ask, found: Violations) -> None:
    refused = ask("SELECT count(*) AS n, count(DISTINCT quarantine_id) AS d FROM quarantine")[0]
    if refused["n"] != promises.refused:
        found.lost.append(f"{promises.refused} records were refused, {refused['n']} are in quarantine")
    for table, number in (
        ("evaluations", "evaluation"),
        ("events", "(detail->>'$.number')::BIGINT"),
        ("versions", "version::BIGINT - 1"),
    ):
        noted = [
            row["n"]
            for row in ask(
                f"SELECT {number} AS n FROM {table}" + (" WHERE kind = 'noted'" if table == "events" else "")
            )
        ]
        found.duplicated += _twice(f"{table} {one}" for one in noted)
        if set(noted) != promises.noted:
            found.torn.append(
                f"{table} hold {sorted(set(noted) ^ promises.noted)[:5]} otherwise than promised"
            )


def _twice(values: Iterable[Any]) -> list[str]:
    seen: set[Any] = set()
    again = []
    for value in values:
        if value in seen:
            again.append(f"{value} is there twice")
        seen.add(value)
    return again
