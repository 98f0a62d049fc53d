"""What the policy says of sampled tokens at the weights an update starts from, before anything is estimated or learned.

Owns those passes, and the ratio of that policy to the one that sampled. Knows no critic, no advantage and no loss.

Where the sampler filtered its distribution (``old_logprobs = "recomputed"``) both sides of the ratio are the raw models' at
temperature 1, as in :meth:`hotpot.learner.update.steps.UpdateSteps.agreement`. Behind a cut the policy is the one that
sees what the piece holds, as it is when it learns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hotpot.learner.batches.arrangement import Packing
from hotpot.learner.batches.asking import asked
from hotpot.learner.batches.batches import Batch
from hotpot.learner.batches.passes import cut
from hotpot.learner.batches.states import PieceKey, PieceStates
from hotpot.learner.scores.forward import score
from hotpot.models import Policy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StartingLogprobs:
    """Log-probabilities of the action tokens of ``states``, context too, float64 ``[k]`` each: at the training temperature
    (``tempered``) and at 1 (``raw``)."""

    states: Sequence[PieceStates]
    tempered: Sequence[NDArray[np.float64]]
    raw: Sequence[NDArray[np.float64]]

    def log_ratios(self, *, raw: bool) -> list[NDArray[np.float64]]:
        """Return log pi(start) - log mu of each action token as the sampler recorded it, float64 ``[k]`` a piece."""
        found = []
        for state, tempered, at_one in zip(self.states, self.tempered, self.raw, strict=True):
            piece = state.piece
            sampled = piece.model_logprobs if raw else piece.behaviour_logprobs
            found.append((at_one if raw else tempered) - sampled[state.places].astype(np.float64))
        return found

    def of(self, batch: Batch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return ``tempered`` and ``raw`` of the loss tokens of ``batch``, whose pieces are among the states: float64 ``[N]``."""
        numbers: dict[PieceKey, int] = {state.key: number for number, state in enumerate(self.states)}
        tempered, raw = np.zeros(batch.num_loss_tokens), np.zeros(batch.num_loss_tokens)
        for member in batch.sequences:
            piece, part = member.sequence, slice(member.start, member.stop)
            number = numbers[piece.trajectory_id, piece.segment, piece.begin]
            own = piece.loss_mask[self.states[number].places]
            tempered[part], raw[part] = self.tempered[number][own], self.raw[number][own]
        return tempered, raw


@torch.no_grad()
def starting_logprobs(
    policy: Policy, states: Sequence[PieceStates], *, temperature: float, max_tokens: int, packing: Packing
) -> StartingLogprobs:
    """Return what ``policy`` says of the action tokens of ``states``, without gradient.

    Passes hold at most ``max_tokens`` tokens each, padding included.
    """
    members, rows, size = asked(states)
    tempered, raw = np.zeros(size), np.zeros(size)
    for micro in cut(members, max_tokens=max_tokens, packing=packing, share=policy.caches):
        scores = score(policy, micro, temperature=temperature, spread=False)
        tempered[micro.flat], raw[micro.flat] = scores.logprobs.numpy(), scores.model_logprobs.numpy()
    parts = [slice(row.start, row.start + len(state.places)) for row, state in zip(rows, states, strict=True)]
    return StartingLogprobs(
        states=states, tempered=[tempered[part] for part in parts], raw=[raw[part] for part in parts]
    )
