"""Bulk writing through the lake against a bare Parquet write, and reading one column back against a bare read."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hotpot.experience import SCHEMAS, RunReader
from hotpot.experience.lake.lake import Lake
from hotpot.experience.lake.storage import LakeLocation
from hotpot.experience.maintenance import compact
from store_parts.sizes import column_bytes, lake_files, read_rows

ROWS_A_COMMIT = 8_192
MOST_COMMITS = 24
BARE: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": [field.name for field in SCHEMAS["steps"] if field.type == pa.string()],
}
"""How the bare write goes: compressed as the lake does; dictionaries only where they save time, as in the lake."""

READS = 9
SCANNED = "reward"


def append_over_parquet(run: Path, scratch: Path) -> float:
    """Write the run's steps again, :data:`ROWS_A_COMMIT` rows a commit and in turns with ``pyarrow.parquet``.

    Returns the seconds of the bare write over those of the lake's. Neither waits for the device.
    """
    tables = read_rows(lake_files(run, "steps"), SCHEMAS["steps"], ROWS_A_COMMIT, MOST_COMMITS)
    if not tables:
        raise RuntimeError(f"fewer than {ROWS_A_COMMIT} steps to write; take a larger SCALE")
    lake = Lake(LakeLocation.of(scratch / "bulk"), writer="bulk")
    bare = scratch / "bare"
    bare.mkdir(parents=True)
    ours, theirs = [], []
    for number, table in enumerate(tables, start=1):
        path = bare / f"{number}.parquet"
        turns: list[tuple[list[float], Callable[[], Any]]] = [
            (ours, lambda n=number, t=table: lake.commit("steps", n, t, np.arange(t.num_rows))),
            (theirs, lambda p=path, t=table: pq.write_table(t, p, **BARE)),
        ]
        for seconds, act in turns if number % 2 else reversed(turns):
            seconds.append(_seconds(act))
    print(
        f"  {len(tables)} commits of {ROWS_A_COMMIT} rows: lake {1e3 * statistics.median(ours):.1f} ms, "
        f"bare Parquet {1e3 * statistics.median(theirs):.1f} ms (medians)"
    )
    return statistics.median(theirs) / statistics.median(ours)


def compact_run(run: Path) -> None:
    """Compact the lake, as its upkeep does."""
    for report in compact(RunReader.open(run)):
        if report.files_before > report.files_after:
            print(f"  {report.table}: {report.files_before} files become {report.files_after}")


def scan(run: Path) -> tuple[float, float]:
    """Read one float column of all steps through the reader, in turns with pyarrow over the same files.

    Returns (bytes read over the column's compressed bytes, bare seconds over the reader's). What the reader reads
    besides (footers, the columns that order and filter) counts. Both know the files beforehand: pyarrow is given them,
    the reader has taken its look at the run (:meth:`RunReader.at_once`), whose time is printed.
    """
    files = lake_files(run, "steps")
    reader = RunReader.open(run)
    looks = [_seconds(reader.at_once) for _ in range(3)]
    moment = reader.at_once()
    acts: dict[str, Callable[[], pa.Table]] = {
        "reader": lambda: moment.table("steps", [SCANNED]),
        "pyarrow": lambda: pq.read_table(files, columns=[SCANNED]),
    }
    if sorted(acts["reader"]()[SCANNED].to_pylist()) != sorted(acts["pyarrow"]()[SCANNED].to_pylist()):
        raise RuntimeError("the reader and pyarrow disagree")
    before = bytes_read()
    acts["reader"]()
    read = bytes_read() - before
    times: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(READS):
        for name, act in acts.items():
            times[name].append(_seconds(act))
    held = column_bytes(files)[SCANNED]
    ours, bare = (statistics.median(times[name]) for name in ("reader", "pyarrow"))
    print(
        f"  {SCANNED} of all steps in {len(files)} files: {read / 1e6:.2f} MB read for {held / 1e6:.2f} MB, "
        f"{1e3 * ours:.1f} ms (and {1e3 * min(looks):.1f} ms for a first look at all tables), "
        f"bare pyarrow {1e3 * bare:.1f} ms (medians)",
        flush=True,
    )
    return read / held, bare / ours


def _seconds(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def bytes_read() -> int:
    """Return the bytes this process has asked the kernel for so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])
