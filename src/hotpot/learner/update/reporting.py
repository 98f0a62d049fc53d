"""What an update came to, for the record: its figures, and what was learned from each token.

Owns the way from a batch's flat numbering back to its sequences, and what figures are taken over. Knows no table.
"""

from collections.abc import Sequence

from hotpot.learner.batches.batches import Batch
from hotpot.learner.estimators.advantages import GroupStatistics
from hotpot.learner.update.results import LearnedSequence, OptimizerStep, UpdateResult
from hotpot.learner.update.steps import UpdateSteps
from hotpot.learner.update.terms import UpdateTerms


def update_result(
    run: UpdateSteps,
    batch: Batch,
    steps: Sequence[OptimizerStep],
    terms: UpdateTerms,
    *,
    groups: tuple[GroupStatistics, ...],
    update: int,
    policy_version: int,
    epochs: int,
    learning_rate: float,
    critic_learning_rate: float | None,
    has_reference: bool,
) -> UpdateResult:
    """Return what ``run`` came to, whole or cut off."""
    staleness = policy_version - batch.policy_versions
    fresh = ~run.replayed.mask
    # What a piece lost of its context, the sampler saw: their log-probabilities are not comparable.
    comparable = (staleness == 0) & batch.whole_context & batch.one_sampler & fresh
    staleness = staleness[fresh]
    return UpdateResult(
        update=update,
        policy_version=policy_version,
        batch_hash=batch.hash,
        groups=groups,
        num_trajectories=len(batch.owners),
        num_tokens=batch.num_tokens,
        num_loss_tokens=batch.num_loss_tokens,
        num_padding_tokens=run.num_padding,
        num_shared_tokens=run.num_shared,
        epochs=epochs,
        steps=tuple(steps),
        learning_rate=learning_rate,
        critic_learning_rate=critic_learning_rate,
        has_reference=has_reference,
        agreement=run.agreement(comparable),
        advantage_mean=float(batch.advantages.mean()) if len(batch.advantages) else 0.0,
        advantage_std=float(batch.advantages.std()) if len(batch.advantages) else 0.0,
        staleness_mean=float(staleness.mean()) if len(staleness) else 0.0,
        staleness_max=int(staleness.max()) if len(staleness) else 0,
        learned=learned_sequences(batch, run),
        terms=terms,
        explained_variance=run.explained_variance,
    )


def learned_sequences(batch: Batch, run: UpdateSteps) -> tuple[LearnedSequence, ...]:
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
                returns=member.per_token(batch.returns),
                old_logprobs=member.per_token(old),
                new_logprobs=member.per_token(run.first),
            )
        )
    return tuple(learned)
