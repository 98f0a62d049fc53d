"""Batches of random trajectories: the cold tier against TorchRL's memory-mapped storage and Lance's take.

    python benchmarks/replay_sampling.py            # SCALE=1.0: 1e5 trajectories of about 1,000 tokens

Needs torchrl 0.14.1 and pylance 14.0.2. From other code: ``compare(run_folder, scratch)`` measures any run folder whose
trajectories updates have learned, and returns ``sample_over_torchrl``, ``sample_over_lance`` and the milliseconds behind
them; ``make_run(folder, num_trajectories)`` writes one. All three hold the same values per token (tokens, loss mask, both
log-probabilities, policy version, segment), give back copies in memory, and are asked for the same random trajectories
in turn, after every one of them has been read once. The medians are compared.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hotpot.config import ReplaySection, StoreSection
from hotpot.experience import ExperienceStore, open_run, to_table
from hotpot.experience.lake import Lake
from hotpot.experience.replay import Replay
from hotpot.experience.replay.flat import FlatBatch
from hotpot.experience.storage import LakeLocation
from hotpot.testing.records import make_row, make_trajectory
from hotpot.types import GroupRow

BATCH = 256
ROUNDS = 30
BASE = 1_024
"""Different trajectories that are made; the others are copies of them with other ids and tokens."""

VOCABULARY = 32_000
TOKENS = ("tokens", "loss_mask", "behaviour_logprobs", "model_logprobs", "token_policy_version", "segments")


def compare(
    run_folder: Path, scratch: Path, *, batch: int = BATCH, rounds: int = ROUNDS, seed: int = 0
) -> dict[str, Any]:
    """Measure batches of ``batch`` random trajectories of a run; see the module."""
    settings = ReplaySection(cold_cache_bytes=1 << 40, hot_rounds=1)
    started = time.perf_counter()
    replay = Replay.open(open_run(run_folder), settings, seed=seed, cache_folder=scratch / "cache")
    opened = time.perf_counter()
    everything = np.arange(replay.index.num_lines)
    others = _Others(scratch, num_rows=len(everything))
    # Log segment by log segment, so that filling the cache reads each once.
    order = np.argsort(replay.index.segments, kind="stable")
    for begin in range(0, len(order), 2_048):
        lines = order[begin : begin + 2_048]
        flat, _ = replay.cold.sample_arrays(lines)
        others.fill(begin, flat)
    others.close_filling()
    place = np.empty_like(order)
    place[order] = everything
    ways: dict[str, Callable[[np.ndarray], Any]] = {
        "hotpot": replay.cold.sample_arrays,
        "torchrl": lambda lines: others.torchrl(place[lines]),
        "lance": lambda lines: others.lance(place[lines]),
    }
    seconds = _measured(ways, len(everything), batch=batch, rounds=rounds, seed=seed)
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    return {
        "trajectories": len(everything),
        "tokens": int(replay.index.num_tokens.sum()),
        "sample_over_torchrl": round(medians["torchrl"] / medians["hotpot"], 3),
        "sample_over_lance": round(medians["lance"] / medians["hotpot"], 3),
        **{f"{name}_ms": round(1e3 * value, 3) for name, value in medians.items()},
        "open_s": round(opened - started, 2),
        "cache_over_tokens_bytes": round(_folder_bytes(scratch / "cache") / replay.index.num_tokens.sum(), 2),
    }


class _Others:
    """The same trajectories in TorchRL's storage (padded to the longest) and in Lance (lists)."""

    def __init__(self, scratch: Path, *, num_rows: int) -> None:
        from torchrl.data import LazyMemmapStorage

        self._torchrl = LazyMemmapStorage(num_rows, scratch_dir=str(scratch / "torchrl"))
        self._lance_path = str(scratch / "lance")
        self._dataset: Any = None

    def fill(self, begin: int, flat: FlatBatch) -> None:
        import lance
        import torch
        from tensordict import TensorDict

        lengths = np.diff(flat.offsets)
        inside = np.arange(WIDTH) < lengths[:, None]
        columns = {}
        for name in TOKENS:
            values = getattr(flat, name)
            padded = np.zeros(inside.shape, values.dtype)
            padded[inside] = values
            columns[name] = torch.from_numpy(padded)
        columns["length"] = torch.from_numpy(lengths)
        rows = TensorDict(columns, batch_size=[len(lengths)])
        self._torchrl.set(torch.arange(begin, begin + len(lengths)), rows)
        offsets = pa.array(flat.offsets.astype(np.int32))
        table = pa.table({n: pa.ListArray.from_arrays(offsets, pa.array(getattr(flat, n))) for n in TOKENS})
        lance.write_dataset(table, self._lance_path, mode="append" if begin else "create")

    def close_filling(self) -> None:
        import lance

        self._dataset = lance.dataset(self._lance_path)

    def torchrl(self, rows: np.ndarray) -> Any:
        import torch

        return self._torchrl.get(torch.from_numpy(rows))

    def lance(self, rows: np.ndarray) -> Any:
        return self._dataset.take(rows.tolist())


