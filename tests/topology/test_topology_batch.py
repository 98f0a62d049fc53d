"""What one update learns from, where some of it was drawn from replay."""

import dataclasses

import pytest

from hotpot.experience.replay import Drawn, Peer
from hotpot.testing.records import make_trajectory
from hotpot.topology.updates.batch import UpdateBatch
from hotpot.types import EndReason, Trajectory


def drawn(trajectory: Trajectory, *others: Trajectory, weight: float = 1.0, source: str = "hot") -> Drawn:
    return Drawn(
        trajectory_id=trajectory.row.trajectory_id, group_id=trajectory.row.group_id, source=source,
        weight=weight, trajectory=trajectory,
        peers=tuple(
            Peer(trajectory_id=o.row.trajectory_id, group_id=o.row.group_id, reward=o.row.reward) for o in others
        ),
    )  # fmt: skip


@pytest.fixture
def old() -> list[Trajectory]:
    """A recorded group: one success in four."""
    return [make_trajectory(issue=1, sample=sample, reward=float(sample == 0)) for sample in range(4)]


@pytest.fixture
def fresh() -> list[Trajectory]:
    return [make_trajectory(issue=9, sample=sample, reward=float(sample % 2)) for sample in range(4)]


def test_drawn_sequences_are_marked_and_weighed_and_fresh_ones_are_not(old, fresh) -> None:
    batch = UpdateBatch(update=5, collected=fresh, drawn=[drawn(old[0], *old[1:], weight=0.25)])
    found = {(s.trajectory_id, s.replayed, s.weight) for s in batch.sequences()}
    assert found == {
        *((t.row.trajectory_id, False, 1.0) for t in fresh),
        (old[0].row.trajectory_id, True, 0.25),
    }


def test_the_baseline_of_a_drawn_trajectory_is_its_whole_group(old, fresh) -> None:
    # Two of one group, each naming the other as a peer: every member counts once.
    again = [drawn(old[0], *old[1:]), drawn(old[2], old[0], old[1], old[3], source="cold")]
    batch = UpdateBatch(update=5, collected=fresh, drawn=again)
    peers = batch.peers()
    assert sorted(peer.trajectory_id for peer in peers) == [
        old[1].row.trajectory_id,
        old[3].row.trajectory_id,
    ]
    members = {peer.trajectory_id: peer.reward for peer in peers} | {
        s.trajectory_id: s.reward for s in batch.sequences() if s.replayed
    }
    assert sum(members.values()) == 1
    assert len(members) == 4
    assert batch.sources[old[0].row.trajectory_id] == "hot"
    assert batch.sources[old[2].row.trajectory_id] == "cold"
    assert {batch.sources[t.row.trajectory_id] for t in fresh} == {"fresh"}


def test_what_a_time_limit_cut_is_kept_out_of_the_loss(fresh) -> None:
    late = dataclasses.replace(
        fresh[0], row=dataclasses.replace(fresh[0].row, end_reason=EndReason.MAX_SECONDS)
    )
    batch = UpdateBatch(update=1, collected=[late, *fresh[1:]])
    assert late.row.trajectory_id not in {s.trajectory_id for s in batch.sequences()}
    assert batch.peers() == []
