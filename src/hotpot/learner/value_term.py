"""What the critic adds to the loss of one pass: the value loss over the pass's loss tokens.

Owns the way from a batch's flat numbering to the input of the value loss. Knows no optimiser and no policy loss.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotpot.errors import LearnerError
from hotpot.learner.batches import Batch
from hotpot.learner.critic import Critic
from hotpot.learner.passes import MicroBatch
from hotpot.learner.value_loss import ValueLossInput, ValueLossOutput, explained_variance, value_loss


class ValueTerm:
    """The critic's loss on ``batch``, with the returns and the old values that stand in it.

    Raises :class:`LearnerError` where the batch was not estimated with a critic.
    """

    def __init__(self, critic: Critic, batch: Batch, *, clip: float) -> None:
        if batch.values is None:
            raise LearnerError(
                "the batch holds no values for its critic to learn from; give build_batch the estimates"
            )
        self.critic, self._clip = critic, clip
        self._old, self._returns = torch.from_numpy(batch.values), torch.from_numpy(batch.returns)

    def loss(
        self, micro: MicroBatch, weights: NDArray[np.float64], policy_hidden: Tensor | None
    ) -> ValueLossOutput:
        """Return the value loss of a pass; ``weights`` float64 ``[N]`` of the batch's loss tokens in the step.

        ``policy_hidden`` float ``[k, hidden_size]`` as in :meth:`Critic.values`.
        """
        flat = torch.from_numpy(micro.flat)
        return value_loss(
            ValueLossInput(
                new_values=self.critic.values(micro, policy_hidden).double(),
                old_values=self._old[flat],
                returns=self._returns[flat],
                weights=torch.from_numpy(weights)[flat],
                mask=torch.ones(len(flat), dtype=torch.bool),
            ),
            clip=self._clip,
        )

    @property
    def explained_variance(self) -> float | None:
        """Share of the returns' variance over loss tokens that the old values explain."""
        return explained_variance(self._old, self._returns, torch.ones_like(self._returns, dtype=torch.bool))