WIDTH = 1_536
"""Longest trajectory that is padded to; those of :func:`make_run` have about 1,000 tokens."""


def make_run(folder: Path, num_trajectories: int, *, segment: int = 2_048) -> None:
    """Write a run of trajectories of about 1,000 tokens (8 steps each), ``segment`` of them per log segment."""
    ExperienceStore.open(folder, run_id="run", settings=StoreSection(), vocabulary_size=VOCABULARY).close()
    base = [
        make_trajectory(
            issue=number // 8, sample=number % 8, reward=float(number % 2), num_steps=8,
            prompt_tokens=75, sampled_tokens=50, vocabulary=VOCABULARY,
        )
        for number in range(min(BASE, num_trajectories))
    ]  # fmt: skip
    rows = to_table("trajectories", [t.row for t in base])
    steps = to_table("steps", [step for t in base for step in t.steps])
    lake, number = Lake(LakeLocation.of(folder / "lake"), writer="run"), 1_000_000
    for begin in range(0, num_trajectories, segment):
        number += 1
        copies = range(begin // BASE, -(-min(begin + segment, num_trajectories) // BASE))
        tables = {
            "trajectories": pa.concat_tables([_renamed(rows, copy) for copy in copies]),
            "steps": pa.concat_tables([_renamed(steps, copy) for copy in copies]),
        }
        groups = sorted(set(tables["trajectories"].column("group_id").to_pylist()))
        tables["groups"] = to_table("groups", [make_row(GroupRow, group_id=g, update=number) for g in groups])
        first = 0
        for name, table in tables.items():
            lake.commit(name, number, table.combine_chunks(), np.arange(first, first + table.num_rows))
            first += table.num_rows
        lake.publish(number, {name: table.num_rows for name, table in tables.items()})


def _renamed(table: pa.Table, copy: int) -> pa.Table:
    """Return the table with ids of its own, and other tokens."""
    for place, field in enumerate(table.schema):
        column: Any = table.column(place).combine_chunks()
        if field.name in {"trajectory_id", "group_id", "episode_id", "attempt_id"}:
            column = pa.array([f"{copy}-{name}" for name in column.to_pylist()])
        elif field.name in {"prompt_tokens", "sampled_tokens"}:
            values = (column.values.to_numpy() + copy) % VOCABULARY
            column = pa.ListArray.from_arrays(
                column.offsets, pa.array(values.astype(np.int32)), type=field.type
            )
        else:
            continue
        table = table.set_column(place, field, column)
    return table


def _measured(
    ways: dict[str, Callable[[np.ndarray], Any]], num_rows: int, *, batch: int, rounds: int, seed: int
) -> dict[str, list[float]]:
    random = np.random.default_rng(seed)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 3):
        rows = random.choice(num_rows, min(batch, num_rows), replace=False)
        for name, way in ways.items():
            started = time.perf_counter()
            way(rows)
            if turn >= 3:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    count = round(1e5 * float(os.environ.get("SCALE", "1")))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_run(folder / "run", count)
        print(f"wrote {count} trajectories", flush=True)
        print(json.dumps(compare(folder / "run", folder)))


if __name__ == "__main__":
    main()
