"""What the learner's model says of sampled tokens, without learning anything: for checks, not for updates.

Owns nothing but the way there; it goes through the passes of an update, so a check sees what an update would.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hotpot.experience import TrainingSequence
from hotpot.learner.batches.batches import make_member
from hotpot.learner.batches.passes import PASS_TOKENS, cut
from hotpot.learner.scores.forward import score
from hotpot.models import Policy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """Log-probabilities in nats of one sequence's k loss tokens, float64 ``[k]``, and their ``positions`` int64 ``[k]``.

    ``logprobs`` are of softmax(logits / temperature), ``model_logprobs`` of the raw model at temperature 1.
    """

    positions: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    model_logprobs: NDArray[np.float64]


@torch.no_grad()
def score_sequences(
    decoder: Policy, sequences: Sequence[TrainingSequence], *, temperature: float
) -> list[Scored]:
    """Return what ``decoder`` says of the loss tokens of each of ``sequences`` (whole ones, none without loss tokens)."""
    members, start = [], 0
    for owner, sequence in enumerate(sequences):
        members.append(make_member(sequence, advantage=0.0, owner=owner, start=start))
        start = members[-1].stop
    logprobs, model_logprobs = np.zeros(start), np.zeros(start)
    longest = max((len(sequence.tokens) for sequence in sequences), default=0)
    for micro in cut(members, max_tokens=max(PASS_TOKENS, longest + 7), share=decoder.caches):
        scores = score(decoder, micro, temperature=temperature, spread=False)
        logprobs[micro.flat] = scores.logprobs.numpy()
        model_logprobs[micro.flat] = scores.model_logprobs.numpy()
    return [
        Scored(
            positions=member.loss_positions,
            logprobs=logprobs[member.start : member.stop],
            model_logprobs=model_logprobs[member.start : member.stop],
        )
        for member in members
    ]
