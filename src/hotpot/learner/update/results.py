"""What one update reports: everything the tables ``updates``, ``groups`` and ``learned_tokens`` need from the learner.

Owns the records and the means derived from them. Denominators: a mean "over loss tokens" of an optimiser quantity is
over the loss tokens of all optimiser steps taken (each epoch counts its own); steps that were skipped enter nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotpot.errors import LearnerError
from hotpot.learner.estimators.advantages import GroupStatistics
from hotpot.learner.faults.findings import Finding
from hotpot.learner.losses.policy_loss import LossStatistics
from hotpot.learner.update.terms import UpdateTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """One optimiser step, taken or skipped. With ``critic_alone`` only the critic learned: the policy's figures are 0.

    ``loss`` is the sum of its terms, in nats: ``policy_loss``, ``kl_loss`` and ``entropy_loss`` (negative where there is a
    bonus), coefficients applied, and ``learner.value_coefficient`` times ``value_loss`` (None without a critic).
    ``grad_norm`` before clipping, of all that is clipped with the policy's: a value head is, a separate critic is not.
    ``critic_grad_norm`` is a separate critic's, None without one. ``entropy`` is a sum over loss tokens in nats. ``hash`` is over the pieces in it and their layout in passes.
    ``finding`` says what was wrong with it, also where it was taken all the same.
    """

    epoch: int
    minibatch: int
    loss: float
    policy_loss: float
    kl_loss: float
    grad_norm: float
    entropy: float
    statistics: LossStatistics
    num_trajectories: int
    hash: str
    entropy_loss: float = 0.0
    value_loss: float | None = None
    critic_grad_norm: float | None = None
    critic_alone: bool = False
    finding: Finding | None = None

    @property
    def skipped(self) -> bool:
        """Whether what was found kept the optimiser from stepping."""
        return self.finding is not None and self.finding.skipped

    @property
    def culprits(self) -> tuple[str, ...]:
        """The trajectories to blame where the step was skipped, else none."""
        return self.finding.trajectories if self.finding is not None and self.finding.skipped else ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearnedSequence:
    """One sequence of the batch with what was learned from each of its tokens; arrays ``[n]``, 0 under the mask.

    ``tokens`` int32; ``loss_mask`` int32 (1 or 0); ``advantages``, ``returns``, ``old_logprobs``, ``new_logprobs``
    float32. ``returns`` is what the critic learned, without one the trajectory's total reward (no discount, reward at the
    end). ``advantages`` are those learned with, except that ``advantage_normalization = "minibatch"`` puts them on a scale
    anew in each optimiser step. ``new_logprobs`` are at the weights the update started from (where
    :class:`~hotpot.learner.update.steps.UpdateSteps` makes no first pass: at those the token's own first step started from)
    and at the training temperature. ``position`` counts sequences from 0; ``begin`` and ``weight`` are the sequence's own.
    """

    position: int
    trajectory_id: str
    group_id: str
    segment: int
    begin: int
    weight: float
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.int32]
    advantages: NDArray[np.float32]
    returns: NDArray[np.float32]
    old_logprobs: NDArray[np.float32]
    new_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """|learner - sampler| log-probability in nats over the loss tokens that the update's starting weights sampled.

    ``num_tokens`` such tokens were compared (older ones, those behind a swap of weights in the midst of a model call, and
    non-finite values are not comparable); 0 where there are none. Recorded behaviour log-probabilities are compared at the training temperature; where ``old_logprobs`` is
    ``recomputed`` (the sampler may have filtered), the raw model's at temperature 1 are.
    """

    num_tokens: int
    maximum: float
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateResult:
    """One update. With no group with signal ``steps`` and ``learned`` are empty and every mean is 0.

    ``explained_variance``: the share of the returns' variance over loss tokens that the critic's values explained before
    the update (1 is all, 0 as good as any constant, below worse); None without a critic, or where returns do not vary.

    Counts: ``num_tokens`` given and sampled tokens of the batch; ``num_padding_tokens`` padding that one pass over it
    computes, ``num_shared_tokens`` those it computes once for several rows. Advantages are over the
    batch's loss tokens, staleness over those that were not replayed.
    """

    update: int
    policy_version: int
    batch_hash: str
    groups: tuple[GroupStatistics, ...]
    num_trajectories: int
    num_tokens: int
    num_loss_tokens: int
    num_padding_tokens: int
    num_shared_tokens: int
    epochs: int
    steps: tuple[OptimizerStep, ...]
    learning_rate: float
    has_reference: bool
    agreement: Agreement
    advantage_mean: float
    advantage_std: float
    staleness_mean: float
    staleness_max: int
    learned: tuple[LearnedSequence, ...]
    terms: UpdateTerms
    explained_variance: float | None = None
    critic_learning_rate: float | None = None

    @property
    def num_groups_kept(self) -> int:
        """Groups with signal."""
        return sum(group.kept for group in self.groups)

    @property
    def taken(self) -> tuple[OptimizerStep, ...]:
        """Optimiser steps that were taken, in order, those in which only the critic learned left out."""
        return tuple(step for step in self.steps if not step.skipped and not step.critic_alone)

    @property
    def taken_by_critic(self) -> tuple[OptimizerStep, ...]:
        """Optimiser steps taken in which only the critic learned, in order."""
        return tuple(step for step in self.steps if not step.skipped and step.critic_alone)

    @property
    def skipped_steps(self) -> int:
        """Optimiser steps skipped for a non-finite loss or gradient, or an exploding one."""
        return sum(step.skipped for step in self.steps)

    @property
    def skipped_critic_steps(self) -> int:
        """Those skipped in which only the critic would have learned."""
        return sum(step.skipped and step.critic_alone for step in self.steps)

    @property
    def skipped_trajectories(self) -> tuple[str, ...]:
        """Trajectories named by a skipped step, each once, in order of first appearance."""
        return tuple(dict.fromkeys(name for step in self.steps for name in step.culprits))

    @property
    def skipped_at(self) -> tuple[int, ...]:
        """Which optimiser steps were skipped, counted from 0 over all that were tried."""
        return tuple(index for index, step in enumerate(self.steps) if step.skipped)

    @property
    def losses(self) -> NDArray[np.float64]:
        """Loss of each optimiser step taken, in order."""
        return self._each(lambda step: step.loss)

    @property
    def policy_losses(self) -> NDArray[np.float64]:
        """Policy term of each optimiser step taken, in order."""
        return self._each(lambda step: step.policy_loss)

    @property
    def kl_losses(self) -> NDArray[np.float64]:
        """KL term of each optimiser step taken, in order, coefficient applied."""
        return self._each(lambda step: step.kl_loss)

    @property
    def entropy_losses(self) -> NDArray[np.float64]:
        """Entropy term of each optimiser step taken, in order, coefficient applied; 0 without a bonus."""
        return self._each(lambda step: step.entropy_loss)

    @property
    def value_losses(self) -> NDArray[np.float64]:
        """Value loss of each optimiser step taken, in order, coefficient not applied; empty without a critic."""
        values = [step.value_loss for step in self.taken if step.value_loss is not None]
        return np.array(values, dtype=np.float64)

    @property
    def critic_losses(self) -> NDArray[np.float64]:
        """Value loss of each step taken in which only the critic learned, in order, coefficient not applied."""
        values = [step.value_loss for step in self.taken_by_critic if step.value_loss is not None]
        return np.array(values, dtype=np.float64)

    @property
    def critic_grad_norms(self) -> NDArray[np.float64]:
        """A separate critic's gradient norm before clipping of each step taken, in order, those of its own last."""
        steps = (*self.taken, *self.taken_by_critic)
        norms = [step.critic_grad_norm for step in steps if step.critic_grad_norm is not None]
        return np.array(norms, dtype=np.float64)

    @property
    def entropies(self) -> NDArray[np.float64]:
        """Mean entropy over the loss tokens of each optimiser step taken, in order."""
        return self._each(lambda step: step.entropy / max(step.statistics.num_tokens, 1))

    @property
    def grad_norms(self) -> NDArray[np.float64]:
        """Gradient norm before clipping of each optimiser step taken, in order."""
        return self._each(lambda step: step.grad_norm)

    @property
    def loss(self) -> float:
        """Mean loss over the optimiser steps taken."""
        return _mean(self.losses)

    @property
    def policy_loss(self) -> float:
        """Mean policy term over the optimiser steps taken."""
        return _mean(self.policy_losses)

    @property
    def kl_loss(self) -> float:
        """Mean KL term over the optimiser steps taken, coefficient applied."""
        return _mean(self.kl_losses)

    @property
    def entropy_loss(self) -> float:
        """Mean entropy term over the optimiser steps taken, coefficient applied; 0 without a bonus."""
        return _mean(self.entropy_losses)

    @property
    def value_loss(self) -> float | None:
        """Mean value loss over the optimiser steps taken, coefficient not applied; None where no critic learned."""
        return _mean(self.value_losses) if len(self.value_losses) else None

    @property
    def grad_norm(self) -> float:
        """Mean gradient norm before clipping over the optimiser steps taken."""
        return _mean(self.grad_norms)

    @property
    def statistics(self) -> LossStatistics:
        """Sums over the loss tokens of all optimiser steps taken."""
        return sum((step.statistics for step in self.taken), LossStatistics())

    @property
    def ratio_mean(self) -> float:
        """Mean importance ratio new/old over loss tokens."""
        return self._per_token(self.statistics.ratio)

    @property
    def clip_fraction(self) -> float:
        """Share of loss tokens whose ratio was clipped (they have no policy gradient)."""
        return self._per_token(self.statistics.clipped)

    @property
    def approx_kl(self) -> float:
        """Mean k3 estimate of KL(old || new) over loss tokens."""
        return self._per_token(self.statistics.approx_kl)

    @property
    def overlap(self) -> float:
        """Mean of min(1, ratio) over loss tokens."""
        return self._per_token(self.statistics.overlap)

    @property
    def reference_kl(self) -> float | None:
        """Mean k3 estimate of KL(new || reference) over loss tokens; None without a reference."""
        return self._per_token(self.statistics.reference_kl) if self.has_reference else None

    @property
    def entropy(self) -> float:
        """Mean entropy of the policy at the training temperature over loss tokens."""
        return self._per_token(sum(step.entropy for step in self.taken))

    def _each(self, figure: Callable[[OptimizerStep], float]) -> NDArray[np.float64]:
        return np.array([figure(step) for step in self.taken], dtype=np.float64)

    def _per_token(self, total: float) -> float:
        return total / max(self.statistics.num_tokens, 1)


class NonFiniteError(LearnerError):
    """Too many optimiser steps in a row were skipped: a non-finite loss or gradient, or an exploding one.

    ``result`` is the update as far as it came: its last step is the skipped one that was one too many.
    """

    def __init__(self, message: str, result: UpdateResult) -> None:
        super().__init__(message)
        self.result = result


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else 0.0
