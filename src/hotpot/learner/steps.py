"""The optimiser steps of one update: first pass, minibatches, passes, the finite check, the step itself.

Owns what happens between a batch and its optimiser steps. Decides nothing about rates, counters or when to give up.

The first pass gives every loss token's log-probability at the weights the update starts from. It runs without
gradient and leaves the first minibatch out: that one's own training pass has those very weights.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotpot.config.recipe import LearnerSection
from hotpot.learner import masked
from hotpot.learner.batches import Batch, BatchSequence, deal
from hotpot.learner.critic import Critic, clip_gradients
from hotpot.learner.forward import score
from hotpot.learner.losses import LossInput, LossSettings, LossStatistics, policy_loss, token_weights
from hotpot.learner.normalizing import normalize
from hotpot.learner.passes import MicroBatch, cut, pass_tokens
from hotpot.learner.replayed import Replayed, importance
from hotpot.learner.results import Agreement, OptimizerStep
from hotpot.learner.value_term import ValueTerm
from hotpot.models import Decoder


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Minibatch:
    """What one optimiser step learns from. ``weights`` float64 ``[N]``: weight of each of the batch's loss tokens in the
    step's mean (times its trajectory's own weight), 0 for those of other minibatches. ``advantages`` float64 ``[N]`` are
    those it learns with, normalised where the settings say so."""

    epoch: int
    index: int
    members: Sequence[BatchSequence]
    micros: Sequence[MicroBatch]
    weights: NDArray[np.float64]
    advantages: NDArray[np.float64]


class UpdateSteps:
    """The optimiser steps of one batch.

    ``first``, ``first_model`` float64 ``[N]``: log-probabilities at the starting weights, at the training temperature and
    at 1; both, and :attr:`old`, are complete once :meth:`run` is exhausted. ``replayed``: which loss tokens are.
    """

    def __init__(
        self,
        decoder: Decoder,
        optimizer: torch.optim.Optimizer,
        settings: LearnerSection,
        batch: Batch,
        *,
        temperature: float,
        reference: Decoder | None,
        seed: int,
        update: int,
        critic: Critic | None = None,
    ) -> None:
        self._decoder, self._reference, self._optimizer = decoder, reference, optimizer
        self._critic = critic
        self._term = None if critic is None else ValueTerm(critic, batch, clip=settings.value_clip)
        self._settings, self._batch, self._temperature = settings, batch, temperature
        self._loss_settings = LossSettings(
            clip_low=settings.clip_low, clip_high=settings.clip_high, kl_coefficient=settings.kl_coefficient
        )
        self._pass_tokens = pass_tokens(
            [member.sequence for member in batch.sequences], most=settings.micro_batch_tokens
        )
        self.first = np.zeros(batch.num_loss_tokens)
        self.first_model = np.zeros(batch.num_loss_tokens)
        self._entropy = np.zeros(batch.num_loss_tokens)
        self._recompute = settings.old_logprobs == "recomputed"
        self.replayed = Replayed.of(batch)
        self._reference_logprobs: NDArray[np.float64] | None = None
        self._plan = [
            [
                self._minibatch(epoch, index, members)
                for index, members in enumerate(
                    deal(batch, minibatches=settings.minibatches, seed=seed, update=update, epoch=epoch)
                )
            ]
            for epoch in range(settings.epochs + settings.critic_extra_epochs)
        ]

    def run(self) -> Iterator[OptimizerStep]:
        """Take the optimiser steps one by one; each is yielded after it was taken or skipped.

        Steps in which only the critic learns come last; of them only the skipped ones are yielded.
        """
        if not self._batch.sequences:
            return
        self._first_pass()
        for minibatch in (minibatch for epoch in self._plan for minibatch in epoch):
            if minibatch.epoch < self._settings.epochs:
                yield self._step(minibatch, starting=minibatch.epoch == 0 and minibatch.index == 0)
            elif self._term is not None:
                step = self._critic_step(self._term, minibatch)
                if step.skipped:
                    yield step

    @property
    def old(self) -> NDArray[np.float64]:
        """Log-probabilities in the ratio's denominator, float64 ``[N]``."""
        recorded = self.first if self._recompute else self._batch.behaviour_logprobs
        return self.replayed.old(recorded, self.first)

    @property
    def explained_variance(self) -> float | None:
        """Share of the returns' variance that the critic explained before the update; None without a critic."""
        return None if self._term is None else self._term.explained_variance

    @cached_property
    def num_padding(self) -> int:
        """Padding tokens in one pass over the batch."""
        return sum(micro.num_padding for minibatch in self._plan[0] for micro in minibatch.micros)

    @cached_property
    def num_shared(self) -> int:
        """Tokens that one pass over the batch computes once for several rows."""
        return sum(micro.num_shared for minibatch in self._plan[0] for micro in minibatch.micros)

    def agreement(self, fresh: NDArray[np.bool_]) -> Agreement:
        """Compare the first pass with what the sampler recorded, over the loss tokens ``fresh`` bool ``[N]``."""
        if self._recompute:
            difference = np.abs(self.first_model - self._batch.model_logprobs)
        else:
            difference = np.abs(self.first - self._batch.behaviour_logprobs)
        mask = torch.from_numpy(fresh & np.isfinite(difference))
        values = torch.from_numpy(difference)
        return Agreement(
            num_tokens=masked.count(mask),
            maximum=float(masked.maximum(values, mask)),
            mean=float(masked.mean(values, mask)),
        )

    def _minibatch(self, epoch: int, index: int, members: Sequence[BatchSequence]) -> Minibatch:
        lengths = torch.tensor([len(member.loss_positions) for member in members])
        owners = torch.tensor([member.owner for member in members])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        weights = np.zeros(self._batch.num_loss_tokens)
        flat = np.concatenate([np.arange(member.start, member.stop) for member in members])
        given = torch.tensor([member.sequence.weight for member in members], dtype=torch.float64)
        shares = token_weights(mask, owners, self._settings.aggregation) * given[:, None]
        weights[flat] = shares[mask].numpy()
        return Minibatch(
            epoch=epoch,
            index=index,
            members=members,
            micros=self._passes(members),
            weights=weights,
            advantages=self._normalized(flat),
        )

    def _normalized(self, flat: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the batch's advantages as a minibatch of the loss tokens ``flat`` learns with them."""
        how, advantages = self._settings.advantage_normalization, self._batch.advantages
        if how == "none":
            return advantages
        counted = torch.zeros(len(advantages), dtype=torch.bool)
        counted[torch.from_numpy(flat) if how == "minibatch" else slice(None)] = True
        return normalize(torch.from_numpy(advantages), counted).numpy()

    def _passes(self, members: Sequence[BatchSequence]) -> list[MicroBatch]:
        return cut(members, max_tokens=self._pass_tokens, packing=self._settings.packing)

    @torch.no_grad()
    def _first_pass(self) -> None:
        started = {member.start for member in self._plan[0][0].members}
        rest = [member for member in self._batch.sequences if member.start not in started]
        for micro in self._passes(rest):
            scores = score(self._decoder, micro, temperature=self._temperature, spread=False)
            self.first[micro.flat] = scores.logprobs.numpy()
            self.first_model[micro.flat] = scores.model_logprobs.numpy()
        if self._reference is not None:
            self._reference_logprobs = np.zeros(self._batch.num_loss_tokens)
            for micro in self._passes(self._batch.sequences):
                scores = score(self._reference, micro, temperature=self._temperature, spread=False)
                self._reference_logprobs[micro.flat] = scores.logprobs.numpy()

    def _step(self, minibatch: Minibatch, *, starting: bool) -> OptimizerStep:
        self._optimizer.zero_grad(set_to_none=True)
        policy, divergence, spread, misjudged = 0.0, 0.0, 0.0, 0.0
        statistics = LossStatistics()
        broken: set[int] = set()
        for micro in minibatch.micros:
            scores = score(self._decoder, micro, temperature=self._temperature)
            if starting:
                self.first[micro.flat] = scores.logprobs.detach().numpy()
                self.first_model[micro.flat] = scores.model_logprobs.numpy()
            output = policy_loss(self._loss_input(scores.logprobs, micro, minibatch), self._loss_settings)
            broken.update(micro.flat[~torch.isfinite(output.token_losses).numpy()].tolist())
            loss = output.loss
            if self._term is not None:
                judged = self._term.loss(micro, minibatch.weights, scores.hidden)
                broken.update(micro.flat[~torch.isfinite(judged.token_losses).numpy()].tolist())
                loss = loss + self._settings.value_coefficient * judged.loss
                misjudged += float(judged.loss.detach())
            if not broken:
                loss.backward()  # type: ignore[no-untyped-call]
            policy += float(output.policy_loss)
            divergence += float(output.kl_loss)
            spread += float(scores.entropy.double().sum())
            statistics += output.statistics
        norm, culprits = self._finish(minibatch, broken)
        return OptimizerStep(
            epoch=minibatch.epoch,
            minibatch=minibatch.index,
            loss=policy + divergence
            if self._term is None
            else policy + divergence + self._settings.value_coefficient * misjudged,
            policy_loss=policy,
            kl_loss=divergence,
            grad_norm=norm,
            entropy=spread,
            statistics=statistics,
            num_trajectories=len({member.owner for member in minibatch.members}),
            culprits=culprits,
            value_loss=None if self._term is None else misjudged,
        )

    def _critic_step(self, term: ValueTerm, minibatch: Minibatch) -> OptimizerStep:
        """Let only the critic learn from ``minibatch``."""
        self._optimizer.zero_grad(set_to_none=True)
        misjudged, broken = 0.0, set[int]()
        for micro in minibatch.micros:
            judged = term.loss(micro, minibatch.weights, None)
            broken.update(micro.flat[~torch.isfinite(judged.token_losses).numpy()].tolist())
            if not broken:
                (self._settings.value_coefficient * judged.loss).backward()  # type: ignore[no-untyped-call]
            misjudged += float(judged.loss.detach())
        norm, culprits = self._finish(minibatch, broken)
        return OptimizerStep(
            epoch=minibatch.epoch,
            minibatch=minibatch.index,
            loss=self._settings.value_coefficient * misjudged,
            policy_loss=0.0,
            kl_loss=0.0,
            grad_norm=norm,
            entropy=0.0,
            statistics=LossStatistics(),
            num_trajectories=len({member.owner for member in minibatch.members}),
            culprits=culprits,
            value_loss=misjudged,
        )

    def _loss_input(self, new: Tensor, micro: MicroBatch, minibatch: Minibatch) -> LossInput:
        def pick(values: NDArray[np.float64]) -> Tensor:
            return torch.from_numpy(values[micro.flat])

        reference = None if self._reference_logprobs is None else pick(self._reference_logprobs)
        return LossInput(
            new_logprobs=new.double(),
            old_logprobs=pick(self.old),
            advantages=pick(minibatch.advantages),
            weights=torch.from_numpy(self._weights(micro, minibatch)),
            mask=torch.ones(len(micro.flat), dtype=torch.bool),
            reference_logprobs=reference,
        )

    def _weights(self, micro: MicroBatch, minibatch: Minibatch) -> NDArray[np.float64]:
        """Return the weights of the pass's loss tokens, ``[k]``, the importance of replayed ones multiplied in."""
        weights, flat = minibatch.weights[micro.flat], micro.flat
        if not self.replayed.any:
            return weights
        # A sampler that filtered is compared by the raw model's log-probabilities, as in :meth:`agreement`.
        proximal = self.first_model if self._recompute else self.first
        sampled = self._batch.model_logprobs if self._recompute else self._batch.behaviour_logprobs
        factors = importance(proximal[flat], sampled[flat], self._settings.replayed_ratio_cap)
        return np.where(self.replayed.mask[flat], weights * factors, weights)

    def _finish(self, minibatch: Minibatch, broken: set[int]) -> tuple[float, tuple[str, ...]]:
        """Step the optimiser, or skip; return the gradient norm and who is to blame for a skip."""
        names = {member.owner: member.sequence.trajectory_id for member in minibatch.members}
        norm = math.nan
        if broken:
            guilty = {m.owner for m in minibatch.members if not broken.isdisjoint(range(m.start, m.stop))}
        else:
            norm, *others = clip_gradients(self._decoder, self._critic, self._settings.max_grad_norm)
            guilty = set() if all(map(math.isfinite, [norm, *others])) else set(names)
        if guilty:
            self._optimizer.zero_grad(set_to_none=True)
        else:
            self._optimizer.step()
        return norm, tuple(names[owner] for owner in sorted(guilty))
