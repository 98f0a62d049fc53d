"""A run for other programs to read: several segments, a compaction in their midst, and a half-finished segment on top."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hotpot.config import StoreSection
from hotpot.experience import ExperienceStore, RunReader
from hotpot.experience.maintenance import compact, write_export
from hotpot.experience.records.schema import to_table
from hotpot.testing.records import make_group, make_leases, make_trajectory

RUN_ID = "first"
TABLES = ("steps", "trajectories")
COLUMNS = {
    "steps": ["trajectory_id", "step", "prompt_tokens", "sampled_tokens", "model_logprobs", "reward"],
    "trajectories": ["trajectory_id", "reward", "success", "num_sampled_tokens", "reward_values"],
}
KEYS = {"steps": ["trajectory_id", "step"], "trajectories": ["trajectory_id"]}
ROUNDS = 6
COMPACTED_AFTER = 4


@dataclass(frozen=True)
class Written:
    """A run at rest but for a segment above its watermark, and what Hotpot itself reads from it."""

    folder: Path
    watermark: int
    manifest: dict[str, Any] = field(repr=False)
    expected: dict[str, pa.Table] = field(repr=False)

    @property
    def lake(self) -> Path:
        return self.folder / "lake"

    def files(self, name: str) -> list[str]:
        """The exact files of a table, as exported."""
        return [file["path"] for file in self.manifest["tables"][name]["files"]]


def write(folder: Path) -> Written:
    """Write the run into ``folder`` and return what Hotpot reads from it."""
    settings = StoreSection(archive_every_batches=1, archive_every_s=600.0)
    with ExperienceStore.open(folder, run_id=RUN_ID, settings=settings, vocabulary_size=64) as store:
        for issue in range(ROUNDS):
            group = make_group(run_id=RUN_ID, issue=issue, size=8, num_steps=1 + issue % 3)
            store.ledger.lease(make_leases(group))
            assert len(store.append(group).accepted) == len(group)
            store.flush()
            if issue == COMPACTED_AFTER:
                reports = {report.table: report for report in compact(RunReader.open(folder))}
                assert all(reports[name].files_after < reports[name].files_before for name in TABLES)
    reader = RunReader.open(folder)
    expected = {name: in_order(name, reader.table(name, COLUMNS[name])) for name in TABLES}
    watermark = reader.lake.watermark()
    unfinished = make_trajectory(run_id=RUN_ID, issue=99)
    rows = to_table("steps", unfinished.steps)
    reader.lake.commit("steps", watermark + 1, rows, np.arange(rows.num_rows))
    manifest = json.loads(write_export(reader).read_text())
    return Written(folder=folder, watermark=watermark, manifest=manifest, expected=expected)


def in_order(name: str, table: pa.Table) -> pa.Table:
    return table.select(COLUMNS[name]).sort_by([(key, "ascending") for key in KEYS[name]]).combine_chunks()
