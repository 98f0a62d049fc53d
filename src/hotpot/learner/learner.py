"""The learner: one batch in, optimiser steps on the policy's weights, one typed result out.

::

    sequences ─► checks ─► pieces ─► advantages by group id ─► batch (fixed order, hash)
                                                       │
                  first pass: log-probabilities at the starting weights
                  (no gradient; the first minibatch's come from its own training pass)
                                                       │
      epochs × minibatches:  passes ─► loss ─► gradient, summed ─► finite? ─► clip ─► AdamW
                                                       │
                                                  UpdateResult

Owns the optimiser and its state. Doesn't know who sampled the sequences, where they are stored or when it is called.

Invariants: the same inputs in the same process settings give the same bits; order of arrival changes nothing; a
non-finite loss or gradient never reaches the weights; the weights change inside :meth:`Learner.update` and
:meth:`Learner.load` only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hotpot.config.recipe import LearnerSection
from hotpot.errors import LearnerError
from hotpot.experience import Cutting, Markup, TrainingSequence, cut_sequence
from hotpot.ids import canonical_json
from hotpot.learner import checkpoint
from hotpot.learner.advantages import Advantages, Member, group_advantages
from hotpot.learner.batches import Batch, build_batch, check_arrays, check_sequences
from hotpot.learner.results import LearnedSequence, NonFiniteError, OptimizerStep, UpdateResult
from hotpot.learner.steps import UpdateSteps
from hotpot.learner.terms import UpdateTerms, kernels, settings_text
from hotpot.models import Decoder, DecoderConfig, Weights, checksum


class Learner:
    """Improves one decoder by clipped policy gradients with group-relative advantages.

    Parameters
    ----------
    decoder: the policy; its parameters are changed in place.
    settings: the recipe's ``learner`` section.
    total_updates: updates in the run, for the decay of the learning rate.
    seed: seed of the run, for the deal of trajectories to minibatches.
    temperature: the training temperature; log-probabilities in the ratio are of softmax(logits / temperature).
    reference: the policy to stay close to; needed where ``kl_coefficient`` > 0, measured wherever given.
    markup: the chat template's tokens, which a cut into pieces keeps whole (``learner.segment_tokens``).

    Raises :class:`LearnerError` where these cannot work together.
    """

    def __init__(
        self,
        decoder: Decoder,
        settings: LearnerSection,
        *,
        total_updates: int,
        seed: int,
        temperature: float,
        reference: Decoder | None = None,
        markup: Markup | None = None,
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
            _check_reference(reference.config, decoder.config)
        self.decoder, self.settings, self.reference = decoder, settings, reference
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
        self._skipped_in_a_row: list[tuple[str, ...]] = []
        self._optimizer = torch.optim.AdamW(
            decoder.parameters(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def update(
        self,
        sequences: Sequence[TrainingSequence],
        *,
        update: int,
        policy_version: int,
        peers: Sequence[Member] = (),
    ) -> UpdateResult:
        """Learn one batch.

        ``sequences``: every segment of every trajectory collected for the update (dropped groups included, so that
        their statistics are reported), whole: the learner cuts
        them where the settings say so. ``policy_version``: the version of the weights as they stand now. ``peers``:
        members of the sequences' groups that are not learned from now but count in the baseline. Sequences marked
        ``replayed`` are weighed as in :mod:`hotpot.learner.replayed`.

        Raises :class:`LearnerError` where a sequence cannot be learned from, :class:`NonFiniteError` with the update as
        far as it came where ``max_skipped_in_a_row`` optimiser steps were skipped one after the other.
        """
        if not sequences:
            raise LearnerError(f"update {update} was given no sequences; collect some, or do not call it")
        config = self.decoder.config
        check_arrays(sequences, vocab_size=config.vocab_size)
        pieces = [piece for sequence in sequences for piece in cut_sequence(sequence, self._cutting)]
        check_sequences(pieces, max_context_tokens=config.max_context_tokens)
        advantages = self._advantages(sequences, peers)
        batch = build_batch(pieces, advantages, merge=self.settings.advantage_merge)
        staleness = policy_version - batch.policy_versions
        if len(staleness) and staleness.min() < 0:
            raise LearnerError(
                f"update {update} at policy version {policy_version} was given tokens of version "
                f"{batch.policy_versions.max()}, which it cannot have made; load the checkpoint they belong to"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate(update)
        run = UpdateSteps(
            self.decoder,
            self._optimizer,
            self.settings,
            batch,
            temperature=self.temperature,
            reference=self.reference,
            seed=self.seed,
            update=update,
        )
        terms = self._terms(run, policy_version)
        steps: list[OptimizerStep] = []
        for step in run.run():
            steps.append(step)
            self._count(step)
            if len(self._skipped_in_a_row) >= self.settings.max_skipped_in_a_row:
                break
        result = self._result(
            run, batch, advantages, steps, terms, update=update, policy_version=policy_version
        )
        self._check_skips(result)
        self.update_number = update
        return result

    def learning_rate(self, update: int) -> float:
        """Return the rate of ``update`` (from 1): it falls linearly from the first update to the last.

        ``lost_updates`` numbers before it belong to updates that are not on the way to these weights (a crash or a
        rollback left them behind); they do not count.
        """
        progress = min(max(update - 1 - self.lost_updates, 0) / max(self.total_updates - 1, 1), 1.0)
        return self.settings.learning_rate * (1 - (1 - self.settings.final_learning_rate_share) * progress)

    def weights(self) -> Weights:
        """Return the policy's weights by name. They are live: copy them before the next update changes them."""
        return {name: tensor.detach() for name, tensor in self.decoder.state_dict().items()}

    def save(
        self, folder: Path, tokenizer_files: Mapping[str, bytes], run: Mapping[str, Any] | None = None
    ) -> None:
        """Write weights, optimiser state and counters to ``folder``, which is an ordinary model folder too.

        ``run`` is what the caller wants to find again in the checkpoint's manifest.
        """
        checkpoint.write(folder, self.decoder, self._optimizer, self._counters(), tokenizer_files, run)

    def load(self, folder: Path) -> None:
        """Take up weights, optimiser state and counters from ``folder``.

        Raises :class:`ModelFilesError` where a file is missing, truncated or of another model; nothing is changed then.
        """
        counters = checkpoint.read(folder, self.decoder, self._optimizer)
        self.update_number, self.optimizer_steps = counters.update, counters.optimizer_steps
        self._skipped_in_a_row = list(counters.skipped_in_a_row)

    def _advantages(self, sequences: Sequence[TrainingSequence], peers: Sequence[Member]) -> Advantages:
        members = {
            s.trajectory_id: Member(trajectory_id=s.trajectory_id, group_id=s.group_id, reward=s.reward)
            for s in sequences
        }
        return group_advantages([*members.values(), *peers], self.settings.advantages)

    def _result(
        self,
        run: UpdateSteps,
        batch: Batch,
        advantages: Advantages,
        steps: Sequence[OptimizerStep],
        terms: UpdateTerms,
        *,
        update: int,
        policy_version: int,
    ) -> UpdateResult:
        """Return what ``run`` came to, whole or cut off."""
        staleness = policy_version - batch.policy_versions
        fresh = ~run.replayed.mask
        # What a piece lost of its context, the sampler saw: their log-probabilities are not comparable.
        comparable = (staleness == 0) & batch.whole_context & fresh
        staleness = staleness[fresh]
        return UpdateResult(
            update=update,
            policy_version=policy_version,
            batch_hash=batch.hash,
            groups=advantages.groups,
            num_trajectories=len(batch.owners),
            num_tokens=batch.num_tokens,
            num_loss_tokens=batch.num_loss_tokens,
            num_padding_tokens=run.num_padding,
            num_shared_tokens=run.num_shared,
            epochs=self.settings.epochs,
            steps=tuple(steps),
            learning_rate=self.learning_rate(update),
            has_reference=self.reference is not None,
            agreement=run.agreement(comparable),
            advantage_mean=float(batch.advantages.mean()) if len(batch.advantages) else 0.0,
            advantage_std=float(batch.advantages.std()) if len(batch.advantages) else 0.0,
            staleness_mean=float(staleness.mean()) if len(staleness) else 0.0,
            staleness_max=int(staleness.max()) if len(staleness) else 0,
            learned=_learned(batch, run),
            terms=terms,
        )

    def _terms(self, run: UpdateSteps, policy_version: int) -> UpdateTerms:
        """Return what ``run`` is about to hang on besides its batch."""
        return UpdateTerms(
            settings=settings_text(self.settings),
            state=canonical_json(asdict(self._counters())),
            temperature=self.temperature,
            total_updates=self.total_updates,
            lost_updates=self.lost_updates,
            pass_tokens=run.pass_tokens,
            reference_checksum=self._reference_checksum,
            proximal_policy_version=policy_version if run.recomputes else None,
            kernels=kernels(),
        )

    def _counters(self) -> checkpoint.Counters:
        """Return what the learner carries from update to update besides weights and moments."""
        return checkpoint.Counters(
            update=self.update_number,
            optimizer_steps=self.optimizer_steps,
            skipped_in_a_row=tuple(self._skipped_in_a_row),
        )

    def _count(self, step: OptimizerStep) -> None:
        """Count ``step`` as taken or skipped."""
        if step.skipped:
            self._skipped_in_a_row.append(step.culprits)
        else:
            self.optimizer_steps += 1
            self._skipped_in_a_row.clear()

    def _check_skips(self, result: UpdateResult) -> None:
        """Give up, with what the update came to, where too many steps were skipped in a row."""
        skipped, limit = self._skipped_in_a_row, self.settings.max_skipped_in_a_row
        if len(skipped) >= limit:
            names = dict.fromkeys(name for names in skipped for name in names)
            raise NonFiniteError(
                f"update {result.update}: {len(skipped)} optimiser steps in a row had a non-finite loss or "
                f"gradient (learner.max_skipped_in_a_row = {limit}); trajectories involved: {', '.join(names)}. "
                "Look at them with `hotpot show`, then lower learner.learning_rate or go back to a checkpoint",
                result,
            )


