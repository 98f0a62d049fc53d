"""Whether the engine did what it was asked to, by its own report: one answer after the other.

Owns the comparison of :class:`~hotpot.types.EngineReport` with the frozen sampling parameters and with what the engine
says of itself, and the count of answers that differ. Knows no episode and no environment. A report that lies is not
found here: the self-test and ``updates.logprob_difference_max`` compare the log-probabilities themselves.
"""

from collections import Counter
from dataclasses import fields
from typing import Literal

from hotpot.errors import EngineReportError
from hotpot.rollout.attempts import tally
from hotpot.types import EngineInfo, EngineReport, Generation, GenerationRequest, SamplingParams

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
        found = difference(generation.report, request.sampling, self._info)
        if not found:
            return
        tally(self.differences, found)
        if self._refuses:
            raise EngineReportError(
                f"the engine's answer to request {request.request_id!r} ({request.purpose.value}) is refused: {found}; "
                "mend the engine's defaults (rollout.engine_report_differs = 'record' takes such answers and records them)"
            )


def difference(report: EngineReport, asked: SamplingParams, info: EngineInfo | None) -> str:
    """Return in words where ``report`` differs from the parameters ``asked`` and, if given, from the engine's own
    ``info``; "" where it does not. Devices are compared by kind: a group may serve from several of one kind.
    """
    values = [(name, getattr(report.sampling, name), getattr(asked, name), "frozen") for name in _SAMPLING]
    if info is not None:
        values.append(("precision", report.precision, info.precision, "the engine's own"))
        values.append(
            ("device", report.device_kind, info.device_kind, "the engine's own"),
        )
    found = [
        f"{name} {used!r} ({whose}: {wanted!r})" for name, used, wanted, whose in values if used != wanted
    ]
    return f"engine {report.engine!r} reports {', '.join(found)}" if found else ""
