"""Whether the engine did what it was asked to, by its own report: one answer after the other.

Owns the comparison of :class:`~hotpot.types.EngineReport` with the frozen sampling parameters and with what the engine
says of itself, and the count of answers that differ. Knows no episode and no environment. A report that lies is found
here only where its numbers show it; the self-test and ``updates.logprob_difference_max`` compare the log-probabilities with
the learner's.
"""

from collections import Counter
from dataclasses import fields
from typing import Literal

import numpy as np

from hotpot.errors import EngineReportError
from hotpot.rollout.attempts import tally
from hotpot.types import EngineInfo, Generation, GenerationRequest, SamplingParams

ROUNDING = 1e-3
"""Largest difference in nats taken for rounding between two log-probabilities of one distribution."""

_SAMPLING = tuple(field.name for field in fields(SamplingParams))


class ReportCheck:
    """Compares answers with what was asked.

    ``differs``: ``refuse`` raises where an answer differs, ``record`` goes on; both count it in ``differences``, by what
    differs, in words.
    """

    def __init__(self, differs: Literal["refuse", "record"] = "refuse") -> None:
        self.differences: Counter[str] = Counter()
        self._refuses = differs == "refuse"
        self._info: EngineInfo | None = None

    def expect(self, info: EngineInfo) -> None:
        """Compare from now on with ``info``, what the engine says of itself."""
        self._info = info

    def check(self, generation: Generation, request: GenerationRequest) -> None:
        """Count ``generation`` if its report differs, and raise :class:`EngineReportError` if such are refused."""
        found = difference(generation, request.sampling, self._info)
        if not found:
            return
        tally(self.differences, found)
        if self._refuses:
            raise EngineReportError(
                f"the engine's answer to request {request.request_id!r} ({request.purpose.value}) is refused: {found}; "
                "mend the engine's defaults (rollout.engine_report_differs = 'record' takes such answers and records them)"
            )


def difference(generation: Generation, asked: SamplingParams, info: EngineInfo | None) -> str:
    """Return in words where the report of ``generation`` differs from the parameters ``asked`` and, if given, from the
    engine's own ``info``; "" where it does not. Devices are compared by kind: a group may serve from several of one kind.

    At temperature 1 with nothing filtered the distribution sampled from is the model's, so both log-probabilities of a
    token must be equal: a server that samples otherwise and does not say so is found by that.
    """
    report = generation.report
    values = [(name, getattr(report.sampling, name), getattr(asked, name), "frozen") for name in _SAMPLING]
    if info is not None:
        values.append(("precision", report.precision, info.precision, "the engine's own"))
        values.append(
            ("device", report.device_kind, info.device_kind, "the engine's own"),
        )
    found = [
        f"{name} {used!r} ({whose}: {wanted!r})" for name, used, wanted, whose in values if used != wanted
    ]
    if not found and asked == SamplingParams():
        gap = np.abs(generation.behaviour_logprobs - generation.model_logprobs).max(initial=0.0)
        if gap > ROUNDING:
            found.append(
                "temperature 1 and no filter, but behaviour log-probabilities that are not the model's: it sampled otherwise"
            )
    return f"engine {report.engine!r} reports {', '.join(found)}" if found else ""
