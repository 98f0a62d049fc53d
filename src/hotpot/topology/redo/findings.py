"""How a recorded update and its doing over differ, figure by figure, in the order in which a difference arises. Pure.

Owns what is compared and what the comparison comes to. Two rows of table ``updates`` go in, the recorded one and the one
that the doing over would have recorded; knows neither how the latter came about nor what is said of it.

Invariant: ``identical`` means that every figure has the recorded bits, the checksum of the new weights among them.
"""

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal

from hotpot.experience.records.upgrades import steps_from
from hotpot.ids import canonical_json
from hotpot.types import UpdateRow

Verdict = Literal["identical", "close", "differs"]

ROUNDING = 1e-3
"""Largest relative difference that the rounding of another kind of machine is taken to explain."""

INPUTS = (
    "batch_hash",
    "num_loss_tokens",
    "learner_state",
    "reference_checksum",
    "proximal_policy_version",
    "learning_rate",
    "critic_learning_rate",
    "pass_tokens",
    "step_hashes",
    "advantage_mean",
    "advantage_std",
)
"""Columns that are settled before the first optimiser step: they must agree on any machine."""

STEPS = (
    "policy_losses",
    "kl_losses",
    "entropy_losses",
    "value_losses",
    "losses",
    "entropies",
    "grad_norms",
    "critic_grad_norms",
    "critic_losses",
)
"""List columns with one figure per optimiser step taken, in the order in which a step comes to them; the critic's own
steps are behind the others."""

OUTCOMES = (
    "logprob_difference_mean",
    "logprob_difference_max",
    "policy_loss",
    "kl_loss",
    "entropy_loss",
    "value_loss",
    "loss",
    "grad_norm",
    "entropy",
    "clip_fraction",
    "ratio_mean",
    "approx_kl",
    "reference_kl",
    "overlap",
    "explained_variance",
    "critic_steps",
    "skipped_critic_steps",
)
"""Columns that sum the optimiser steps up."""

KERNELS = ("num_threads", "cpu_capability", "torch_build")
"""Columns that say on which kind of machine the bits are promised."""

WEIGHTS = ("starting_weights", "weights_checksum")
"""Figures that only equal bits make equal: rounding changes them wholly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure: as recorded, and as it came out now. ``name`` is a column, with the optimiser step behind a list's."""

    name: str
    recorded: Any
    redone: Any

    @property
    def same(self) -> bool:
        """Whether both have the same bits (NaN equals NaN)."""
        if isinstance(self.recorded, float) and isinstance(self.redone, float):
            both_nan = math.isnan(self.recorded) and math.isnan(self.redone)
            return both_nan or struct.pack("<d", self.recorded) == struct.pack("<d", self.redone)
        return bool(self.recorded == self.redone)

    @property
    def close(self) -> bool:
        """Whether rounding can explain the difference."""
        if self.same:
            return True
        if isinstance(self.recorded, float) and isinstance(self.redone, float):
            return math.isclose(self.recorded, self.redone, rel_tol=ROUNDING, abs_tol=ROUNDING**2)
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a comparison found: every ``figures`` compared, and the ``kernels`` of then and now."""

    figures: tuple[Figure, ...]
    kernels: tuple[Figure, ...]

    @property
    def differences(self) -> tuple[Figure, ...]:
        """The figures that differ, in the order in which they arise."""
        return tuple(figure for figure in self.figures if not figure.same)

    @property
    def other_kernels(self) -> tuple[Figure, ...]:
        """In what this kind of machine differs from the one that recorded."""
        return tuple(figure for figure in self.kernels if not figure.same)

    @property
    def rounded(self) -> bool:
        """Whether rounding explains every difference."""
        return all(figure.close for figure in self.figures if figure.name not in WEIGHTS)

    @property
    def verdict(self) -> Verdict:
        """``identical``; ``close``: on another kind of machine, and up to rounding; else ``differs``."""
        if not self.differences:
            return "identical"
        return "close" if self.other_kernels and self.rounded else "differs"


def compare_rows(
    recorded: UpdateRow, redone: UpdateRow, *, starting: tuple[str, str] | None = None
) -> Findings:
    """Return what two rows of one update come to; ``starting``: checksums of the weights before it, recorded and now."""
    redone = _as_recorded_then(recorded, redone)
    begin = [Figure(name=WEIGHTS[0], recorded=starting[0], redone=starting[1])] if starting else []
    middle = [_figure(name, recorded, redone) for name in ("skipped_at", *OUTCOMES, WEIGHTS[1])]
    return Findings(
        figures=(*begin, *_inputs(recorded, redone), *_steps(recorded, redone), *middle),
        kernels=tuple(_figure(name, recorded, redone) for name in KERNELS),
    )


def _as_recorded_then(recorded: UpdateRow, redone: UpdateRow) -> UpdateRow:
    """Return ``redone`` as the schema version of ``recorded`` would have it: what that did not keep can't differ."""
    kept = {
        step.name: getattr(recorded, step.name) for step in steps_from("updates", recorded.schema_version)
    }
    if "critic_steps" not in kept:
        return redone
    hashes = redone.step_hashes[: len(redone.step_hashes) - redone.critic_steps]
    known = json.loads(recorded.learner_state or "{}")
    state = {name: value for name, value in json.loads(redone.learner_state or "{}").items() if name in known}
    return replace(redone, **kept, step_hashes=hashes, learner_state=canonical_json(state))


def _inputs(recorded: UpdateRow, redone: UpdateRow) -> Iterator[Figure]:
    for name in INPUTS:
        if name == "step_hashes":
            yield from _listed(name, recorded.step_hashes, redone.step_hashes)
        else:
            yield _figure(name, recorded, redone)


def _steps(recorded: UpdateRow, redone: UpdateRow) -> Iterator[Figure]:
    """Yield the figures of the first optimiser step taken, then those of the second, and so on."""
    columns = [
        list(_listed(name, getattr(recorded, name).tolist(), getattr(redone, name).tolist()))
        for name in STEPS
    ]
    for step in range(max(map(len, columns))):
        yield from (column[step] for column in columns if step < len(column))


def _figure(name: str, recorded: UpdateRow, redone: UpdateRow) -> Figure:
    return Figure(name=name, recorded=getattr(recorded, name), redone=getattr(redone, name))


def _listed(name: str, recorded: Sequence[Any], redone: Sequence[Any]) -> Iterator[Figure]:
    for index, (old, new) in enumerate(zip_longest(recorded, redone)):
        yield Figure(name=f"{name}[{index}]", recorded=old, redone=new)
