"""Judging a whole call's trajectories: the gate for each, and what must hold among them.

Owns the batch: what can be checked for all at once is, in Arrow, which is what the log needs anyway. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from hotpot.errors import StoreError
from hotpot.experience.gate import Refusal, check
from hotpot.experience.rules import Limits, proven, well_formed
from hotpot.experience.schema import to_table
from hotpot.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judgement:
    """The accepted trajectories with their rows as Arrow, and the refused ones with the reason; each in order."""

    accepted: tuple[Trajectory, ...]
    refused: tuple[tuple[Trajectory, Refusal], ...]
    steps: pa.Table
    rows: pa.Table


def judge(trajectories: Sequence[Trajectory], limits: Limits) -> Judgement:
    """Judge every trajectory. Never raises; an attempt's trajectories are accepted or refused together."""
    tables = _convert(trajectories)
    known = proven(tables[0], limits) if tables else frozenset()
    refusals = [_judge_one(trajectory, limits, known) for trajectory in trajectories]
    refusals = _refuse_duplicates(trajectories, refusals)
    refusals = _refuse_siblings(trajectories, refusals)
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
    refusal = check(trajectory, limits, proven=known)
    if refusal is None and not known:
        try:
            _tables([trajectory])
        except StoreError as error:
            return Refusal(reason="not_storable", detail=str(error))
    return refusal


def _refuse_duplicates(
    trajectories: Sequence[Trajectory], refusals: list[Refusal | None]
) -> list[Refusal | None]:
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


def _refuse_siblings(
    trajectories: Sequence[Trajectory], refusals: list[Refusal | None]
) -> list[Refusal | None]:
    broken: dict[str, str] = {}
    for trajectory, refusal in zip(trajectories, refusals, strict=True):
        attempt_id = getattr(getattr(trajectory, "row", None), "attempt_id", None)
        if refusal is not None and isinstance(attempt_id, str):
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
