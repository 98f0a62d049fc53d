"""A recorded update from the record alone: its batch, and the learning of it again. No inference, no clock, no writing.

::

    groups, consumptions, trajectories (as of the update) ──► UpdateBatch ──► Learner at the parent's weights ──► result

Owns what belongs to a recorded update's batch, and what makes two learnings of it the same. Knows no checkpoint, engine
or ledger. It serves whoever must come to the weights of a recorded update: a resume, and a replay.

Invariants: a rebuilt batch holds what was recorded by the time of the update and nothing that came later; learned by a
learner in the parent's state, with as many threads on the same kind of machine, it gives the recorded bits.
"""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotpot.errors import UsageError
from hotpot.experience import RunReader, from_table, read_trajectories
from hotpot.experience.replay import Drawn, Peer
from hotpot.learner import Learner, UpdateResult, recorded_halving
from hotpot.topology.updates.batch import UpdateBatch, learnable
from hotpot.types import ConsumptionRow, EndReason, Purpose, Split, Trajectory, UpdateRow

REPLAYED = ("hot", "cold")
"""Sources of what an update drew from the run's own record instead of collecting it."""

ROUNDING = 1e-3
"""Largest relative difference between losses that another machine's rounding is taken to explain."""

CRITIC_TOLD = 4
"""Schema version from which on what only the critic's weights came by is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How a recorded update and its learning again differ: in words, empty where no bit does.

    ``same_batch``: what was learned is the same to the bit. ``close``: what came of it is the same up to rounding.
    """

    differences: tuple[str, ...]
    same_batch: bool
    close: bool


def recorded_update(reader: RunReader, update: int) -> UpdateRow:
    """Return the row of ``update``. Raises :class:`UsageError` where the record has none."""
    rows: list[UpdateRow] = from_table(
        "updates", reader.table("updates", where='"update" = ?', params=[update])
    )
    if not rows:
        raise UsageError(
            f"the record of run {reader.manifest.run_id} has no update {update}; table updates lists those it has"
        )
    return rows[0]


def rebuild_batch(reader: RunReader, update: int) -> UpdateBatch:
    """Return the batch that ``update`` learned, from lake and log; ready to be learned as often as wanted.

    What was deleted from the lake since is not in it (the hash will tell). Raises :class:`UsageError` where the record
    has no such update.
    """
    row, then = recorded_update(reader, update), reader.as_of(update)
    uses: list[ConsumptionRow] = from_table(
        "consumptions", then.table("consumptions", where='"update" = ?', params=[update])
    )
    drawn = _draw_of(row) or {
        use.trajectory_id: (use.source, use.weight)
        for use in uses
        if use.source in REPLAYED and row.num_replayed
    }
    fresh = {use.trajectory_id: use for use in uses if use.trajectory_id not in drawn}
    checksums = policy_checksums(reader)
    return UpdateBatch(
        update=update,
        collected=_named(then, row.collected_trajectories) or _collected(then, update, set(fresh)),
        source=next((use.source for use in fresh.values()), "fresh"),
        drawn=_drawn(then, drawn, set(row.peer_trajectories) if row.learner_settings else None),
        aliases={
            version: row.policy_version
            for version, checksum in checksums.items()
            if version < row.policy_version and checksum == checksums.get(row.policy_version)
        },
    )


def relearn(
    learner: Learner, batch: UpdateBatch, *, policy_version: int, before: int, state: str = ""
) -> UpdateResult:
    """Learn ``batch`` with ``learner``, whose state must be that of the update's parent; the weights change.

    ``policy_version`` is what the recorded update says it started from; ``before`` is how many updates lie on the way to
    the parent, which is where the schedules stand. ``state`` is the column ``learner_state`` of the recorded update: where it
    says that passes were halved for want of memory, they are halved there again. Raises as :meth:`Learner.update`.
    """
    learner.lost_updates = batch.update - 1 - before
    return learner.update(
        batch.sequences(),
        update=batch.update,
        policy_version=policy_version,
        peers=batch.peers(),
        halving=recorded_halving(state),
    )


def compare(row: UpdateRow, result: UpdateResult) -> Comparison:
    """Return how ``result`` differs from what was recorded of it."""
    same_batch = row.batch_hash == result.batch_hash
    found = [] if same_batch else [f"batch_hash is {result.batch_hash}, recorded {row.batch_hash}"]
    if row.learning_rate != result.learning_rate:
        found.append(f"learning_rate is {result.learning_rate!r}, recorded {row.learning_rate!r}")
    close = row.learning_rate == result.learning_rate
    names = ["losses", "grad_norms"]
    if row.schema_version >= CRITIC_TOLD:
        names += ["critic_losses", "critic_grad_norms"]
    for name in names:
        old, new = getattr(row, name), getattr(result, name)
        if old.tobytes() != new.tobytes():
            found.append(f"{name} are {new.tolist()}, recorded {old.tolist()}")
            close &= len(old) == len(new) and bool(np.allclose(old, new, rtol=ROUNDING, atol=ROUNDING**2))
    return Comparison(differences=tuple(found), same_batch=same_batch, close=close)


