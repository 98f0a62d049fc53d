"""The optimiser steps of one update: first pass, minibatches, passes, the finite check, the step itself.

Owns what happens between a batch and its optimiser steps. Decides nothing about rates, counters or when to give up.
Until the optimiser itself steps, a step can begin anew, as it does where memory runs out.

The first pass gives every loss token's log-probability at the weights the update starts from. It runs without
gradient and leaves the first minibatch out: that one's own training pass has those very weights. V-trace has asked for all
of them already, and there is none. Where nothing is made of
them but the comparison with the sampler, ``learner.agreement`` may leave it at that minibatch: then there is no first pass,
and the others' log-probabilities are those of the weights that their own first step starts from.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotpot.config.sections import LearnerSection
from hotpot.learner import masked
from hotpot.learner.batches.batches import Batch, BatchSequence
from hotpot.learner.batches.budget import PassBudget, Stage
from hotpot.learner.batches.passes import MicroBatch, cut
from hotpot.learner.faults.culprits import CriticValues, Suspects, TokenValues, find
from hotpot.learner.faults.findings import Finding, Network
from hotpot.learner.faults.norm_watch import NormWatch
from hotpot.learner.losses.policy_loss import LossInput, policy_loss
from hotpot.learner.losses.value_loss import explained_variance
from hotpot.learner.scores.critic import Critic
from hotpot.learner.scores.forward import TokenScores, score
from hotpot.learner.scores.reference import reference_logprobs
from hotpot.learner.scores.starting import StartingLogprobs
from hotpot.learner.update.gradients import Gradients, Norms
from hotpot.learner.update.minibatches import Minibatch, plan
from hotpot.learner.update.pass_loss import PassLoss, StepSums, judge, loss_settings
from hotpot.learner.update.replayed import Decoupled, Replayed, importance
from hotpot.learner.update.results import Agreement, OptimizerStep
from hotpot.models import Policy

Result = TypeVar("Result")


class UpdateSteps:
    """The optimiser steps of one batch.

    ``first``, ``first_model`` float64 ``[N]``: log-probabilities at the starting weights (without a first pass: as above),
    at the training temperature and at 1; both, and :attr:`old`, are complete once :meth:`run` is exhausted. ``replayed``:
    which loss tokens are. ``pass_tokens`` bounds a pass as ``budget`` has it in the beginning. A ``critic`` is the
    one the batch was estimated with; ``reference_logprobs`` float64 ``[N]`` what the reference has said already, if it has;
    ``starting`` what the policy has, which then is the first pass.
    """

    def __init__(
        self,
        decoder: Policy,
        optimizer: torch.optim.Optimizer,
        settings: LearnerSection,
        batch: Batch,
        *,
        temperature: float,
        reference: Policy | None,
        seed: int,
        update: int,
        policy_version: int,
        watch: NormWatch,
        budget: PassBudget,
        critic: Critic | None = None,
        critic_watch: NormWatch | None = None,
        reference_logprobs: NDArray[np.float64] | None = None,
        starting: StartingLogprobs | None = None,
    ) -> None:
        self._watch, self._budget = watch, budget
        self._critic_watch = critic_watch or NormWatch(settings.max_grad_norm_ratio)
        self._decoder, self._reference, self._optimizer = decoder, reference, optimizer
        self._critic = critic
        self._gradients = Gradients(decoder, critic, max_norm=settings.max_grad_norm)
        self._settings, self._batch, self._temperature = settings, batch, temperature
        self._loss_settings = loss_settings(settings)
        self._sequences = batch.sequence_numbers
        self._pieces = [member.sequence for member in batch.sequences]
        self.pass_tokens = budget.pass_tokens(self._pieces)
        self.first = np.zeros(batch.num_loss_tokens)
        self.first_model = np.zeros(batch.num_loss_tokens)
        self._at_start = np.zeros(batch.num_loss_tokens, dtype=np.bool_)
        self._starts_known = starting is not None
        if starting is not None:
            self.first, self.first_model = starting.of(batch)
            self._at_start[:] = True
        self._recompute = settings.old_logprobs == "recomputed"
        self.replayed = Replayed.of(batch)
        self._decoupled = Decoupled.of(batch, settings, policy_version)
        self._skips_first = not self.recomputes and settings.agreement == "first_minibatch"
        self._reference_logprobs = reference_logprobs
        self._plan = plan(
            batch, settings, seed=seed, update=update, max_tokens=self.pass_tokens, share=self._shares
        )

    def run(self) -> Iterator[OptimizerStep]:
        """Take the optimiser steps one by one; each is yielded after it was taken or skipped.

        Steps in which only the critic learns come last.
        """
        if not self._batch.sequences:
            return
        self._first_pass()
        for number, minibatch in enumerate([one for epoch in self._plan for one in epoch]):
            yield self._step(minibatch, number)

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
    def explained_variance(self) -> float | None:
        """Share of the returns' variance over loss tokens that the critic's values explain; None without a critic."""
        values, returns = self._batch.values, torch.from_numpy(self._batch.returns)
        if values is None:
            return None
        everything = torch.ones_like(returns, dtype=torch.bool)
        return explained_variance(torch.from_numpy(values), returns, everything)

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
        mask = torch.from_numpy(fresh & self._at_start & np.isfinite(difference))
        values = torch.from_numpy(difference)
        return Agreement(
            num_tokens=masked.count(mask),
            maximum=float(masked.maximum(values, mask)),
            mean=float(masked.mean(values, mask)),
        )

    def _attempt(self, work: Callable[[int], Result], stage: Stage, step: int = 0) -> Result:
        return self._budget.attempt(work, stage=stage, sequences=self._pieces, step=step)

    def _passes(self, members: Sequence[BatchSequence], max_tokens: int) -> list[MicroBatch]:
        return cut(members, max_tokens=max_tokens, packing=self._settings.packing, share=self._shares)

    @property
    def _shares(self) -> bool:
        """Whether every model that computes these passes can compute a shared prefix once."""
        models = (self._decoder, self._reference, None if self._critic is None else self._critic.decoder)
        return all(model.caches for model in models if model is not None)

    def _first_pass(self) -> None:
        started = {member.start for member in self._plan[0][0].members}
        rest = [member for member in self._batch.sequences if member.start not in started]
        if not self._skips_first and not self._starts_known:
            self._attempt(lambda tokens: self._score_first(self._passes(rest, tokens)), "first_pass")
        if (reference := self._reference) is not None and self._reference_logprobs is None:
            self._reference_logprobs = self._attempt(
                lambda tokens: reference_logprobs(
                    reference,
                    self._passes(self._batch.sequences, tokens),
                    self._batch.num_loss_tokens,
                    temperature=self._temperature,
                ),
                "reference",
            )

    @torch.no_grad()
    def _score_first(self, micros: Sequence[MicroBatch]) -> None:
        for micro in micros:
            scores = score(self._decoder, micro, temperature=self._temperature, spread=False)
            self.first[micro.flat] = scores.logprobs.numpy()
            self.first_model[micro.flat] = scores.model_logprobs.numpy()
            self._at_start[micro.flat] = True

    def _step(self, planned: Minibatch, number: int) -> OptimizerStep:
        minibatch, sums, norms, finding = self._attempt(
            lambda tokens: self._gradient(planned.within(tokens, self._passes)), "step", number
        )
        self._plan[minibatch.epoch][minibatch.index] = minibatch
        self._finish(minibatch, norms, finding)
        return OptimizerStep(
            epoch=minibatch.epoch,
            minibatch=minibatch.index,
            loss=sums.loss,
            policy_loss=sums.policy_loss,
            kl_loss=sums.kl_loss,
            entropy_loss=sums.entropy_loss,
            value_loss=sums.value_loss,
            critic_grad_norm=norms.critic,
            critic_alone=minibatch.critic_alone,
            grad_norm=norms.policy,
            entropy=sums.entropy,
            statistics=sums.statistics,
            num_trajectories=minibatch.num_trajectories,
            hash=minibatch.hash,
            finding=finding,
        )

    def _gradient(self, minibatch: Minibatch) -> tuple[Minibatch, StepSums, Norms, Finding | None]:
        """Leave the step's clipped gradient in the parameters; return its norms before, and what was found wrong, if anything."""
        self._optimizer.zero_grad(set_to_none=True)
        coefficient = None if self._critic is None else self._settings.value_coefficient
        sums = StepSums(self._batch.num_loss_tokens, value_coefficient=coefficient)
        starting = minibatch.epoch == 0 and (minibatch.index == 0 or self._skips_first)
        for micro in minibatch.micros:
            one = self._forward(micro, minibatch, starting=starting)
            sums.add(one)
            if not sums.broken:
                one.loss.backward()  # type: ignore[no-untyped-call]
        norms = Norms(policy=math.nan, critic=None) if sums.broken else self._gradients.clip()
        watched = self._watched(minibatch, norms)
        wrong = [one for one in watched if not math.isfinite(one[1]) or one[2].exploding(one[1])]
        # What is not finite keeps the step from being taken, so it is told before what may be taken all the same.
        wrong.sort(key=lambda one: math.isfinite(one[1]))
        finding = self._find(minibatch, sums, *wrong[0]) if wrong else None
        return minibatch, sums, norms, finding

    def _forward(self, micro: MicroBatch, minibatch: Minibatch, *, starting: bool = False) -> PassLoss:
        """Return what one pass of the step comes to; ``starting``: its log-probabilities count as the first ones."""
        scores = policy = judged = None
        if not minibatch.critic_alone:
            explores = self._loss_settings.entropy_coefficient > 0
            scores = score(self._decoder, micro, temperature=self._temperature, entropy_gradient=explores)
            if starting:
                self.first[micro.flat] = scores.logprobs.detach().numpy()
                self.first_model[micro.flat] = scores.model_logprobs.numpy()
                self._at_start[micro.flat] = minibatch.index == 0
            policy = policy_loss(self._loss_input(scores, micro, minibatch), self._loss_settings)
        if self._critic is not None:
            values = self._critic.values(micro, None if scores is None else scores.hidden)
            judged = judge(values, self._batch, micro, minibatch.weights, self._settings)
        return PassLoss(micro=micro, scores=scores, policy=policy, judged=judged)

    def _loss_input(self, scores: TokenScores, micro: MicroBatch, minibatch: Minibatch) -> LossInput:
        def pick(values: NDArray[np.float64]) -> Tensor:
            return torch.from_numpy(values[micro.flat])

        reference = None if self._reference_logprobs is None else pick(self._reference_logprobs)
        return LossInput(
            new_logprobs=scores.logprobs.double(),
            old_logprobs=pick(self.old),
            advantages=pick(minibatch.advantages),
            weights=torch.from_numpy(self._weights(micro, minibatch)),
            mask=torch.ones(len(micro.flat), dtype=torch.bool),
            reference_logprobs=reference,
            sequences=torch.from_numpy(self._sequences[micro.flat]),
            entropy=scores.entropy.double(),
        )

    def _weights(self, micro: MicroBatch, minibatch: Minibatch) -> NDArray[np.float64]:
        """Return the weights of the pass's loss tokens, ``[k]``, the importance of decoupled ones multiplied in."""
        weights, flat = minibatch.weights[micro.flat], micro.flat
        if not (self._decoupled.any and self._decoupled.weighs):
            return weights
        # A sampler that filtered is compared by the raw model's log-probabilities, as in :meth:`agreement`.
        proximal = self.first_model if self._recompute else self.first
        sampled = self._batch.model_logprobs if self._recompute else self._batch.behaviour_logprobs
        factors = importance(proximal[flat], sampled[flat], self._decoupled.caps[flat])
        return np.where(self._decoupled.mask[flat], weights * factors, weights)

    def _finish(self, minibatch: Minibatch, norms: Norms, finding: Finding | None) -> None:
        """Step the optimiser, or skip."""
        if finding is not None and finding.skipped:
            self._optimizer.zero_grad(set_to_none=True)
        else:
            self._optimizer.step()
            for _, norm, watch in self._watched(minibatch, norms):
                watch.observe(norm)

    def _watched(self, minibatch: Minibatch, norms: Norms) -> list[tuple[Network, float, NormWatch]]:
        """Return the networks that learn in the step, each with its norm and what that is measured against."""
        watched: list[tuple[Network, float, NormWatch]] = []
        if not minibatch.critic_alone or norms.critic is None:
            watched.append(("policy", norms.policy, self._watch))
        if norms.critic is not None:
            watched.append(("critic", norms.critic, self._critic_watch))
        return watched

    def _find(
        self, minibatch: Minibatch, sums: StepSums, network: Network, norm: float, watch: NormWatch
    ) -> Finding:
        """Return what is wrong with a step that has come to ``sums`` and, for ``network``, a gradient of ``norm``."""
        batch, critic = self._batch, None
        if batch.values is not None and sums.values is not None:
            critic = CriticValues(new=sums.values, old=batch.values, returns=batch.returns)
        return find(
            Suspects(
                members=minibatch.members,
                passes=minibatch.pass_members,
                norm_of=lambda part: self._norm_of(part, minibatch, network),
            ),
            TokenValues(
                old=self.old,
                new=self.old if minibatch.critic_alone else sums.new,
                advantages=minibatch.advantages,
                losses=sums.losses,
                reference=self._reference_logprobs,
                critic=critic,
            ),
            sums.broken,
            norm,
            watch=watch,
            skip_exploding=self._settings.skip_exploding,
            network=network,
        )

    def _norm_of(self, part: Sequence[BatchSequence], minibatch: Minibatch, network: Network) -> float:
        """Return the gradient norm of ``network`` that ``part`` of the step comes to alone."""
        norms = self._gradients.norms_of(
            self._forward(micro, minibatch).loss for micro in self._passes(part, minibatch.max_tokens)
        )
        return norms.critic if network == "critic" and norms.critic is not None else norms.policy
