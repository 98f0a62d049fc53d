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
from hotpot.learner.culprits import Suspects, TokenValues, find
from hotpot.learner.findings import Finding
from hotpot.learner.forward import TokenScores, score
from hotpot.learner.losses import LossInput, LossOutput, LossSettings, LossStatistics, policy_loss
from hotpot.learner.norm_watch import NormWatch
from hotpot.learner.passes import MicroBatch, cut, layout_hash
from hotpot.learner.replayed import Decoupled, Replayed, importance
from hotpot.learner.results import Agreement, OptimizerStep
from hotpot.learner.weights import token_weights
from hotpot.models import Decoder

PASS_TOKENS = 2048
"""Padded tokens of one pass where the recipe allows as many: what a layer computes then stays in the processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Minibatch:
    """What one optimiser step learns from. ``weights`` float64 ``[N]``: weight of each of the batch's loss tokens in the
    step's mean (times its trajectory's own weight), 0 for those of other minibatches."""

    epoch: int
    index: int
    members: Sequence[BatchSequence]
    micros: Sequence[MicroBatch]
    weights: NDArray[np.float64]


class UpdateSteps:
    """The optimiser steps of one batch.

    ``first``, ``first_model`` float64 ``[N]``: log-probabilities at the starting weights, at the training temperature and
    at 1; both, and :attr:`old`, are complete once :meth:`run` is exhausted. ``replayed``: which loss tokens are.
    ``pass_tokens`` bounds a pass.
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
        policy_version: int,
        watch: NormWatch,
    ) -> None:
        self._watch = watch
        self._decoder, self._reference, self._optimizer = decoder, reference, optimizer
        self._settings, self._batch, self._temperature = settings, batch, temperature
        self._loss_settings = LossSettings(
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            clip_dual=settings.clip_dual,
            ratio=settings.ratio,
            kl_coefficient=settings.kl_coefficient if settings.kl_in == "loss" else 0.0,
            kl_estimator=settings.kl_estimator,
            entropy_coefficient=settings.entropy_coefficient,
        )
        self._sequences = batch.sequence_numbers
        self.pass_tokens = min(settings.micro_batch_tokens, max(PASS_TOKENS, _longest(batch)))
        self.first = np.zeros(batch.num_loss_tokens)
        self.first_model = np.zeros(batch.num_loss_tokens)
        self._entropy = np.zeros(batch.num_loss_tokens)
        self._recompute = settings.old_logprobs == "recomputed"
        self.replayed = Replayed.of(batch)
        self._decoupled = Decoupled.of(batch, settings, policy_version)
        self._reference_logprobs: NDArray[np.float64] | None = None
        self._plan = [
            [
                self._minibatch(epoch, index, members)
                for index, members in enumerate(
                    deal(batch, minibatches=settings.minibatches, seed=seed, update=update, epoch=epoch)
                )
            ]
            for epoch in range(settings.epochs)
        ]

    def run(self) -> Iterator[OptimizerStep]:
        """Take the optimiser steps one by one; each is yielded after it was taken or skipped."""
        if not self._batch.sequences:
            return
        self._first_pass()
        for epoch in self._plan:
            for minibatch in epoch:
                yield self._step(minibatch, starting=minibatch.epoch == 0 and minibatch.index == 0)

    @property
    def old(self) -> NDArray[np.float64]:
        """Log-probabilities in the ratio's denominator, float64 ``[N]``."""
        recorded = self.first if self._recompute else self._batch.behaviour_logprobs
        return self._decoupled.old(recorded, self.first)

    @property
    def recomputes(self) -> bool:
        """Whether :attr:`old` is recomputed anywhere."""
        return self._recompute or self._decoupled.any

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
        length = self._settings.aggregation_tokens
        shares = token_weights(mask, owners, self._settings.aggregation, fixed_length=length) * given[:, None]
        weights[flat] = shares[mask].numpy()
        micros = self._passes(members)
        return Minibatch(epoch=epoch, index=index, members=members, micros=micros, weights=weights)

    def _passes(self, members: Sequence[BatchSequence]) -> list[MicroBatch]:
        return cut(members, max_tokens=self.pass_tokens, packing=self._settings.packing)

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
        policy, divergence, bonus, spread = 0.0, 0.0, 0.0, 0.0
        statistics = LossStatistics()
        new, losses = np.zeros_like(self.first), np.zeros_like(self.first)
        for micro in minibatch.micros:
            scores, output = self._forward(micro, minibatch, starting=starting)
            new[micro.flat] = scores.logprobs.detach().numpy()
            losses[micro.flat] = output.token_losses.numpy()
            if np.isfinite(losses).all():
                output.loss.backward()  # type: ignore[no-untyped-call]
            policy += float(output.policy_loss)
            divergence += float(output.kl_loss)
            bonus += float(output.entropy_loss)
            spread += float(scores.entropy.detach().double().sum())
            statistics += output.statistics
        norm, finding = self._finish(minibatch, new, losses)
        return OptimizerStep(
            epoch=minibatch.epoch,
            minibatch=minibatch.index,
            loss=policy + divergence + bonus,
            policy_loss=policy,
            kl_loss=divergence,
            grad_norm=norm,
            entropy=spread,
            statistics=statistics,
            num_trajectories=len({member.owner for member in minibatch.members}),
            hash=layout_hash(minibatch.members, minibatch.micros),
            finding=finding,
        )

    def _forward(
        self, micro: MicroBatch, minibatch: Minibatch, *, starting: bool = False
    ) -> tuple[TokenScores, LossOutput]:
        """Return what one pass of the step comes to; ``starting``: its weights are those the update starts from."""
        explores = self._loss_settings.entropy_coefficient > 0
        scores = score(self._decoder, micro, temperature=self._temperature, entropy_gradient=explores)
        if starting:
            self.first[micro.flat] = scores.logprobs.detach().numpy()
            self.first_model[micro.flat] = scores.model_logprobs.numpy()
        return scores, policy_loss(self._loss_input(scores, micro, minibatch), self._loss_settings)

    def _loss_input(self, scores: TokenScores, micro: MicroBatch, minibatch: Minibatch) -> LossInput:
        def pick(values: NDArray[np.float64]) -> Tensor:
            return torch.from_numpy(values[micro.flat])

        reference = None if self._reference_logprobs is None else pick(self._reference_logprobs)
        return LossInput(
            new_logprobs=scores.logprobs.double(),
            old_logprobs=pick(self.old),
            advantages=pick(self._batch.advantages),
            weights=torch.from_numpy(self._weights(micro, minibatch)),
            mask=torch.ones(len(micro.flat), dtype=torch.bool),
            reference_logprobs=reference,
            sequences=torch.from_numpy(self._sequences[micro.flat]),
            entropy=scores.entropy.double(),
        )

    def _weights(self, micro: MicroBatch, minibatch: Minibatch) -> NDArray[np.float64]:
        """Return the weights of the pass's loss tokens, ``[k]``, the importance of decoupled ones multiplied in."""
        weights, flat = minibatch.weights[micro.flat], micro.flat
        if not self._decoupled.any:
            return weights
        # A sampler that filtered is compared by the raw model's log-probabilities, as in :meth:`agreement`.
        proximal = self.first_model if self._recompute else self.first
        sampled = self._batch.model_logprobs if self._recompute else self._batch.behaviour_logprobs
        factors = importance(proximal[flat], sampled[flat], self._decoupled.caps[flat])
        return np.where(self._decoupled.mask[flat], weights * factors, weights)

    def _finish(
        self, minibatch: Minibatch, new: NDArray[np.float64], losses: NDArray[np.float64]
    ) -> tuple[float, Finding | None]:
        """Step the optimiser, or skip; return the gradient norm before clipping and what was found wrong, if anything.

        ``new``, ``losses`` float64 ``[N]``: log-probability and unweighted loss of the step's tokens, 0 elsewhere.
        """
        broken, norm = np.flatnonzero(~np.isfinite(losses)), math.nan
        if not len(broken):
            norm = float(
                torch.nn.utils.clip_grad_norm_(self._decoder.parameters(), self._settings.max_grad_norm)
            )
        finding = None
        if not math.isfinite(norm) or self._watch.exploding(norm):
            values = TokenValues(
                old=self.old,
                new=new,
                advantages=self._batch.advantages,
                losses=losses,
                reference=self._reference_logprobs,
            )
            suspects = Suspects(
                members=minibatch.members,
                passes=[_members(micro, minibatch.members) for micro in minibatch.micros],
                norm_of=lambda part: self._gradient_norm(part, minibatch),
            )
            finding = find(
                suspects,
                values,
                broken.tolist(),
                norm,
                watch=self._watch,
                skip_exploding=self._settings.skip_exploding,
            )
        if finding is not None and finding.skipped:
            self._optimizer.zero_grad(set_to_none=True)
        else:
            self._optimizer.step()
            self._watch.observe(norm)
        return norm, finding

    def _gradient_norm(self, part: Sequence[BatchSequence], minibatch: Minibatch) -> float:
        """Return the norm of what ``part`` of the step adds to its gradient, before clipping; leaves ``.grad`` alone."""
        parameters = list(self._decoder.parameters())
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for micro in self._passes(part):
            _, output = self._forward(micro, minibatch)
            gradients = torch.autograd.grad(output.loss, parameters, allow_unused=True)
            for whole, gradient in zip(total, gradients, strict=True):
                if gradient is not None:
                    whole += gradient
        return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in total])))


def _members(micro: MicroBatch, members: Sequence[BatchSequence]) -> list[BatchSequence]:
    """Return the sequences that stand in one pass, in the batch's order."""
    inside = set(micro.flat.tolist())
    return [member for member in members if member.start in inside]


def _longest(batch: Batch) -> int:
    return max((len(member.sequence.tokens) + 7 for member in batch.sequences), default=0)