def policy_checksums(reader: RunReader) -> dict[int, str]:
    """Return the checksum of the weights of every policy version that the record explains."""
    found = reader.table("versions", ["version", "manifest"], where="kind = 'policy'").to_pylist()
    told = {int(row["version"]): json.loads(row["manifest"]).get("checksum") for row in found}
    return {version: checksum for version, checksum in told.items() if checksum is not None}


def aliases(trajectories: Sequence[Trajectory], *, policy_version: int, checksum: str) -> dict[int, int]:
    """Return {version: ``policy_version``} for the versions in ``trajectories`` whose weights are those of ``checksum``."""
    return {
        step.policy_version: policy_version
        for trajectory in trajectories
        for step in trajectory.steps
        if step.policy_version != policy_version and step.policy_checksum == checksum
    }


def _draw_of(row: UpdateRow) -> dict[str, tuple[str, float]]:
    """Return source and weight of what was drawn for an update, as its row says; empty in rows that say nothing of it."""
    pairs = zip(row.drawn_sources, row.drawn_weights.tolist(), strict=True)
    return dict(zip(row.drawn_trajectories, pairs, strict=True))


def _named(then: RunReader, names: Sequence[str]) -> list[Trajectory]:
    return read_trajectories(then, "trajectory_id IN (SELECT unnest(?))", [list(names)]) if names else []


def _collected(then: RunReader, update: int, consumed: set[str]) -> list[Trajectory]:
    """Return what was collected for an update whose row does not name it, as recorded by then.

    A refused record that was brought back later is in a group without having been in the batch: it was not consumed.
    """
    found = then.sql('SELECT group_id, kept FROM groups WHERE "update" = ?', [update]).to_pylist()
    kept = {row["group_id"]: row["kept"] for row in found}
    trajectories = read_trajectories(
        then,
        f"purpose = '{Purpose.TRAINING.value}' AND group_id IN (SELECT unnest(?))",
        [list(kept)],
    )
    learned = {trajectory.row.trajectory_id for trajectory in learnable(trajectories)}
    return [
        trajectory
        for trajectory in trajectories
        if not kept[trajectory.row.group_id]
        or trajectory.row.trajectory_id in consumed
        or trajectory.row.trajectory_id not in learned
    ]


def _drawn(then: RunReader, uses: Mapping[str, tuple[str, float]], peers: Set[str] | None) -> list[Drawn]:
    """Return what was drawn, by source and weight; ``peers`` counted in the baselines, None where no row says which."""
    if not uses:
        return []
    found = _named(then, list(uses))
    members = _members(then, sorted({trajectory.row.group_id for trajectory in found}))
    if peers is not None:
        members = [peer for peer in members if peer.trajectory_id in peers or peer.trajectory_id in uses]
    drawn = [
        Drawn(
            trajectory_id=trajectory.row.trajectory_id,
            group_id=trajectory.row.group_id,
            source="hot" if uses[trajectory.row.trajectory_id][0] == "hot" else "cold",
            weight=uses[trajectory.row.trajectory_id][1],
            trajectory=trajectory,
            peers=tuple(
                peer
                for peer in members
                if peer.group_id == trajectory.row.group_id
                and peer.trajectory_id != trajectory.row.trajectory_id
            ),
        )
        for trajectory in found
    ]
    order = list(uses)
    return sorted(drawn, key=lambda one: order.index(one.trajectory_id))


def _members(then: RunReader, groups: list[str]) -> list[Peer]:
    """Return the members of ``groups`` that count in a baseline: the ones that replay's index knows."""
    rows: list[dict[str, Any]] = then.sql(
        "SELECT trajectory_id, group_id, reward FROM trajectories "
        f"WHERE purpose = '{Purpose.TRAINING.value}' AND split = '{Split.TRAIN.value}' "
        f"AND end_reason <> '{EndReason.MAX_SECONDS.value}' AND group_id IN (SELECT unnest(?)) ORDER BY trajectory_id",
        [groups],
    ).to_pylist()
    return [
        Peer(trajectory_id=row["trajectory_id"], group_id=row["group_id"], reward=row["reward"])
        for row in rows
    ]
