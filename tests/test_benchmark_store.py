"""The benchmark of the store: its load passes the gate, and its measurements run (the opponents' apart)."""

from pathlib import Path

import numpy as np
import pytest

from hotpot.config import StoreSection
from hotpot.experience import ExperienceStore, RunReader, read_trajectories
from hotpot.testing.records import make_group, make_leases

pytestmark = pytest.mark.slow


def test_replicas_pass_the_gate_and_everything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    from store_parts import bulk, sizes, writing
    from store_parts.load import Load

    recorded = [t for issue in range(4) for t in make_group(run_id="recorded", issue=issue, num_steps=3)]
    settings = StoreSection()
    folder = tmp_path / "recorded"
    with ExperienceStore.open(folder, run_id="recorded", settings=settings, vocabulary_size=64) as store:
        store.ledger.lease(make_leases(recorded))
        store.append(recorded)
    monkeypatch.setattr(writing, "BATCH", 64)
    monkeypatch.setattr(writing, "MIN_CHUNKS", 5)
    run = tmp_path / "store"
    written = writing.write(run, Load(folder, run_id="store"), 0)
    assert written.num_trajectories == 64 * 2 * writing.MIN_CHUNKS
    assert 800 < written.num_tokens / written.num_trajectories < 1200
    sample = read_trajectories(RunReader.open(run), "group_id = 'g0'")
    logprobs = np.concatenate([step.model_logprobs for t in sample for step in t.steps])
    assert len(np.unique(logprobs)) > 0.9 * len(logprobs)
    assert 0 < sizes.lake_bytes(run) < sizes.json_bytes(run, tmp_path)
    monkeypatch.setattr(bulk, "ROWS_A_COMMIT", 1_000)
    assert bulk.append_over_parquet(run, tmp_path) > 0
    bulk.compact_run(run)
    read_over_column, speed = bulk.scan(run)
    assert read_over_column > 1 or bulk.bytes_read() == 0, "the kernel counts what is read, or nothing"
    assert speed > 0
