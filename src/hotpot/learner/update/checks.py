"""What a learner refuses to learn from: sequences that do not belong in one batch, arrays that fit no model, tokens from
the future, a reference that reads other tokens, and too many steps in a row that could not be taken.

Owns the rules and their words. Builds nothing and changes nothing.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from hotpot.config.sections import LearnerSection
from hotpot.errors import LearnerError
from hotpot.experience.sequences.segments import TrainingSequence
from hotpot.learner.batches.arrangement import Packing
from hotpot.learner.batches.batches import Batch, order_sequences
from hotpot.learner.update.results import NonFiniteError, UpdateResult
from hotpot.models import Policy, PolicyConfig


def check_sequences(sequences: Sequence[TrainingSequence], *, max_context_tokens: int) -> None:
    """Raise :class:`LearnerError` where sequences do not belong in one batch, naming the first and the rule."""
    ordered = order_sequences(sequences)
    for key, same in groupby(ordered, key=lambda s: (s.trajectory_id, s.segment)):
        pieces = list(same)
        places = np.concatenate([piece.begin + np.flatnonzero(piece.loss_mask) for piece in pieces])
        if len({piece.begin for piece in pieces}) < len(pieces) or len(np.unique(places)) < len(places):
            raise LearnerError(
                f"segment {key[1]} of trajectory {key[0]!r} stands twice in one batch, whole or in part; give each "
                "segment once, and its pieces with a loss on each token in one of them only"
            )
    for trajectory, same in groupby(ordered, key=lambda s: s.trajectory_id):
        if len({(s.group_id, s.reward) for s in same if s.reward == s.reward}) > 1:
            raise LearnerError(
                f"the segments of trajectory {trajectory!r} differ in group or reward; both belong to the whole "
                "trajectory, so give every segment the same"
            )
    for s in ordered:
        if len(s.tokens) > max_context_tokens:
            raise LearnerError(
                f"segment {s.segment} of trajectory {s.trajectory_id!r} has {len(s.tokens)} tokens, more than the "
                f"model's context of {max_context_tokens}; cut it (learner.segment_tokens)"
            )


def check_arrays(sequences: Sequence[TrainingSequence], *, vocab_size: int) -> None:
    """Raise :class:`LearnerError` where a sequence cannot be learned from, naming it and the rule."""
    for s in sequences:
        arrays = (s.tokens, s.loss_mask, s.behaviour_logprobs, s.model_logprobs, s.token_policy_version)
        problem = ""
        if s.loss_mask.dtype != np.bool_:
            problem = f"has a loss mask of type {s.loss_mask.dtype}; it must be bool"
        elif len({array.shape for array in arrays}) > 1 or s.tokens.ndim != 1:
            problem = f"has arrays of shapes {[array.shape for array in arrays]}; all must be [n]"
        elif len(s.tokens) and s.loss_mask[0]:
            problem = "has a loss on its first token, which nothing predicts; mask it"
        elif len(s.tokens) and not 0 <= int(s.tokens.min()) <= int(s.tokens.max()) < vocab_size:
            problem = f"has token ids outside 0..{vocab_size - 1}; it was made with another tokenizer"
        if problem:
            raise LearnerError(f"segment {s.segment} of trajectory {s.trajectory_id!r} {problem}")


def check_versions(batch: Batch, *, update: int, policy_version: int) -> None:
    """Raise :class:`LearnerError` where ``batch`` has tokens of a version later than the ``policy_version`` that learns."""
    if len(batch.policy_versions) and batch.policy_versions.max() > policy_version:
        raise LearnerError(
            f"update {update} at policy version {policy_version} was given tokens of version "
            f"{batch.policy_versions.max()}, which it cannot have made; load the checkpoint they belong to"
        )


def check_reference(reference: PolicyConfig, policy: PolicyConfig) -> None:
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


def check_packing(model: Policy, packing: Packing) -> None:
    """Raise :class:`LearnerError` where ``model`` can't keep the sequences of a packed row apart."""
    name = getattr(model.config, "architecture", type(model).__name__)
    if packing == "packed" and not model.packs:
        raise LearnerError(
            f'{name} does not keep sequences of one row apart by a mask; set learner.packing = "padded"'
        )


def check_skips(result: UpdateResult, skipped: Sequence[Sequence[str]], settings: LearnerSection) -> None:
    """Raise :class:`NonFiniteError`, with what the update came to, where too many steps were skipped in a row.

    ``skipped``: the trajectories named by each of them.
    """
    limit = settings.max_skipped_in_a_row
    if len(skipped) >= limit:
        names = dict.fromkeys(name for names in skipped for name in names)
        raise NonFiniteError(
            f"update {result.update}: {len(skipped)} optimiser steps in a row had a non-finite loss or "
            f"gradient{' or an exploding one' if settings.skip_exploding else ''} "
            f"(learner.max_skipped_in_a_row = {limit}); trajectories involved: {', '.join(names)}. "
            "Look at the files in the run's folder `evidence` and at the trajectories with `hotpot show`, then lower "
            "learner.learning_rate or go back to a checkpoint",
            result,
        )
