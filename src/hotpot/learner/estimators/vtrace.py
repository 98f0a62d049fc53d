"""V-trace: values and advantages of the learner's policy from what an older policy did.

Owns IMPALA's corrected targets (Espeholt et al., arXiv:1802.01561, equation 1 with its remark 1, and the policy gradient
of section 4.2). Knows no model: values and log-probabilities are given. As in :mod:`hotpot.learner.estimators.gae`, a step is an
action token, and the next one is the action token that follows, however many given tokens lie between.

With the ratio r(t) = pi(t) / mu(t), rho(t) = min(rho_bar, r(t)) and c(t) = lam * min(c_bar, r(t))::

    delta(t) = rho(t) * (reward(t) + gamma * V(t + 1) - V(t))
    v(t) = V(t) + delta(t) + gamma * c(t) * (v(t + 1) - V(t + 1))                          (1)
    A(t) = rho(t) * (reward(t) + gamma * v(t + 1) - V(t))

rho_bar decides what is converged to (the value of a policy between pi and mu), c_bar only how fast. Behind the last
action token of a trajectory V and v are its final value.

Invariants: on policy (pi = mu, both bounds >= 1) v(t) - V(t) is GAE's advantage with the same lam; nothing crosses
trajectories; ratios never overflow.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotpot.errors import LearnerError
from hotpot.learner.estimators.gae import ActionValues
from hotpot.learner.estimators.scan import scan_back


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Vtrace:
    """``targets`` float64 ``[n]`` for the value function (v), ``advantages`` float64 ``[n]`` for the policy gradient."""

    targets: NDArray[np.float64]
    advantages: NDArray[np.float64]


def vtrace(
    actions: ActionValues,
    log_ratio: NDArray[np.float64],
    *,
    gamma: float,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> Vtrace:
    """Return targets and advantages of all action tokens.

    ``log_ratio`` float64 ``[n]``: log pi - log mu of each. Raises :class:`LearnerError` unless
    ``rho_bar`` >= ``c_bar`` > 0, as the paper has it.
    """
    if not rho_bar >= c_bar > 0:
        raise LearnerError(
            f"rho_bar = {rho_bar} and c_bar = {c_bar}; V-trace needs rho_bar >= c_bar > 0, so raise the former or lower "
            "the latter"
        )
    rho = np.exp(np.minimum(log_ratio, math.log(rho_bar)))
    trace = lam * np.exp(np.minimum(log_ratio, math.log(c_bar)))
    values, following, last = actions.values, actions.following, actions.last
    delta = rho * (actions.rewards + gamma * following - values)
    targets = values + scan_back(delta, np.where(last, 0.0, gamma * trace))
    behind = np.where(last, following, np.append(targets[1:], 0.0)[: len(targets)])
    return Vtrace(targets=targets, advantages=rho * (actions.rewards + gamma * behind - values))
