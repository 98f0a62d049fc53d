"""Evidence of optimiser steps that could not be taken, or were out of all proportion: what is kept of each, and where.

::

    RUN/evidence/update-000012/step-0-3.arrow     update 12, epoch 0, minibatch 3

Owns the files' form and their bounds, and what the record says of each such step. One row per sequence of a culprit,
as the learner had it; the finding itself is JSON under ``hotpot.finding`` in the schema's metadata. The event holds no
token ids: a trajectory that is deleted later must not live on in it (its files of evidence are deleted with it).

Invariants: a file appears whole or not at all; files and bytes stay within their bounds over the life of the run,
resumes included; a step beyond them is recorded all the same, and says that it has no file.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from hotpot.errors import StoreError
from hotpot.ids import canonical_json
from hotpot.learner import CulpritSequence, Finding, OptimizerStep, UpdateResult

FOLDER = "evidence"
"""Folder of the run that holds the files."""

EVENTS = {
    "non_finite_loss": "non_finite",
    "non_finite_gradient": "non_finite",
    "exploding_gradient": "exploding",
}
"""Kind of the event that each reason is recorded as."""

MAX_NAMES = 32
"""Trajectories and tokens named in one event; the evidence has them all."""

_ROW: dict[str, pa.DataType] = {
    "trajectory_id": pa.string(),
    "group_id": pa.string(),
    "segment": pa.int64(),
    "begin": pa.int64(),
    "weight": pa.float64(),
    "tokens": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.int32()),
    "old_logprobs": pa.list_(pa.float64()),
    "new_logprobs": pa.list_(pa.float64()),
    "advantages": pa.list_(pa.float64()),
    "token_losses": pa.list_(pa.float64()),
}


class Evidence:
    """The evidence of the run in ``run_folder``: at most ``max_files`` files of ``max_bytes`` together."""

    def __init__(self, run_folder: Path, *, max_files: int, max_bytes: int) -> None:
        self._run_folder = run_folder
        self._max_files, self._max_bytes = max_files, max_bytes

    def keep(self, update: int, steps: Sequence[OptimizerStep]) -> list[tuple[str, dict[str, Any]]]:
        """Keep the evidence of those ``steps`` of ``update`` that were found wrong; return (kind, detail) of their events.

        Raises :class:`StoreError` where a file can't be written.
        """
        events = []
        for step in steps:
            if step.finding is not None:
                path = self._write(update, step, step.finding)
                events.append((EVENTS[step.finding.reason], _detail(update, step, step.finding, path)))
        return events

    def _write(self, update: int, step: OptimizerStep, finding: Finding) -> str:
        """Write one file and return its path within the run folder; empty where the bounds leave no room."""
        data = _arrow(finding)
        sizes = [path.stat().st_size for path in (self._run_folder / FOLDER).glob("*/*.arrow")]
        if len(sizes) >= self._max_files or sum(sizes) + len(data) > self._max_bytes:
            return ""
        name = f"{FOLDER}/update-{update:06d}/step-{step.epoch}-{step.minibatch}.arrow"
        path = self._run_folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError as error:
            raise StoreError(
                f"evidence {path} can't be written: {error}; check space and rights, or set learner.evidence_files = 0"
            ) from error
        return name


def halving_events(result: UpdateResult) -> list[tuple[str, dict[str, Any]]]:
    """Return (kind, detail) of the event that passes were halved in an update for want of memory; empty where they were not."""
    halving = result.terms.halving
    return [] if halving is None else [("out_of_memory", {"update": result.update, **asdict(halving)})]


def _arrow(finding: Finding) -> bytes:
    """Return one file: an Arrow table of the culprits' sequences, the finding in its metadata."""
    told = {**_figures(finding), "tokens": [_spelled(asdict(token)) for token in finding.tokens]}
    schema = pa.schema(list(_ROW.items()), metadata={"hotpot.finding": canonical_json(told)})
    columns = [[_value(sequence, name) for sequence in finding.sequences] for name in _ROW]
    table = pa.table(columns, schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def _value(sequence: CulpritSequence, name: str) -> Any:
    value = getattr(sequence, name)
    return value.tolist() if pa.types.is_list(_ROW[name]) else value


def _figures(finding: Finding) -> dict[str, Any]:
    return {
        "reason": finding.reason,
        "skipped": finding.skipped,
        "trajectories": list(finding.trajectories),
        "norms": [_number(norm) for norm in finding.norms],
        "passes": list(finding.passes),
        "num_tokens": finding.num_tokens,
        "network": finding.network,
        "grad_norm": _number(finding.grad_norm),
        "median_norm": _number(finding.median_norm),
    }


def _detail(update: int, step: OptimizerStep, finding: Finding, path: str) -> dict[str, Any]:
    """Return what the event says: figures and names, the first of them where they are many, and where the evidence is."""
    figures = _figures(finding)
    names = {name: figures[name][:MAX_NAMES] for name in ("trajectories", "norms", "passes")}
    tokens = [asdict(token) for token in finding.tokens[:MAX_NAMES]]
    return {
        **figures,
        **names,
        "tokens": [_spelled({k: v for k, v in token.items() if k != "token"}) for token in tokens],
        "num_trajectories": len(finding.trajectories),
        "update": update,
        "epoch": step.epoch,
        "minibatch": step.minibatch,
        "evidence": path,
    }


def _spelled(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _number(value) if isinstance(value, float) else value for name, value in values.items()}


def _number(value: float) -> float | str:
    """Return a number as JSON has it; NaN and the infinities, which it has not, as text."""
    return value if math.isfinite(value) else str(value)
