"""The plan of an update: which optimiser step learns from which loss tokens, in which passes, with which weights.

Owns the plan; it is made before the first step and hangs on nothing that a step changes. Computes nothing of a model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from hotpot.config.sections import LearnerSection
from hotpot.learner.batches.batches import Batch, BatchSequence, deal
from hotpot.learner.batches.passes import MicroBatch, cut, layout_hash
from hotpot.learner.losses.aggregation import token_weights
from hotpot.learner.update.shaping import step_advantages

Passes = Callable[[Sequence[BatchSequence], int], Sequence[MicroBatch]]
"""Cuts sequences into passes of at most that many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Minibatch:
    """What one optimiser step learns from.

    ``weights`` float64 ``[N]``: weight of each of the batch's loss tokens in the step's mean (times its trajectory's own
    weight), 0 for those of other minibatches. ``advantages`` float64 ``[N]``: those it learns with. ``critic_alone``: the
    policy stays as it is. ``max_tokens`` bounds its passes.
    """

    epoch: int
    index: int
    members: Sequence[BatchSequence]
    micros: Sequence[MicroBatch]
    weights: NDArray[np.float64]
    advantages: NDArray[np.float64]
    critic_alone: bool
    max_tokens: int

    @property
    def hash(self) -> str:
        """Hash over the pieces in it and their layout in passes."""
        return layout_hash(self.members, self.micros)

    @property
    def num_trajectories(self) -> int:
        """Trajectories in it."""
        return len({member.owner for member in self.members})

    @property
    def pass_members(self) -> list[list[BatchSequence]]:
        """The sequences that stand in each pass, in the batch's order."""
        inside = [set(micro.flat.tolist()) for micro in self.micros]
        return [[member for member in self.members if member.start in flat] for flat in inside]

    def within(self, max_tokens: int, passes: Passes) -> "Minibatch":
        """The same in passes of at most ``max_tokens`` tokens, as ``passes`` cuts them."""
        if max_tokens == self.max_tokens:
            return self
        return replace(self, micros=passes(self.members, max_tokens), max_tokens=max_tokens)


def plan(
    batch: Batch, settings: LearnerSection, *, seed: int, update: int, max_tokens: int, share: bool = True
) -> list[list[Minibatch]]:
    """Return the minibatches of each epoch, in the order they are learned; passes hold at most ``max_tokens`` tokens,
    and compute a prefix once for several sequences where they ``share``.

    Behind the ``learner.epochs`` come those in which only the critic learns.
    """
    return [
        [
            _minibatch(batch, settings, epoch, index, members, max_tokens=max_tokens, share=share)
            for index, members in enumerate(
                deal(batch, minibatches=settings.minibatches, seed=seed, update=update, epoch=epoch)
            )
        ]
        for epoch in range(settings.epochs + settings.critic_extra_epochs)
    ]


def _minibatch(
    batch: Batch,
    settings: LearnerSection,
    epoch: int,
    index: int,
    members: Sequence[BatchSequence],
    *,
    max_tokens: int,
    share: bool,
) -> Minibatch:
    lengths = torch.tensor([len(member.loss_positions) for member in members])
    owners = torch.tensor([member.owner for member in members])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    given = torch.tensor([member.sequence.weight for member in members], dtype=torch.float64)
    shares = token_weights(
        mask, owners, settings.aggregation, fixed_length=settings.aggregation_tokens
    ) * given[:, None]  # fmt: skip
    flat = np.concatenate([np.arange(member.start, member.stop) for member in members])
    weights = np.zeros(batch.num_loss_tokens)
    weights[flat] = shares[mask].numpy()
    return Minibatch(
        epoch=epoch,
        index=index,
        members=members,
        micros=cut(members, max_tokens=max_tokens, packing=settings.packing, share=share),
        weights=weights,
        advantages=step_advantages(batch, flat, settings),
        critic_alone=epoch >= settings.epochs,
        max_tokens=max_tokens,
    )
