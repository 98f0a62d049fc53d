"""Write the stored lakes of the current schema version: ``python tests/data/make_lake.py [FOLDER]``.

``lakes/vN.zip`` holds two run folders: ``closed`` was ended in order (all in the lake), ``killed`` was killed (lake, log
tail and ledger each hold a part), and ``expected.json`` that says what they hold. One file per schema version,
committed before the version changes and never made anew: releases to come must open it.
"""

import json
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from hotpot.config import StoreSection
from hotpot.experience import ExperienceStore
from hotpot.testing.records import make_fork, make_group, make_leases, make_row, make_trajectory
from hotpot.types import (
    SCHEMA_VERSION,
    TABLES,
    ConsumptionRow,
    DiscardReason,
    DiscardRow,
    EvaluationRow,
    EventRow,
    GroupRow,
    LearnedTokensRow,
    MetricRow,
    Stage,
    Trajectory,
    UpdateRow,
    VersionRow,
)

ROUNDS = 3


def shortened(made: Trajectory) -> Trajectory:
    """Return a trajectory whose last prompt was shortened behind a note, and whose request was preempted."""
    first, note, last = made.steps
    told = (Stage.TOOL_RESULT.value, Stage.HANDOVER.value)
    lengths = (len(note.prompt_tokens), len(note.sampled_tokens))
    note = replace(note, span_stage=told, span_length=lengths, context_change="handover", tool_name=None)
    last = replace(last, context_change="segmented", context_dropped_tokens=9, num_preemptions=2)
    return replace(made, steps=(first, note, last))


def write(folder: Path, *, kill: bool) -> None:
    settings = StoreSection(archive_every_batches=1, archive_every_s=600.0)
    store = ExperienceStore.open(
        folder, run_id="run", settings=settings, vocabulary_size=64, recipe='{"name": "stored"}'
    )
    store.record(
        [
            make_row(VersionRow, kind="policy", version="1"),
            make_row(EventRow, kind="run_started", detail="{}"),
        ]
    )
    for issue in range(ROUNDS):
        store.ledger.advance("issue", issue)
        group = make_group(issue=issue, size=4, num_steps=3)
        group[1] = shortened(make_trajectory(issue=issue, sample=1, num_steps=3, new_segment_at=2))
        broken = make_trajectory(issue=issue, sample=4)
        broken = replace(broken, row=replace(broken.row, reward=broken.row.reward + 1.0))
        lost = [make_trajectory(issue=issue, sample=sample) for sample in (5, 6)]
        group.append(make_fork(group[0], 1))
        spare = make_trajectory(issue=issue, sample=7)
        store.ledger.lease(make_leases([*group, broken, *lost, spare]))
        store.ledger.fail(lost[0].row.attempt_id, "broke")
        accepted = store.append([*group, broken]).accepted
        store.append([spare])
        update = store.ledger.mark("update") + 1
        store.ledger.advance("update", update)
        row = make_row(
            DiscardRow,
            trajectory_id=spare.row.trajectory_id,
            group_id=spare.row.group_id,
            reason=DiscardReason.SURPLUS.value,
            update=update,
        )
        store.discard([row], [make_row(EventRow, kind="discarded", detail="{}", update=update)])
        store.record_update(
            make_row(
                UpdateRow,
                update=update,
                num_trajectories=len(accepted),
                new_policy_version=update + 1,
                num_replayed=1,
                num_shared_tokens=7,
                collected_trajectories=tuple(accepted),
                drawn_weights=np.array([0.5]),
                learner_settings="{}",
                reference_checksum="0" * 32,
                deterministic=True,
            ),
            [make_row(GroupRow, group_id=group[0].row.group_id, update=update, size=4)],
            [
                make_row(
                    LearnedTokensRow,
                    trajectory_id=one.row.trajectory_id,
                    update=update,
                    position=place,
                    begin=place,
                    weight=0.5,
                )
                for place, one in enumerate(group)
            ],
            [
                make_row(ConsumptionRow, trajectory_id=one, update=update, source="hot", weight=0.5)
                for one in accepted
            ],
            [make_row(MetricRow, name="m", update=update), make_row(EvaluationRow, evaluation=issue)],
        )
        if issue < ROUNDS - 1:
            store.flush()
    if kill:
        os._exit(0)
    store.close()


def expected(folder: Path) -> dict[str, object]:
    from hotpot.experience import open_run

    reader = open_run(folder)
    return {
        "rows": {name: reader.table(name).num_rows for name in TABLES},
        "reward": sum(reader.table("trajectories", ["reward"])["reward"].to_pylist()),
        "tokens": sum(map(sum, reader.table("steps", ["sampled_tokens"])["sampled_tokens"].to_pylist())),
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "lakes"
    target = folder.absolute() / f"v{SCHEMA_VERSION}"
    os.chdir("/")  # manifests name the working folder
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        for name in ("closed", "killed"):
            child = os.fork()
            if child == 0:
                write(home / name, kill=name == "killed")
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if status:
                sys.exit(1)
        found = {name: expected(home / name) for name in ("closed", "killed")}
        (home / "expected.json").write_text(json.dumps(found, indent=2) + "\n")
        shutil.make_archive(str(target), "zip", home)


if __name__ == "__main__":
    main()
