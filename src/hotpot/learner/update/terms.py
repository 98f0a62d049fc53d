"""What the arithmetic of an update hangs on besides its batch: recorded with it, so that it can be computed again.

Owns the record and how settings are written down. Learns nothing. No random generator is among the terms:
the learner draws no random numbers, its deal of trajectories to steps is a hash of seed, update and ids.
"""

from dataclasses import dataclass

import torch

from hotpot.config.sections import LearnerSection
from hotpot.ids import canonical_json
from hotpot.learner.precision import Precision, spelled


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
    moments, both as canonical JSON. ``pass_tokens`` bounds a pass. ``proximal_policy_version`` is the version whose
    recomputed log-probabilities the ratio was to, None where it was to the recorded ones only.
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


def kernels(precision: Precision = "float32") -> Kernels:
    """Return those that this process computes with now; products of bfloat16 have kernels of their own."""
    capability = torch.backends.cpu.get_cpu_capability()
    return Kernels(
        num_threads=torch.get_num_threads(),
        cpu_capability=capability if precision == "float32" else f"{capability}, {spelled(precision)}",
        torch_build=f"{torch.__version__} {torch.version.git_version[:12]}",
    )


def settings_text(settings: LearnerSection) -> str:
    """Return ``settings`` as they are recorded."""
    return canonical_json(settings.model_dump(mode="json"))