def _check_reference(reference: DecoderConfig, policy: DecoderConfig) -> None:
    """Raise :class:`LearnerError` where the reference cannot score whatever the policy can say."""
    if reference.vocab_size != policy.vocab_size:
        raise LearnerError(
            f"the reference has a vocabulary of {reference.vocab_size} tokens, the policy one of {policy.vocab_size}; "
            "both must read the same token ids: set learner.reference_path to a model with the policy's tokenizer"
        )
    if reference.max_context_tokens < policy.max_context_tokens:
        raise LearnerError(
            f"the reference has a context of {reference.max_context_tokens} tokens, less than the policy's "
            f"{policy.max_context_tokens}; set learner.reference_path to a model whose context is at least as long"
        )


def _learned(batch: Batch, run: UpdateSteps) -> tuple[LearnedSequence, ...]:
    """Return what the update learned from each token of each sequence, in the batch's order."""
    learned, old = [], run.old
    for position, member in enumerate(batch.sequences):
        mask = member.sequence.loss_mask
        learned.append(
            LearnedSequence(
                position=position,
                trajectory_id=member.sequence.trajectory_id,
                group_id=member.sequence.group_id,
                segment=member.sequence.segment,
                begin=member.sequence.begin,
                weight=member.sequence.weight,
                tokens=member.sequence.tokens,
                loss_mask=mask.astype("int32"),
                advantages=member.per_token(batch.advantages),
                returns=(mask * member.sequence.reward).astype("float32"),
                old_logprobs=member.per_token(old),
                new_logprobs=member.per_token(run.first),
            )
        )
    return tuple(learned)
