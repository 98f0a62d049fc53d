"""What a critic makes of every piece before the update: its values, and the advantages and returns they come to.

Owns the order of it: values, under V-trace the ratios to the policies that sampled, then the estimates. Decides no formula.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hotpot.config.sections import LearnerSection
from hotpot.experience import TrainingSequence
from hotpot.learner.batches.budget import PassBudget
from hotpot.learner.batches.states import PieceEstimates, PieceKey, PieceStates, Trace, estimate, piece_states
from hotpot.learner.scores.critic import Critic, state_values
from hotpot.learner.scores.kl_reward import Divergences, costs
from hotpot.learner.scores.starting import StartingLogprobs, starting_logprobs
from hotpot.models import Policy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """The ``estimates`` by piece, and what the starting policy says of their tokens where it was asked (V-trace)."""

    estimates: Mapping[PieceKey, PieceEstimates]
    starting: StartingLogprobs | None


def judged_pieces(
    critic: Critic,
    policy: Policy,
    pieces: Sequence[TrainingSequence],
    settings: LearnerSection,
    *,
    temperature: float,
    budget: PassBudget,
    divergence: Divergences,
) -> Judged:
    """Return what ``critic`` and ``policy``, as they stand before the update, make of ``pieces``; tokens pay for
    ``divergence``. Passes are as large as ``budget`` allows."""
    states = piece_states(pieces, settings.gae_level)
    values = budget.attempt(
        lambda tokens: state_values(critic, policy, states, max_tokens=tokens, packing=settings.packing),
        stage="values",
        sequences=pieces,
    )
    starting = None
    if settings.advantages == "vtrace":
        starting = _starting(policy, states, pieces, settings, temperature=temperature, budget=budget)
    estimates = estimate(
        states,
        values,
        discount=settings.discount,
        gae_lambda=settings.gae_lambda,
        costs=costs(divergence, settings.kl_coefficient),
        trace=None if starting is None else _trace(starting, settings),
    )
    return Judged(estimates=estimates, starting=starting)


def _starting(
    policy: Policy,
    states: Sequence[PieceStates],
    pieces: Sequence[TrainingSequence],
    settings: LearnerSection,
    *,
    temperature: float,
    budget: PassBudget,
) -> StartingLogprobs:
    return budget.attempt(
        lambda tokens: starting_logprobs(
            policy, states, temperature=temperature, max_tokens=tokens, packing=settings.packing
        ),
        stage="starting",
        sequences=pieces,
    )


def _trace(starting: StartingLogprobs, settings: LearnerSection) -> Trace:
    return Trace(
        log_ratios=starting.log_ratios(raw=settings.old_logprobs == "recomputed"),
        rho_bar=settings.vtrace_rho_bar,
        c_bar=settings.vtrace_c_bar,
    )
