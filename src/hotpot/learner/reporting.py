"""What an update learned from each token, for the record.

Owns the way from a batch's flat numbering back to its sequences. Knows no table.
"""

from hotpot.learner.batches import Batch
from hotpot.learner.results import LearnedSequence
from hotpot.learner.steps import UpdateSteps


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
