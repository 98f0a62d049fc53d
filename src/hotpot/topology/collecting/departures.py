"""Departures from the frozen sampling parameters: how many there were, as gauges, and which, as events.

::

    a request that asks for others    ── engine/gate.py, refused ──┐
    an environment that adds some     ── rollout/boundary.py ──────┤──► gauges, events
    an engine that reports others     ── rollout/engine_report.py ─┘

Owns what the record is told of them and remembers what it was told. Refuses nothing itself.
"""

from collections import Counter
from dataclasses import asdict
from typing import Any

from hotpot.engine import Engine
from hotpot.rollout import Rollout
from hotpot.types import SamplingOverride


class Departures:
    """What ``engine`` and ``rollout`` found since they were made; events say what is new since they were asked for last."""

    def __init__(self, engine: Engine, rollout: Rollout) -> None:
        self._gate, self._rollout = engine.gate, rollout
        self._told: Counter[tuple[str, str]] = Counter()

    def gauges(self) -> dict[str, float]:
        """Return the counts of this process by the name of their metric."""
        environments = self._rollout.counts.overrides.total()
        return {
            "rollout/sampling_overrides": self._gate.overrides.total() + environments,
            "rollout/engine_report_differences": self._rollout.reports.differences.total(),
        }

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return kind and detail of one event for each kind of departure that is new."""
        requests = [_request(one) for one in self._gate.take_overrides()]
        refused = self._new("request", {str(p): n for p, n in self._gate.overrides.items()})
        found: list[tuple[str, dict[str, Any]]] = [
            ("sampling_override", {"by": "request", "purpose": purpose, "count": count, "last": requests})
            for purpose, count in refused.items()
        ]
        for what, count in self._new("environment", self._rollout.counts.overrides).items():
            found.append(("sampling_override", {"by": "environment", "count": count, "reason": what}))
        for what, count in self._new("report", self._rollout.reports.differences).items():
            found.append(("engine_report_differs", {"count": count, "report": what}))
        return found

    def _new(self, by: str, counts: Counter[str] | dict[str, int]) -> dict[str, int]:
        found = {what: count - self._told[by, what] for what, count in counts.items()}
        self._told.update({(by, what): count for what, count in found.items()})
        return {what: count for what, count in found.items() if count}


def _request(one: SamplingOverride) -> dict[str, Any]:
    return {
        "request_id": one.request_id,
        "session_id": one.session_id,
        "sender": one.sender,
        "asked": asdict(one.asked),
        "frozen": asdict(one.frozen),
    }
