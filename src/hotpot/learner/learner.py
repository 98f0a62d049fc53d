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

Owns the optimiser, its state and the critic, where there is one. Doesn't know who sampled the sequences, where they are
stored or when it is called.

Invariants: the same inputs in the same process settings give the same bits; order of arrival changes nothing; a
non-finite loss or gradient never reaches the weights; the weights change inside :meth:`Learner.update` and
:meth:`Learner.load` only.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from hotpot.config.recipe import LearnerSection
from hotpot.errors import LearnerError
from hotpot.experience import Cutting, Markup, TrainingSequence, cut_sequence
from hotpot.learner import checkpoint
from hotpot.learner.advantages import Advantages, Member, compared_with_no_group, group_advantages
from hotpot.learner.batches import Batch, build_batch, check_arrays, check_sequences
from hotpot.learner.critic import Critic, state_values
from hotpot.learner.passes import pass_tokens
from hotpot.learner.reporting import learned_sequences
from hotpot.learner.results import NonFiniteError, OptimizerStep, UpdateResult
from hotpot.learner.states import PieceEstimates, PieceKey, estimate, piece_states
from hotpot.learner.steps import UpdateSteps
from hotpot.models import Decoder, DecoderConfig, Weights


class Learner:
    """Improves one decoder by clipped policy gradients, with group-relative advantages or a critic's.

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
        self.critic = None if settings.critic == "none" else Critic(decoder, settings.critic)
        self._optimizer = torch.optim.AdamW(
            [{"params": list(part.parameters())} for part in (decoder, *self._modules.values())],
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
        estimates = None if self.critic is None else self._estimates(self.critic, pieces)
        batch = build_batch(pieces, advantages, merge=self.settings.advantage_merge, estimates=estimates)
        staleness = policy_version - batch.policy_versions
        if len(staleness) and staleness.min() < 0:
            raise LearnerError(
                f"update {update} at policy version {policy_version} was given tokens of version "
                f"{batch.policy_versions.max()}, which it cannot have made; load the checkpoint they belong to"
            )
        for group, rate in zip(self._optimizer.param_groups, self._rates(update), strict=False):
            group["lr"] = rate
        run = UpdateSteps(
            self.decoder,
            self._optimizer,
            self.settings,
            batch,
            temperature=self.temperature,
            reference=self.reference,
            seed=self.seed,
            update=update,
            critic=self.critic,
        )
        steps: list[OptimizerStep] = []
        for step in run.run():
            steps.append(step)
            self._count(step)
            if len(self._skipped_in_a_row) >= self.settings.max_skipped_in_a_row:
                break
        result = self._result(run, batch, advantages, steps, update=update, policy_version=policy_version)
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

    def _rates(self, update: int) -> tuple[float, float]:
        """Return the learning rates of ``update``: the policy's, and that of the critic's own weights."""
        rate, settings = self.learning_rate(update), self.settings
        if settings.critic_learning_rate is None or settings.learning_rate == 0:
            return rate, rate
        return rate, settings.critic_learning_rate * (rate / settings.learning_rate)

    def weights(self) -> Weights:
        """Return the policy's weights by name. They are live: copy them before the next update changes them."""
        return {name: tensor.detach() for name, tensor in self.decoder.state_dict().items()}

    def save(self, folder: Path, tokenizer_files: Mapping[str, bytes]) -> None:
        """Write weights, optimiser state and counters to ``folder``, which is an ordinary model folder too."""
        counters = checkpoint.Counters(
            update=self.update_number,
            optimizer_steps=self.optimizer_steps,
            skipped_in_a_row=tuple(self._skipped_in_a_row),
        )
        checkpoint.write(folder, self.decoder, self._optimizer, counters, tokenizer_files, self._modules)

    def load(self, folder: Path) -> None:
        """Take up weights, optimiser state and counters from ``folder``.

        Raises :class:`ModelFilesError` where a file is missing, truncated or of another model; nothing is changed then.
        """
        counters = checkpoint.read(folder, self.decoder, self._optimizer, self._modules)
        self.update_number, self.optimizer_steps = counters.update, counters.optimizer_steps
        self._skipped_in_a_row = list(counters.skipped_in_a_row)

    def _advantages(self, sequences: Sequence[TrainingSequence], peers: Sequence[Member]) -> Advantages:
        members = {
            s.trajectory_id: Member(trajectory_id=s.trajectory_id, group_id=s.group_id, reward=s.reward)
            for s in sequences
        }
        if self.settings.advantages == "gae":
            return compared_with_no_group(list(members.values()))
        return group_advantages([*members.values(), *peers], self.settings.advantages)

    @property
    def _modules(self) -> dict[str, nn.Module]:
        """What is learned beside the policy, by the name a checkpoint gives it."""
        return {} if self.critic is None else {"critic": self.critic}

    def _estimates(
        self, critic: Critic, pieces: Sequence[TrainingSequence]
    ) -> dict[PieceKey, PieceEstimates]:
        """Return what the critic, as it stands before the update, makes of every piece."""
        settings = self.settings
        states = piece_states(pieces, settings.gae_level)
        values = state_values(
            critic,
            self.decoder,
            states,
            max_tokens=pass_tokens(pieces, most=settings.micro_batch_tokens),
            packing=settings.packing,
        )
        return estimate(states, values, discount=settings.discount, gae_lambda=settings.gae_lambda)

    def _result(
        self,
        run: UpdateSteps,
        batch: Batch,
        advantages: Advantages,
        steps: Sequence[OptimizerStep],
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
            learned=learned_sequences(batch, run),
            num_threads=torch.get_num_threads(),
            explained_variance=run.explained_variance,
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
