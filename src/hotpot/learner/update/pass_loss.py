"""What one pass of an optimiser step comes to, and the sums over the step's passes.

Owns the addition: the policy's loss and the critic's, pass to pass, and what each loss token had in them. Takes no step.

Invariant: a step's loss is the sum of its recorded terms, in the order policy, KL, entropy, value times its coefficient.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotpot.config.sections import LearnerSection
from hotpot.errors import LearnerError
from hotpot.learner.batches.batches import Batch
from hotpot.learner.batches.passes import MicroBatch
from hotpot.learner.losses.policy_loss import LossOutput, LossSettings, LossStatistics
from hotpot.learner.losses.value_loss import ValueLossInput, value_loss
from hotpot.learner.scores.forward import TokenScores


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judgement:
    """The critic's part in one pass: ``values`` float32 ``[k]`` with gradient; ``value_loss``, detached; ``term``, that
    times its coefficient, which is added to the policy's loss; ``token_losses`` float64 ``[k]`` the same by token, unweighted
    and detached."""

    values: Tensor
    value_loss: float
    term: Tensor
    token_losses: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassLoss:
    """One pass: its scores, the policy's loss and the critic's part; each is None where it does not learn."""

    micro: MicroBatch
    scores: TokenScores | None
    policy: LossOutput | None
    judged: Judgement | None

    @property
    def loss(self) -> Tensor:
        """The scalar to differentiate."""
        parts = [] if self.policy is None else [self.policy.loss]
        parts += [] if self.judged is None else [self.judged.term]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    @property
    def token_losses(self) -> NDArray[np.float64]:
        """Loss of each loss token of the pass, float64 ``[k]``, unweighted."""
        parts = [part.token_losses for part in (self.policy, self.judged) if part is not None]
        losses = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        return np.asarray(losses.numpy(), dtype=np.float64)


def judge(
    values: Tensor, batch: Batch, micro: MicroBatch, weights: NDArray[np.float64], settings: LearnerSection
) -> Judgement:
    """Return what the critic's ``values`` float32 ``[k]`` of the pass's loss tokens come to.

    ``weights`` float64 ``[N]`` are the policy's without the importance of decoupled tokens: a value is of a state, however
    its action was chosen. Raises :class:`LearnerError` where the batch was estimated without a critic.
    """
    if batch.values is None:
        raise LearnerError(
            "the batch holds no values for its critic to learn from; give build_batch the estimates"
        )
    output = value_loss(
        ValueLossInput(
            new_values=values.double(),
            old_values=torch.from_numpy(batch.values[micro.flat]),
            returns=torch.from_numpy(batch.returns[micro.flat]),
            weights=torch.from_numpy(weights[micro.flat]),
            mask=torch.ones(len(micro.flat), dtype=torch.bool),
        ),
        clip=settings.value_clip,
    )
    coefficient = settings.value_coefficient
    return Judgement(
        values=values,
        value_loss=float(output.loss.detach()),
        term=coefficient * output.loss,
        token_losses=coefficient * output.token_losses,
    )


def loss_settings(settings: LearnerSection) -> LossSettings:
    """Return what the policy's loss reads of ``settings``."""
    return LossSettings(
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        clip_dual=settings.clip_dual,
        ratio=settings.ratio,
        kl_coefficient=settings.kl_coefficient if settings.kl_in == "loss" else 0.0,
        kl_estimator=settings.kl_estimator,
        entropy_coefficient=settings.entropy_coefficient,
    )


class StepSums:
    """The sums over the passes of one step over a batch of ``num_loss_tokens``.

    ``new``, ``losses`` float64 ``[N]``: log-probability and unweighted loss of the step's tokens, 0 elsewhere; ``values``
    the same of the critic, None without one (``value_coefficient`` None). ``entropy`` is a sum over the step's loss tokens.
    """

    def __init__(self, num_loss_tokens: int, *, value_coefficient: float | None) -> None:
        judges = value_coefficient is not None
        self._value_coefficient = value_coefficient or 0.0
        self.policy_loss = self.kl_loss = self.entropy_loss = self.entropy = 0.0
        self.value_loss = 0.0 if judges else None
        self.statistics = LossStatistics()
        self.new, self.losses = np.zeros(num_loss_tokens), np.zeros(num_loss_tokens)
        self.values = np.zeros(num_loss_tokens) if judges else None

    @property
    def loss(self) -> float:
        """The step's loss."""
        loss = self.policy_loss + self.kl_loss + self.entropy_loss
        return loss if self.value_loss is None else loss + self._value_coefficient * self.value_loss

    @property
    def broken(self) -> list[int]:
        """Loss tokens whose loss is not finite, ascending."""
        numbers: list[int] = np.flatnonzero(~np.isfinite(self.losses)).tolist()
        return numbers

    def add(self, one: PassLoss) -> None:
        """Take one more pass into the sums."""
        flat = one.micro.flat
        self.losses[flat] = one.token_losses
        if one.scores is not None and one.policy is not None:
            self.new[flat] = one.scores.logprobs.detach().numpy()
            self.policy_loss += float(one.policy.policy_loss)
            self.kl_loss += float(one.policy.kl_loss)
            self.entropy_loss += float(one.policy.entropy_loss)
            self.entropy += float(one.scores.entropy.detach().double().sum())
            self.statistics += one.policy.statistics
        if one.judged is not None and self.values is not None and self.value_loss is not None:
            self.values[flat] = one.judged.values.detach().numpy()
            self.value_loss += one.judged.value_loss
