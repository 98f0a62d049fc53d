"""What the arithmetic of an update hangs on besides its batch: recorded with it, so that it can be computed again.

Owns the record and how settings are written down. Learns nothing. No random generator is among the terms:
the learner draws no random numbers, its deal of trajectories to steps is a hash of seed, update and ids.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from hotpot.config.sections import LearnerSection
from hotpot.ids import canonical_json
from hotpot.learner.batches.budget import Halving
from hotpot.learner.precision import Precision, spelled

EXACT = ", exact"
"""Behind the name of the processor's instructions where passes were computed in the exact arithmetic."""

_LATER = ("pass_limit", "critic_norms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What decides in which order floating-point sums are taken on one kind of machine."""

    num_threads: int
    cpu_capability: str
    torch_build: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTerms:
    """The terms of one update.

    ``settings`` is the section ``learner`` and ``state`` what the learner carried into the update besides weights and
    moments, both as canonical JSON; where passes were halved in the middle of it, ``state`` says where (``halving``).
    ``pass_tokens`` bounds a pass. ``proximal_policy_version`` is the version whose recomputed log-probabilities the ratio was
    to, None where it was to the recorded ones only.
    """

    settings: str
    state: str
    temperature: float
    total_updates: int
    lost_updates: int
    pass_tokens: int
    reference_checksum: str | None
    proximal_policy_version: int | None
    kernels: Kernels
    halving: Halving | None = None

    def halved(self, halving: Halving | None) -> "UpdateTerms":
        """The same of an update in which passes were halved; itself where they were not."""
        if halving is None:
            return self
        state = canonical_json({**json.loads(self.state), "halving": asdict(halving)})
        return replace(self, state=state, halving=halving)


def kernels(precision: Precision = "float32", *, exact: bool = False) -> Kernels:
    """Return those that this process computes with now; products of bfloat16 have kernels of their own, and the ``exact``
    arithmetic has an order of its own."""
    capability = torch.backends.cpu.get_cpu_capability() + (EXACT if exact else "")
    return Kernels(
        num_threads=torch.get_num_threads(),
        cpu_capability=capability if precision == "float32" else f"{capability}, {spelled(precision)}",
        torch_build=f"{torch.__version__} {torch.version.git_version[:12]}",
    )


def settings_text(settings: LearnerSection) -> str:
    """Return ``settings`` as they are recorded."""
    return canonical_json(settings.model_dump(mode="json"))


def state_text(counters: Mapping[str, Any]) -> str:
    """Return a learner's ``counters`` at the beginning of an update as they are recorded.

    Counters that came later than the first records are among them only where they say something, so that older records
    compare.
    """
    return canonical_json({name: value for name, value in counters.items() if name not in _LATER or value})


def recorded_halving(state: str) -> Halving | None:
    """Return the halving that a recorded ``state`` tells of, None where it tells of none (or is empty)."""
    told = json.loads(state or "{}").get("halving")
    return None if told is None else Halving(**told)
