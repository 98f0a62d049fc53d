"""The gate: whether a trajectory may enter the log, and the quarantine record of one that may not.

Owns the decision and its wording. Knows no log, ledger or clock (the caller gives the time). The rules are in
:mod:`hotpot.experience.gate.rules`.

Invariant: it never raises, whatever it is given; what it cannot make sense of is refused with a reason.
"""

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotpot.experience.gate.rules import RULES, Limits
from hotpot.experience.records.typecheck import shown
from hotpot.types import SCHEMA_VERSION, QuarantineRow, Trajectory

MAX_PAYLOAD_DEPTH = 12
"""A payload is written as JSON to this depth; deeper parts as their Python text."""


MAX_INTEGER_BITS = 4096
"""Integers up to this size are written as numbers; Python reads and writes no arbitrarily long ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a trajectory was refused: the rule's machine-readable name, and the value, rule and remedy in words."""

    reason: str
    detail: str


def check(trajectory: Trajectory, limits: Limits, *, proven: frozenset[str] = frozenset()) -> Refusal | None:
    """Return None where the trajectory keeps every rule, else the first rule it breaks.

    Rules named in ``proven`` are known to hold already (:func:`hotpot.experience.gate.rules.proven`) and are not tried.
    """
    for name, rule in RULES.items():
        if name in proven:
            continue
        detail = rule(trajectory, limits)
        if detail is not None:
            return Refusal(reason=name, detail=detail)
    return None


def quarantine_row(
    record: Any,
    refusal: Refusal,
    *,
    run_id: str,
    quarantine_id: str,
    time_us: int,
    producer: str | None = None,
) -> QuarantineRow:
    """Return the quarantine record of whatever was refused, with the whole payload as JSON.

    ``producer`` is by default the actor that the record names.
    """
    row = part(record, "row")
    claimed = part(record if isinstance(record, Mapping) else row, "schema_version")
    return QuarantineRow(
        run_id=run_id,
        quarantine_id=quarantine_id,
        record_kind="trajectories",
        record_id=readable(part(row, "trajectory_id", "")),
        producer=readable(part(row, "actor_id", "") if producer is None else producer),
        reason=refusal.reason,
        detail=readable(refusal.detail),
        payload=payload_json(record),
        payload_schema_version=claimed if type(claimed) is int and abs(claimed) < 2**63 else -1,
        time_us=time_us,
        schema_version=SCHEMA_VERSION,
    )


def part(record: Any, name: str, default: Any = None) -> Any:
    """Return what a record has under ``name``, be it a mapping or an object; ``default`` where it has nothing."""
    return record.get(name, default) if isinstance(record, Mapping) else getattr(record, name, default)


def claimed_attempt(record: Any) -> str | None:
    """Return the attempt that a record of any shape says it belongs to, if it says so in text."""
    found = part(part(record, "row"), "attempt_id")
    return found if isinstance(found, str) else None


def readable(value: Any) -> str:
    """Return any value as text that UTF-8 can carry (lone surrogates become ``?``)."""
    text = value if isinstance(value, str) else shown(value)
    return text.encode("utf-8", "replace").decode("utf-8")


def payload_json(value: Any) -> str:
    """Return a record of any shape as JSON text: dataclasses as objects, arrays as lists, the unknown as its repr.

    Non-finite numbers become the strings ``"nan"``, ``"inf"``, ``"-inf"``, and integers of more than
    :data:`MAX_INTEGER_BITS` hexadecimal text, so that any JSON reader can read it.
    """
    return json.dumps(_plain(value, MAX_PAYLOAD_DEPTH), ensure_ascii=True, allow_nan=False)


def _plain(value: Any, depth: int) -> Any:
    if depth == 0:
        return readable(value)
    if value is None or isinstance(value, (bool, int)):
        return hex(value) if value is not None and value.bit_length() > MAX_INTEGER_BITS else value
    if isinstance(value, enum.Enum):
        return _plain(value.value, depth - 1)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, np.ndarray):
        return _plain(value.tolist(), depth - 1)
    if isinstance(value, np.generic):
        return _plain(value.item(), depth - 1)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name, None), depth - 1)
            for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {readable(key): _plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth - 1) for item in value]
    return readable(value)
