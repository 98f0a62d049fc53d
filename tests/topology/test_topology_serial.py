"""The asynchronous topologies in one thread: the same updates as ``sync`` with nothing ahead, and the same run twice."""

from pathlib import Path
from typing import Any

import pytest

from conftest import Train
from hotpot.experience import RunReader

COMPARED = ("batch_hash", "losses", "grad_norms", "weights_checksum", "collected_trajectories", "new_policy_version", "staleness_max")  # fmt: skip


def learned(run: Path) -> list[dict[str, Any]]:
    rows = RunReader.open(run).table("updates", ["update", *COMPARED]).to_pylist()
    return [{**row, "collected_trajectories": sorted(row["collected_trajectories"])} for row in rows]


def evaluated(run: Path) -> list[tuple[Any, ...]]:
    rows = RunReader.open(run).table("evaluations").to_pylist()
    return [(row["label"], row["update"], row["success_rate"], row["policy_version"]) for row in rows]


def test_nothing_ahead_is_sync_update_for_update(run: Train) -> None:
    sync = run("run.id=sync")
    serial = run(
        "run.id=batched", "topology.kind=batched_async", "topology.batches_ahead=0", "topology.serial=true"
    )
    assert learned(serial) == learned(sync)
    assert evaluated(serial) == evaluated(sync)


@pytest.mark.parametrize("kind", ["async", "batched_async"])
def test_a_serial_run_repeats(run: Train, kind: str) -> None:
    settings = (
        f"topology.kind={kind}",
        "topology.serial=true",
        "topology.updates=5",
        "engine.max_concurrency=24",
    )
    one, other = run("run.id=one", *settings), run("run.id=other", *settings)
    assert learned(one) == learned(other)
    assert max(row["staleness_max"] for row in learned(one)) > 0
