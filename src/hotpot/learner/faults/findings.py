"""What was found wrong with one optimiser step: the reason, the trajectories and tokens, and what stood on them.

Owns the records. Decides nothing and finds nothing (:mod:`hotpot.learner.faults.culprits` does). Values here may be NaN or
infinite: that is what they are kept for. Bounds: at most :data:`MAX_TOKENS` tokens are named and :data:`MAX_SEQUENCES`
sequences kept of one step; the counts say how many there were.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Reason = Literal["non_finite_loss", "non_finite_gradient", "exploding_gradient"]

Network = Literal["policy", "critic"]
"""Whose gradient norm: the policy's, a value head's in it, or that of a critic with a decoder of its own."""

MAX_TOKENS = 32
"""Tokens named for one step; what one bad weight does to a batch is not told better by thousands."""

MAX_SEQUENCES = 16
"""Sequences of culprits whose arrays are kept for one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CulpritToken:
    """One loss token whose loss is not finite.

    ``position`` counts tokens within the segment (the piece's ``begin`` added). ``term`` is the loss term that is not
    finite: policy, kl, value or other; ``cause`` the first value behind it that is not: new_logprob, old_logprob,
    advantage, reference_logprob, new_value, old_value, returns, or overflow where all of them are finite.
    Log-probabilities in nats. ``new_value``, ``old_value`` and ``returns`` are the critic's, None without one.
    """

    trajectory_id: str
    segment: int
    position: int
    token: int
    term: str
    cause: str
    old_logprob: float
    new_logprob: float
    reference_logprob: float | None
    advantage: float
    loss: float
    new_value: float | None = None
    old_value: float | None = None
    returns: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CulpritSequence:
    """What the learner had of one sequence of a culprit: ``tokens`` int32, ``loss_mask`` int32, the others float64, all
    ``[n]`` and 0 under the mask. ``token_losses`` are unweighted."""

    trajectory_id: str
    group_id: str
    segment: int
    begin: int
    weight: float
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.int32]
    old_logprobs: NDArray[np.float64]
    new_logprobs: NDArray[np.float64]
    advantages: NDArray[np.float64]
    token_losses: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finding:
    """What was found wrong with one optimiser step.

    ``trajectories`` are to blame: those with a non-finite loss; else those whose gradient alone is not finite, or is
    exploding; else, where none is alone, all that were searched, the largest gradient first. ``norms`` are their own
    gradient norms, where they were computed again. ``passes`` number the guilty passes. ``num_tokens`` tokens have a non-finite
    loss, the first of which are ``tokens``. ``grad_norm`` is the step's before clipping (NaN where there was no
    gradient), ``median_norm`` the running median it is compared with (NaN where there is none yet), both of ``network``, whose
    gradient it was. ``sequences`` are of the first of ``trajectories``.
    """

    reason: Reason
    skipped: bool
    trajectories: tuple[str, ...]
    norms: tuple[float, ...] = ()
    passes: tuple[int, ...] = ()
    tokens: tuple[CulpritToken, ...] = ()
    num_tokens: int = 0
    grad_norm: float = float("nan")
    median_norm: float = float("nan")
    network: Network = "policy"
    sequences: tuple[CulpritSequence, ...] = ()
