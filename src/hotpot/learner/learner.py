"""The learner: one batch in, optimiser steps on the policy's weights, one typed result out.

::

    sequences ─► checks ─► pieces ─► advantages ─► batch (fixed order, hash)
                  (by group id, or from the critic's   │
                   values before the update)           │
                  first pass: log-probabilities at the starting weights
                  (no gradient; the first minibatch's come from its own training pass)
                                                       │
      epochs × minibatches:  passes ─► loss ─► gradient, summed ─► finite? ─► clip ─► AdamW
                                                       │
                                                  UpdateResult

Owns the counters and what is carried from update to update; its parts are :mod:`hotpot.learner.parts`'s. Doesn't know who sampled the sequences, where they are
stored or when it is called.

Invariants: the same inputs in the same process settings give the same bits; order of arrival changes nothing; a
non-finite loss or gradient never reaches the weights; the weights change inside :meth:`Learner.update` and
:meth:`Learner.load` only.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hotpot.config.sections import LearnerSection
from hotpot.errors import LearnerError
from hotpot.experience import Cutting, Markup, TrainingSequence, cut_sequence
from hotpot.experience.crashpoints import reach
from hotpot.learner import checkpoint
from hotpot.learner.batches.batches import Batch, build_batch
from hotpot.learner.batches.budget import Halving, PassBudget
from hotpot.learner.estimators.advantages import Advantages, Member
from hotpot.learner.faults.norm_watch import NormWatch
from hotpot.learner.parts import Parts
from hotpot.learner.precision import Precision
from hotpot.learner.schedule import learning_rates
from hotpot.learner.scores.kl_reward import Compared, Divergences, compare
from hotpot.learner.update.checks import (
    check_arrays,
    check_packing,
    check_reference,
    check_sequences,
    check_skips,
    check_versions,
)
from hotpot.learner.update.judging import Judged, judged_pieces
from hotpot.learner.update.reporting import update_result
from hotpot.learner.update.results import OptimizerStep, UpdateResult
from hotpot.learner.update.shaping import RunningScales, shaped_advantages, shaped_batch
from hotpot.learner.update.steps import UpdateSteps
from hotpot.learner.update.terms import UpdateTerms, kernels, settings_text, state_text
from hotpot.models import Policy, Weights, checksum, collect_young


class Learner:
    """Improves one policy by clipped policy gradients, with group-relative advantages or a critic's.

    Parameters
    ----------
    decoder: the policy; its parameters are changed in place, or with ``lora_rank`` not at all: then :attr:`decoder` is a
        twin that shares them and has adapters.
    settings: the recipe's ``learner`` section.
    total_updates: updates in the run, for the decay of the learning rate.
    seed: seed of the run, for the deal of trajectories to minibatches.
    temperature: the training temperature; log-probabilities in the ratio are of softmax(logits / temperature).
    reference: the policy to stay close to; needed where ``kl_coefficient`` > 0, measured wherever given. With
        ``lora_rank`` it may be ``decoder`` itself: the starting model, at no cost.
    exact: compute log-probabilities that are a sampler's bit for bit (:mod:`hotpot.models.exact`), where that can be: our own
        decoder in float32, without adapters or packed rows, on one thread. :attr:`exact` says what it came to.
    markup: the chat template's tokens, which a cut into pieces keeps whole (``learner.segment_tokens``).

    Raises :class:`LearnerError` where these cannot work together.
    """

    def __init__(
        self,
        decoder: Policy,
        settings: LearnerSection,
        *,
        total_updates: int,
        seed: int,
        temperature: float,
        reference: Policy | None = None,
        markup: Markup | None = None,
        exact: bool = False,
    ) -> None:
        if not temperature > 0:
            raise LearnerError(
                f"training temperature {temperature} has no distribution to learn; set sampling.training.temperature > 0"
            )
        if settings.kl_coefficient > 0 and reference is None:
            raise LearnerError(
                f"learner.kl_coefficient = {settings.kl_coefficient} needs a reference policy; give one, or set it to 0"
            )
        if reference is not None:
            check_reference(reference.config, decoder.config)
            check_packing(reference, settings.packing)
        check_packing(decoder, settings.packing)
        self._parts = Parts(decoder, settings, reference=reference, seed=seed, exact=exact)
        self.decoder, self.critic, self.reference = self._parts.policy, self._parts.critic, reference
        self.settings = settings
        self._reference_checksum = None if reference is None else checksum(reference.state_dict())
        self.total_updates, self.seed, self.temperature = total_updates, seed, temperature
        self._cutting = Cutting(
            segment_tokens=settings.segment_tokens,
            overlap=settings.segment_overlap,
            markup=markup or Markup(),
        )
        self.update_number = 0
        self.lost_updates = 0
        self.optimizer_steps = 0
        self.scales = RunningScales()
        self._budget = PassBudget(settings.micro_batch_tokens)
        self._skipped_in_a_row: list[tuple[str, ...]] = []
        self._watch = NormWatch(settings.max_grad_norm_ratio)
        self._critic_watch = NormWatch(settings.max_grad_norm_ratio)

    def update(
        self,
        sequences: Sequence[TrainingSequence],
        *,
        update: int,
        policy_version: int,
        peers: Sequence[Member] = (),
        halving: Halving | None = None,
    ) -> UpdateResult:
        """Learn one batch.

        ``sequences``: every segment of every trajectory collected for the update (dropped groups included, so that
        their statistics are reported), whole: the learner cuts them where the settings say so.
        ``policy_version``: the version of the weights as they stand now. ``peers``:
        members of the sequences' groups that are not learned from now but count in the baseline. Sequences marked
        ``replayed`` are weighed as in :mod:`hotpot.learner.update.replayed`. ``halving``: where the record of this update says
        that its passes were halved; without one they are halved where memory runs out, once.

        Raises :class:`LearnerError` where a sequence cannot be learned from, :class:`NonFiniteError` with the update as
        far as it came where ``max_skipped_in_a_row`` optimiser steps were skipped one after the other.
        """
        try:
            return self._update(
                sequences, peers, update=update, policy_version=policy_version, halving=halving
            )
        finally:
            collect_young()  # a tensor in a cycle is gone with the update that made it

    def _update(
        self,
        sequences: Sequence[TrainingSequence],
        peers: Sequence[Member],
        *,
        update: int,
        policy_version: int,
        halving: Halving | None,
    ) -> UpdateResult:
        if not sequences:
            raise LearnerError(f"update {update} was given no sequences; collect some, or do not call it")
        reach("learner_begun")
        self._budget.begin(halving)
        batch, advantages, scales, compared, judged = self._batch(sequences, peers)
        check_versions(batch, update=update, policy_version=policy_version)
        for group, rate in zip(self._parts.optimizer.param_groups, self._rates(update), strict=False):
            group["lr"] = rate
        run = UpdateSteps(
            self.decoder,
            self._parts.optimizer,
            self.settings,
            batch,
            temperature=self.temperature,
            reference=self.reference,
            seed=self.seed,
            update=update,
            policy_version=policy_version,
            watch=self._watch,
            budget=self._budget,
            critic=self.critic,
            critic_watch=self._critic_watch,
            reference_logprobs=None if compared is None else compared.of(batch),
            starting=None if judged is None else judged.starting,
        )
        terms = self._terms(run, policy_version)
        steps: list[OptimizerStep] = []
        for step in run.run():
            steps.append(step)
            self._count(step)
            reach("learner_step")
            if len(self._skipped_in_a_row) >= self.settings.max_skipped_in_a_row:
                break
        result = update_result(
            run,
            batch,
            steps,
            terms.halved(self._budget.halving),
            groups=advantages.groups,
            update=update,
            policy_version=policy_version,
            epochs=self.settings.epochs,
            learning_rate=self.learning_rate(update),
            critic_learning_rate=None if self.critic is None else self._rates(update)[1],
            has_reference=self.reference is not None,
        )
        check_skips(result, self._skipped_in_a_row, self.settings)
        self.update_number, self.scales = update, scales
        return result

    def learning_rate(self, update: int) -> float:
        """Return the rate of ``update`` (from 1), see :mod:`hotpot.learner.schedule`.

        ``lost_updates`` numbers before it belong to updates that are not on the way to these weights (a crash or a
        rollback left them behind); they do not count.
        """
        return self._rates(update)[0]

    def _rates(self, update: int) -> tuple[float, float]:
        """Return the learning rates of ``update``: the policy's, and that of the critic's own weights."""
        return learning_rates(self.settings, update - 1 - self.lost_updates, self.total_updates)

    def policy(self) -> Policy:
        """Return the policy as it is published and kept: adapters merged into its weights. Without adapters it is live."""
        return self._parts.published()

    def weights(self) -> Weights:
        """Return the weights of :meth:`policy` by name. They may be live: copy them before the next update changes them."""
        return {name: tensor.detach() for name, tensor in self.policy().state_dict().items()}

    def watch(self, told: Callable[[], None]) -> None:
        """Call ``told`` after every pass of a model and every optimiser step, as long as this learner learns."""
        self._parts.watch(told)

    @property
    def precision(self) -> Precision:
        """What the matrix products of passes are computed in."""
        return self._parts.precision

    @property
    def exact(self) -> bool:
        """Whether log-probabilities are a sampler's in the exact arithmetic, bit for bit."""
        return self._parts.exact

    def save(
        self, folder: Path, tokenizer_files: Mapping[str, bytes], run: Mapping[str, Any] | None = None
    ) -> None:
        """Write weights, optimiser state and counters to ``folder``, which is an ordinary model folder too.

        ``run`` is what the caller wants to find again in the checkpoint's manifest.
        """
        checkpoint.write(folder, self._parts, self._counters(), tokenizer_files, run)

    def load(self, folder: Path) -> None:
        """Take up weights, optimiser state and counters from ``folder``; where the precision is ``auto``, also that.

        Raises :class:`ModelFilesError` where a file is missing, truncated or of another model; nothing is changed then.
        """
        counters = checkpoint.read(folder, self._parts)
        if self.settings.precision == "auto":
            self._parts.compute_in(checkpoint.precision_of(folder))
        self.update_number, self.optimizer_steps = counters.update, counters.optimizer_steps
        self._skipped_in_a_row = list(counters.skipped_in_a_row)
        self.scales = RunningScales.from_dict(counters.scales)
        self._watch.recall(counters.norms)
        self._critic_watch.recall(counters.critic_norms)
        self._budget.limit = counters.pass_limit

    def _batch(
        self, sequences: Sequence[TrainingSequence], peers: Sequence[Member]
    ) -> tuple[Batch, Advantages, RunningScales, Compared | None, Judged | None]:
        """Return the batch of ``sequences``, its advantages by trajectory, the scales after it, what the reward's KL was taken
        from and what a critic made of the pieces, where there are these."""
        settings, config = self.settings, self.decoder.config
        check_arrays(sequences, vocab_size=config.vocab_size)
        pieces = [piece for sequence in sequences for piece in cut_sequence(sequence, self._cutting)]
        check_sequences(pieces, max_context_tokens=config.max_context_tokens)
        compared = None
        if self.reference is not None and settings.kl_in == "reward":
            compared = compare(self.reference, sequences, settings, self.temperature, self._budget)
        found: Divergences = {} if compared is None else compared.divergences
        members = {
            s.trajectory_id: Member(trajectory_id=s.trajectory_id, group_id=s.group_id, reward=s.reward)
            for s in sequences
        }
        advantages, scales = shaped_advantages(
            list(members.values()), peers, settings, divergence=found, scales=self.scales
        )
        judged = None
        if self.critic is not None:
            judged = judged_pieces(
                self.critic,
                self.decoder,
                pieces,
                settings,
                temperature=self.temperature,
                budget=self._budget,
                divergence=found,
            )
        estimates = None if judged is None else judged.estimates
        batch = build_batch(pieces, advantages, merge=settings.advantage_merge, estimates=estimates)
        batch, scales = shaped_batch(batch, settings, scales)
        return batch, advantages, scales, compared, judged

    def _terms(self, run: UpdateSteps, policy_version: int) -> UpdateTerms:
        """Return what ``run`` is about to hang on besides its batch."""
        return UpdateTerms(
            settings=settings_text(self.settings.model_copy(update={"precision": self.precision})),
            state=state_text(asdict(self._counters()) | {"pass_limit": self._budget.carried}),
            temperature=self.temperature,
            total_updates=self.total_updates,
            lost_updates=self.lost_updates,
            pass_tokens=run.pass_tokens,
            reference_checksum=self._reference_checksum,
            proximal_policy_version=policy_version if run.recomputes else None,
            kernels=kernels(self.precision, exact=self.exact),
        )

    def _counters(self) -> checkpoint.Counters:
        """Return what the learner carries from update to update besides weights and moments."""
        return checkpoint.Counters(
            update=self.update_number,
            optimizer_steps=self.optimizer_steps,
            skipped_in_a_row=tuple(self._skipped_in_a_row),
            scales=self.scales.to_dict(),
            norms=self._watch.norms,
            critic_norms=self._critic_watch.norms,
            pass_limit=self._budget.limit,
        )

    def _count(self, step: OptimizerStep) -> None:
        """Count ``step`` as taken or skipped; one that only the critic took says nothing of the policy."""
        if step.skipped:
            self._skipped_in_a_row.append(step.culprits)
        elif not step.critic_alone:
            self.optimizer_steps += 1
            self._skipped_in_a_row.clear()
