"""Random trajectories from the cold tier, against TorchRL's memory-mapped buffer and Lance.

Everyone holds the same trajectories with the same columns (tokens, loss mask, behaviour and model log-probabilities,
policy version and segment of each token, reward) and draws batches of :data:`BATCH` uniformly. Hotpot fills its cache of uncompressed
blocks from the lake, TorchRL its memory-mapped tensors (padded to the longest trajectory, which is what a buffer of one
shape needs), Lance its dataset; that is timed apart. Then all draw in turns, everyone's files in the page cache as far as
they fit.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotpot.experience import RunReader
from hotpot.experience.replay.cache import BlockCache
from hotpot.experience.replay.cold import Cold
from hotpot.experience.replay.index import SCHEMA, Index

BATCH = 256
DRAWS = 25
CACHE_BYTES = 8 << 30
FILL = 2_048
"""Trajectories handed to a store at once while it is filled."""

_LINES = """
    SELECT trajectory_id, group_id, env, reward, success, num_prompt_tokens + num_sampled_tokens AS num_tokens,
      1 AS "update", _segment AS segment
    FROM recorded_trajectories AS trajectories ORDER BY _segment, _row"""

_COLUMNS = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "behaviour_logprobs": np.float32,
    "model_logprobs": np.float32,
    "token_policy_version": np.int32,
    "segments": np.int32,
}

Draw = Callable[[NDArray[np.int64]], int]
"""Draws the trajectories of these numbers and returns how many tokens came."""


def sample(run: Path, scratch: Path, *, seed: int = 0) -> dict[str, float]:
    """Return seconds of the other over Hotpot's for a batch, by name (medians, above 1 is faster than the other)."""
    index, cold = open_cold(run, scratch / "cache")
    opponents: dict[str, Callable[..., Draw]] = {"torchrl": fill_torchrl, "lance": fill_lance}
    draws: dict[str, Draw] = {"hotpot": lambda lines: len(cold.sample_arrays(lines)[0].tokens)}
    began = time.perf_counter()
    tokens = sum(len(batch.tokens) for batch in _batches(index, cold))
    print(f"  filling the cache from the lake: {time.perf_counter() - began:.1f} s, {tokens} tokens")
    for name, fill in opponents.items():
        began = time.perf_counter()
        draws[name] = fill(scratch / name, _batches(index, cold), index)
        print(f"  filling {name}: {time.perf_counter() - began:.1f} s")
    random = np.random.default_rng(seed)
    times: dict[str, list[float]] = {name: [] for name in draws}
    for _ in range(DRAWS):
        lines = random.choice(index.num_lines, BATCH, replace=False)
        counts = {}
        for name, draw in draws.items():
            began = time.perf_counter()
            counts[name] = draw(lines)
            times[name].append(time.perf_counter() - began)
        if len(set(counts.values())) > 1:
            raise RuntimeError(f"the same trajectories have other numbers of tokens: {counts}")
    medians = {name: statistics.median(seconds[DRAWS // 5 :]) for name, seconds in times.items()}
    print(f"  {BATCH} trajectories: " + ", ".join(f"{name} {1e3 * s:.2f} ms" for name, s in medians.items()))
    return {name: medians[name] / medians["hotpot"] for name in opponents}


def open_cold(run: Path, cache: Path) -> tuple[Index, Cold]:
    """Return the index of all trajectories of a run, and the cold tier over them."""
    reader = RunReader.open(run)
    index = Index()
    lines = reader.sql(_LINES)
    index.extend(lines.cast(SCHEMA))
    watermark = int(index.segments.max())
    return index, Cold(reader, index, BlockCache(cache, max_bytes=CACHE_BYTES), watermark=watermark)


def _batches(index: Index, cold: Cold) -> Iterator[Any]:
    for first in range(0, index.num_lines, FILL):
        batch, gone = cold.sample_arrays(np.arange(first, min(index.num_lines, first + FILL)))
        if len(gone):
            raise RuntimeError(f"{len(gone)} trajectories of the run are not in its lake")
        yield batch


def fill_torchrl(folder: Path, batches: Iterator[Any], index: Index) -> Draw:
    """Fill TorchRL's buffer: one memory-mapped tensor per column, all of the longest trajectory's length."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

    logging.getLogger("torchrl").setLevel(logging.WARNING)
    longest = int(index.num_tokens.max())
    storage = LazyMemmapStorage(index.num_lines, scratch_dir=str(folder))
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=BATCH)
    for batch in batches:
        lengths = np.diff(batch.offsets)
        there = np.arange(longest) < lengths[:, None]
        columns = {}
        for name, dtype in _COLUMNS.items():
            padded = np.zeros(there.shape, dtype)
            padded[there] = getattr(batch, name)
            columns[name] = torch.from_numpy(padded)
        columns["reward"] = torch.from_numpy(batch.rewards)
        columns["length"] = torch.from_numpy(lengths)
        buffer.extend(TensorDict(columns, batch_size=[len(lengths)]))

    def draw(lines: NDArray[np.int64]) -> int:
        return int(storage.get(torch.from_numpy(lines))["length"].sum())

    return draw


def fill_lance(folder: Path, batches: Iterator[Any], index: Index) -> Draw:
    """Fill a Lance dataset: one row a trajectory, list columns."""
    import lance

    schema = pa.schema(
        [(name, pa.list_(pa.from_numpy_dtype(np.dtype(kind)))) for name, kind in _COLUMNS.items()]
    )
    schema = schema.append(pa.field("reward", pa.float64()))
    lists: Any = pa.ListArray

    def record_batches() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            offsets = pa.array(batch.offsets.astype(np.int32))
            arrays = [lists.from_arrays(offsets, pa.array(getattr(batch, name))) for name in _COLUMNS]
            yield pa.RecordBatch.from_arrays([*arrays, pa.array(batch.rewards)], schema=schema)

    dataset = lance.write_dataset(record_batches(), str(folder), schema=schema)
    if dataset.count_rows() != index.num_lines:
        raise RuntimeError(f"Lance holds {dataset.count_rows()} of {index.num_lines} trajectories")

    def draw(lines: NDArray[np.int64]) -> int:
        rows = dataset.take(lines.tolist())
        return sum(len(chunk.flatten()) for chunk in rows.column("tokens").chunks)

    return draw
