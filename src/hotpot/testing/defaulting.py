"""An engine that ignores what it is asked for and samples with parameters of its own, as a server with defaults does.

Use it to test that whatever stands above an engine notices: the requests are right, the gate lets them through, and the
report says what was really used.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hotpot.engine import Engine, RequestGate
from hotpot.types import (
    EngineInfo,
    Generation,
    GenerationRequest,
    PublishReport,
    Purpose,
    SamplingParams,
)

if TYPE_CHECKING:
    from hotpot.models import Weights


class DefaultingEngine:
    """Implements :class:`hotpot.engine.Engine` over ``inner``, which was made with ``defaults`` for its purposes.

    Parameters
    ----------
    inner: what samples; its frozen parameters are the defaults.
    gate: lets through what the run has frozen.
    reports: fields of :class:`~hotpot.types.EngineReport` that are reported otherwise than ``inner`` does.
    """

    def __init__(self, inner: Engine, gate: RequestGate, reports: Mapping[str, Any] | None = None) -> None:
        self.gate = gate
        self._inner = inner
        self._reports = dict(reports or {})

    def submit(self, request: GenerationRequest) -> None:
        """Take a request and ask ``inner`` for the defaults instead."""
        self.gate.check(request)
        self._inner.submit(replace(request, sampling=self._inner.gate.sampling[request.purpose]))

    def step(self) -> list[Generation]:
        """Step ``inner``."""
        return [
            replace(answer, report=replace(answer.report, **self._reports)) for answer in self._inner.step()
        ]

    def publish(self, weights: "Weights", policy_version: int) -> PublishReport:
        """Publish to ``inner``."""
        return self._inner.publish(weights, policy_version)

    def info(self) -> EngineInfo:
        """Return what ``inner`` says of itself."""
        return self._inner.info()

    def close(self) -> None:
        """Close ``inner``."""
        self._inner.close()


def greedy_by_default(sampling: Mapping[Purpose, SamplingParams]) -> dict[Purpose, SamplingParams]:
    """Return ``sampling`` with temperature 0 for every purpose: the commonest wrong default."""
    return {purpose: replace(params, temperature=0.0) for purpose, params in sampling.items()}
