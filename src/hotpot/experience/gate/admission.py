"""Judging a whole call's records: the gate for each, and what must hold among them.

Owns the batch: what can be checked for all at once is, in Arrow, which is what the log needs anyway. Pure.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from hotpot.errors import StoreError
from hotpot.experience.gate.forks import FindParents, fork_words, no_parents, parent_steps
from hotpot.experience.gate.gate import Refusal, check, claimed_attempt
from hotpot.experience.gate.rules import Limits, proven
from hotpot.experience.records.schema import to_table
from hotpot.experience.records.typecheck import well_formed
from hotpot.types import Trajectory

PARENT_UNREADABLE = "parent_unreadable"
"""Reason of a fork whose parent was looked for in a record that can't be read now: no fault of the fork's."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judgement:
    """The accepted trajectories with their rows as Arrow, and the refused ones with the reason; each in order."""

    accepted: tuple[Trajectory, ...]
    refused: tuple[tuple[Any, Refusal], ...]
    steps: pa.Table
    rows: pa.Table


def judge(
    trajectories: Sequence[Any],
    limits: Limits,
    *,
    before: Sequence[Refusal | None] | None = None,
    find_parents: FindParents = no_parents,
) -> Judgement:
    """Judge every trajectory; an attempt's trajectories are accepted or refused together.

    ``before``, one per trajectory, holds why some are refused already (those may be of any shape); they are not judged,
    and take their siblings with them. ``find_parents`` looks up what forks name as their parents and is not in
    the call; where it can't, the forks that need it are refused as ``parent_unreadable``. Never raises.
    """
    given = list(before) if before is not None else [None] * len(trajectories)
    fresh = [one for one, refusal in zip(trajectories, given, strict=True) if refusal is None]
    tables = _convert(fresh)
    known = proven(tables[0], limits) if tables else frozenset()
    refusals = [
        refusal or _judge_one(trajectory, limits, known)
        for trajectory, refusal in zip(trajectories, given, strict=True)
    ]
    refusals = _refuse_duplicates(trajectories, refusals)
    refusals = _refuse_siblings(trajectories, refusals)
    while (found := _refuse_forks(trajectories, refusals, find_parents)) != refusals:
        refusals = _refuse_siblings(trajectories, found)
    pairs = list(zip(trajectories, refusals, strict=True))
    accepted = tuple(trajectory for trajectory, refusal in pairs if refusal is None)
    if tables is None or len(accepted) < len(pairs):
        tables = _tables(accepted)
    return Judgement(
        accepted=accepted,
        refused=tuple((trajectory, refusal) for trajectory, refusal in pairs if refusal is not None),
        steps=tables[0],
        rows=tables[1],
    )


def _tables(trajectories: Sequence[Trajectory]) -> tuple[pa.Table, pa.Table]:
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    return to_table("steps", steps), to_table("trajectories", [trajectory.row for trajectory in trajectories])


def _convert(trajectories: Sequence[Trajectory]) -> tuple[pa.Table, pa.Table] | None:
    if not all(map(well_formed, trajectories)):
        return None
    try:
        return _tables(trajectories)
    except StoreError:
        return None  # a value does not fit; each trajectory is looked at alone


def _judge_one(trajectory: Trajectory, limits: Limits, known: frozenset[str]) -> Refusal | None:
    if not known and well_formed(trajectory) and _holds_huge(trajectory):
        # Before the rules: their words would name it, and Python writes no integer of any length.
        return Refusal(
            reason="not_storable", detail="an integer does not fit 64 bits; correct whoever counted"
        )
    refusal = check(trajectory, limits, proven=known)
    if refusal is None and not known:
        try:
            _tables([trajectory])
        except StoreError as error:
            return Refusal(reason="not_storable", detail=str(error))
    return refusal


def _holds_huge(trajectory: Trajectory) -> bool:
    rows: list[Any] = [trajectory.row, *trajectory.steps]
    for row in rows:
        for field in dataclasses.fields(row):
            value = getattr(row, field.name)
            for one in value if isinstance(value, list | tuple) else (value,):
                if isinstance(one, int) and not -(2**63) <= one < 2**63:
                    return True
    return False


def _refuse_duplicates(trajectories: Sequence[Any], refusals: list[Refusal | None]) -> list[Refusal | None]:
    result: list[Refusal | None] = []
    seen: set[str] = set()
    for trajectory, refusal in zip(trajectories, refusals, strict=True):
        if refusal is None and trajectory.row.trajectory_id in seen:
            refusal = Refusal(
                reason="duplicate_id",
                detail=f"trajectory_id {trajectory.row.trajectory_id!r} comes twice in one call; ids are unique",
            )
        if refusal is None:
            seen.add(trajectory.row.trajectory_id)
        result.append(refusal)
    return result


def _refuse_forks(
    trajectories: Sequence[Any], refusals: list[Refusal | None], find_parents: FindParents
) -> list[Refusal | None]:
    """Refuse forks whose parent is neither accepted in this call nor on record, or that don't continue it."""
    kept = [one for one, refusal in zip(trajectories, refusals, strict=True) if refusal is None]
    waiting = {one.row.trajectory_id: one for one in kept if one.row.parent_trajectory_id is not None}
    if not waiting:
        return refusals
    known = {one.row.trajectory_id: parent_steps(one) for one in kept}
    missing = {one.row.parent_trajectory_id for one in waiting.values()} - known.keys()
    found = find_parents(missing) if missing else no_parents(missing)
    known |= {name: list(steps) for name, steps in found.steps.items()}
    # Grown from the trajectories without a parent, so that a ring of forks is never reached.
    reached = known.keys() - waiting.keys()
    broken: dict[str, str] = {}
    moved = True
    while moved:
        ready = [name for name, fork in waiting.items() if fork.row.parent_trajectory_id in reached]
        moved = bool(ready)
        for name in ready:
            fork = waiting.pop(name)
            words = fork_words(fork, known[fork.row.parent_trajectory_id])
            if words is None:
                reached = reached | {name}
            else:
                broken[name] = words
    reason = dict.fromkeys(broken, "fork") | dict.fromkeys(
        waiting, PARENT_UNREADABLE if found.unreadable else "fork"
    )
    for name, fork in waiting.items():
        broken[name] = (
            f"whether its parent {fork.row.parent_trajectory_id!r} is on record can't be told: {found.unreadable}; requeue it "
            "when the record can be read: hotpot lake quarantine requeue"
            if found.unreadable
            else f"its parent {fork.row.parent_trajectory_id!r} is neither on record nor accepted in the same call; "
            "append the parent before the fork, or with it"
        )
    return [
        Refusal(reason=reason[trajectory.row.trajectory_id], detail=broken[trajectory.row.trajectory_id])
        if refusal is None and trajectory.row.trajectory_id in broken
        else refusal
        for trajectory, refusal in zip(trajectories, refusals, strict=True)
    ]


def _refuse_siblings(trajectories: Sequence[Any], refusals: list[Refusal | None]) -> list[Refusal | None]:
    broken: dict[str, str] = {}
    for trajectory, refusal in zip(trajectories, refusals, strict=True):
        attempt_id = claimed_attempt(trajectory)
        if refusal is not None and attempt_id is not None:
            broken.setdefault(attempt_id, refusal.reason)
    if not broken:
        return refusals
    return [
        Refusal(
            reason=broken[trajectory.row.attempt_id],
            detail="another trajectory of the same attempt was refused; they stand or fall together",
        )
        if refusal is None and trajectory.row.attempt_id in broken
        else refusal
        for trajectory, refusal in zip(trajectories, refusals, strict=True)
    ]
