"""The one JSON at the end of a run, ``runs/<id>/summary.json``: a pure function of its inputs, written atomically.

The seconds add up to the whole: what the main loop spent on publishing and on anything unnamed is ``other``.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotpot.observability.files import replace_text
from hotpot.types import EvaluationRow, UpdateRow

SECONDS = ("generate", "environment", "store", "learn", "evaluate", "other")
"""The parts that the wall time of the main loop is split into."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SummaryInputs:
    """What a summary is made of.

    ``evaluations`` are all of the run, in order; those labelled before and after at split holdout make ``holdout``.
    ``span_seconds`` are :meth:`hotpot.timeline.Timeline.totals`. ``num_trajectories`` and ``num_tokens`` (given and
    sampled) count training; ``num_evaluation_trajectories`` the rest. ``versions`` maps each kind to the versions the
    run used. ``status`` says how it ended: finished, stopped or failed.
    """

    run_id: str
    status: str
    hotpot_version: str
    evaluations: Sequence[EvaluationRow]
    updates: Sequence[UpdateRow]
    span_seconds: Mapping[str, float]
    num_trajectories: int
    num_evaluation_trajectories: int
    num_tokens: int
    num_sampled_tokens: int
    versions: Mapping[str, Sequence[str]]


def summarise(inputs: SummaryInputs) -> dict[str, Any]:
    """Return the summary as plain values; numbers that are not finite become null."""
    seconds = split_seconds(inputs.span_seconds)
    last = inputs.updates[-1].update if inputs.updates else 0
    total_s = math.fsum(seconds.values())
    summary = {
        "run_id": inputs.run_id,
        "status": inputs.status,
        "hotpot_version": inputs.hotpot_version,
        "holdout": {
            "before": _holdout(inputs.evaluations, "before"),
            "after": _holdout([row for row in inputs.evaluations if row.update == last], "after"),
        },
        "trajectories": inputs.num_trajectories,
        "evaluation_trajectories": inputs.num_evaluation_trajectories,
        "tokens": inputs.num_tokens,
        "sampled_tokens": inputs.num_sampled_tokens,
        "updates": len(inputs.updates),
        "optimizer_steps": sum(row.optimizer_steps for row in inputs.updates),
        "skipped_steps": sum(row.skipped_steps for row in inputs.updates),
        "replayed_share": _share(inputs.updates),
        "seconds": seconds,
        "seconds_total": total_s,
        "tokens_per_s": inputs.num_tokens / total_s if total_s > 0 else None,
        "curve": [_point(row) for row in inputs.updates],
        "evaluations": [_evaluation(row) for row in inputs.evaluations],
        "versions": {kind: list(found) for kind, found in inputs.versions.items()},
    }
    finite: dict[str, Any] = _finite(summary)
    return finite


def split_seconds(span_seconds: Mapping[str, float]) -> dict[str, float]:
    """Return seconds by the names of :data:`SECONDS`; every other span, publishing too, is part of ``other``."""
    named = {name: span_seconds.get(name, 0.0) for name in SECONDS if name != "other"}
    rest = math.fsum(length for name, length in span_seconds.items() if name not in named)
    return {**named, "other": rest}


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write the summary to ``path``, whole or not at all. Raises OSError."""
    replace_text(path, [json.dumps(summary, indent=2, allow_nan=False), "\n"])


def _holdout(evaluations: Sequence[EvaluationRow], label: str) -> dict[str, Any] | None:
    """Return the last evaluation with ``label``, and under ``greedy`` the greedy one of the same moment.

    Of a mix: over the tasks of all its environments together, and under ``environments`` each by itself.
    """
    last = {
        (row.purpose, row.env_version, row.reward_version): row
        for row in evaluations
        if row.label == label and row.split == "holdout"
    }
    plain, greedy = (
        [row for (found, *_), row in last.items() if found == purpose]
        for purpose in ("evaluation", "evaluation_greedy")
    )
    if not plain:
        return None
    return {**_pooled(plain), "greedy": _pooled(greedy) if greedy else None}


def _pooled(rows: Sequence[EvaluationRow]) -> dict[str, Any]:
    """Return one measurement, or the mean over the tasks of several. Its interval is theirs combined (MOVER: Zou and
    Donner, "Construction of confidence limits about effect measures", 2008)."""
    if len(rows) == 1:
        return _interval(rows[0])
    num_tasks = sum(row.num_tasks for row in rows)
    share = [row.num_tasks / num_tasks for row in rows]

    def half(bound: str) -> float:
        return math.hypot(
            *(w * (getattr(row, bound) - row.success_rate) for w, row in zip(share, rows, strict=True))
        )

    mean = math.fsum(w * row.success_rate for w, row in zip(share, rows, strict=True))
    return {
        **_interval(rows[-1]),
        "mean": mean,
        "low": max(0.0, mean - half("success_low")),
        "high": min(1.0, mean + half("success_high")),
        "num_tasks": num_tasks,
        "reward_mean": math.fsum(w * row.reward_mean for w, row in zip(share, rows, strict=True)),
        "environments": [
            {
                "env": row.env,
                "env_version": row.env_version,
                "reward_version": row.reward_version,
                **_interval(row),
            }
            for row in rows
        ],
    }


def _interval(row: EvaluationRow) -> dict[str, Any]:
    return {
        "mean": row.success_rate,
        "low": row.success_low,
        "high": row.success_high,
        "num_tasks": row.num_tasks,
        "reward_mean": row.reward_mean,
        "temperature": row.temperature,
        "policy_version": row.policy_version,
    }


def _evaluation(row: EvaluationRow) -> dict[str, Any]:
    return {
        "evaluation": row.evaluation,
        "update": row.update,
        "label": row.label,
        "purpose": row.purpose,
        "split": row.split,
        "env": row.env,
        "env_version": row.env_version,
        **_interval(row),
    }


def _share(updates: Sequence[UpdateRow]) -> float:
    """Return the share of the trajectories in the loss that were replayed."""
    return sum(row.num_replayed for row in updates) / max(sum(row.num_trajectories for row in updates), 1)


def _point(row: UpdateRow) -> dict[str, Any]:
    return {
        "update": row.update,
        "policy_version": row.policy_version,
        "success": row.success_rate,
        "reward": row.reward_mean,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
