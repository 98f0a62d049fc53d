"""Who is to blame for an optimiser step that cannot be taken: tokens, trajectories, passes.

Owns the naming. Knows no model and no optimiser: gradient norms come from a callable. A non-finite loss names its
tokens. A gradient names nobody, so it is taken apart: pass by pass, then, within the guilty passes, trajectory by
trajectory, at most :data:`MAX_SEARCHED` of them: the work of a few more steps, and only where one failed.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotpot.learner.batches.batches import BatchSequence
from hotpot.learner.faults.findings import (
    MAX_SEQUENCES,
    MAX_TOKENS,
    CulpritSequence,
    CulpritToken,
    Finding,
    Network,
    Reason,
)
from hotpot.learner.faults.norm_watch import NormWatch

MAX_SEARCHED = 64
"""Trajectories of one step whose gradient is computed again on their own."""

_UNJUDGED: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CriticValues:
    """What the critic had on each loss token, float64 ``[N]``: its value in the step and before the update, the return it
    was to learn."""

    new: NDArray[np.float64]
    old: NDArray[np.float64]
    returns: NDArray[np.float64]

    def at(self, flat: int) -> dict[str, float]:
        """Return what it had on one token, by name."""
        numbers = {"new_value": self.new, "old_value": self.old, "returns": self.returns}
        return {name: float(values[flat]) for name, values in numbers.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenValues:
    """What a step had on each loss token, float64 ``[N]`` in the batch's numbering; only its own tokens are filled in.
    ``critic`` is None without one."""

    old: NDArray[np.float64]
    new: NDArray[np.float64]
    advantages: NDArray[np.float64]
    losses: NDArray[np.float64]
    reference: NDArray[np.float64] | None
    critic: CriticValues | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Suspects:
    """The sequences of a step, those of each of its passes, and ``norm_of``: the gradient norm of some of them alone, as
    they weigh in the step."""

    members: Sequence[BatchSequence]
    passes: Sequence[Sequence[BatchSequence]]
    norm_of: Callable[[Sequence[BatchSequence]], float]


def find(
    suspects: Suspects,
    values: TokenValues,
    broken: Sequence[int],
    norm: float,
    *,
    watch: NormWatch,
    skip_exploding: bool,
    network: Network = "policy",
) -> Finding:
    """Return what is wrong with a step that has a non-finite loss on the tokens ``broken`` (numbers in the batch,
    ascending), or whose gradient ``norm`` cannot stand, that of ``network``. Exploding is what ``watch`` says."""
    passes: tuple[int, ...] = ()
    norms: Mapping[str, float] = {}
    if broken:
        bad = [m for m in suspects.members if any(m.start <= flat < m.stop for flat in broken)]
        trajectories = tuple(dict.fromkeys(member.sequence.trajectory_id for member in bad))
    else:
        guilty = watch.exploding if math.isfinite(norm) else _not_finite
        passes, norms = _search(suspects, guilty)
        alone = [name for name, found in norms.items() if guilty(found)]
        worst_first = alone or sorted(norms, key=lambda name: -norms[name])
        trajectories = tuple(worst_first)
    reason = _reason(broken, norm)
    return Finding(
        reason=reason,
        skipped=skip_exploding or reason != "exploding_gradient",
        trajectories=trajectories,
        norms=tuple(norms[name] for name in trajectories if name in norms),
        passes=passes,
        tokens=_name_tokens(suspects.members, broken, values),
        num_tokens=len(broken),
        grad_norm=norm,
        median_norm=watch.median,
        network=network,
        sequences=_keep_sequences(suspects.members, trajectories, values),
    )


def blame(
    new: float,
    old: float,
    advantage: float,
    reference: float | None,
    judged: Mapping[str, float] = _UNJUDGED,
) -> tuple[str, str]:
    """Return (term, cause) of a token whose loss is not finite; see :class:`CulpritToken`.

    ``judged``: what the critic had on it (:meth:`CriticValues.at`), empty without one.
    """
    cause = _first_not_finite({"new_logprob": new, "old_logprob": old, "advantage": advantage})
    if cause:
        return "policy", cause
    if reference is not None and not math.isfinite(reference):
        return "kl", "reference_logprob"
    cause = _first_not_finite(judged)
    if cause:
        return "value", cause
    with np.errstate(over="ignore"):
        if not np.isfinite(np.exp(new - old) * advantage):
            return "policy", "overflow"
        if reference is not None and not np.isfinite(np.expm1(reference - new)):
            return "kl", "overflow"
        if judged and not np.isfinite(np.square(judged["new_value"] - judged["returns"])):
            return "value", "overflow"
    return "other", "overflow"


def _first_not_finite(values: Mapping[str, float]) -> str:
    return next((name for name, value in values.items() if not math.isfinite(value)), "")


def _name_tokens(
    members: Iterable[BatchSequence], broken: Sequence[int], values: TokenValues
) -> tuple[CulpritToken, ...]:
    """Return the first :data:`MAX_TOKENS` of the loss tokens ``broken`` (numbers in the batch, ascending)."""
    named = []
    wanted = list(broken[:MAX_TOKENS])
    for member in members:
        for flat in (flat for flat in wanted if member.start <= flat < member.stop):
            place = int(member.loss_positions[flat - member.start])
            new, old, advantage = (float(x[flat]) for x in (values.new, values.old, values.advantages))
            reference = None if values.reference is None else float(values.reference[flat])
            judged = {} if values.critic is None else values.critic.at(flat)
            term, cause = blame(new, old, advantage, reference, judged)
            named.append(
                CulpritToken(
                    trajectory_id=member.sequence.trajectory_id,
                    segment=member.sequence.segment,
                    position=member.sequence.begin + place,
                    token=int(member.sequence.tokens[place]),
                    term=term,
                    cause=cause,
                    old_logprob=old,
                    new_logprob=new,
                    reference_logprob=reference,
                    advantage=advantage,
                    loss=float(values.losses[flat]),
                    **judged,
                )
            )
    return tuple(named)


def _keep_sequences(
    members: Iterable[BatchSequence], trajectories: Sequence[str], values: TokenValues
) -> tuple[CulpritSequence, ...]:
    """Return the first :data:`MAX_SEQUENCES` sequences of ``trajectories``, in that order, with what stood on them."""
    rank = {name: place for place, name in enumerate(trajectories)}
    theirs = [member for member in members if member.sequence.trajectory_id in rank]
    theirs.sort(key=lambda member: rank[member.sequence.trajectory_id])
    return tuple(_sequence(member, values) for member in theirs[:MAX_SEQUENCES])


def _search(
    suspects: Suspects, guilty: Callable[[float], bool]
) -> tuple[tuple[int, ...], Mapping[str, float]]:
    """Return the passes whose gradient norm alone is ``guilty``, and the norms of the trajectories in them.

    Where no pass is guilty alone, all are searched: only together were they too much.
    """
    passes = suspects.passes
    found = tuple(number for number, members in enumerate(passes) if guilty(suspects.norm_of(members)))
    by_trajectory: dict[str, list[BatchSequence]] = {}
    for number in found or range(len(passes)):
        for member in passes[number]:
            by_trajectory.setdefault(member.sequence.trajectory_id, []).append(member)
    chosen = list(by_trajectory.items())[:MAX_SEARCHED]
    return found, {name: suspects.norm_of(members) for name, members in chosen}


def _reason(broken: Sequence[int], norm: float) -> Reason:
    if broken:
        return "non_finite_loss"
    return "exploding_gradient" if math.isfinite(norm) else "non_finite_gradient"


def _not_finite(norm: float) -> bool:
    return not math.isfinite(norm)


def _sequence(member: BatchSequence, values: TokenValues) -> CulpritSequence:
    sequence = member.sequence

    def spread(of: NDArray[np.float64]) -> NDArray[np.float64]:
        out = np.zeros(len(sequence.tokens))
        out[member.loss_positions] = of[member.start : member.stop]
        return out

    return CulpritSequence(
        trajectory_id=sequence.trajectory_id,
        group_id=sequence.group_id,
        segment=sequence.segment,
        begin=sequence.begin,
        weight=sequence.weight,
        tokens=sequence.tokens.astype(np.int32),
        loss_mask=sequence.loss_mask.astype(np.int32),
        old_logprobs=spread(values.old),
        new_logprobs=spread(values.new),
        advantages=spread(values.advantages),
        token_losses=spread(values.losses),
    )
