"""The critic: a number for each state, the return the policy is expected to earn from there on.

Owns the value head, where it reads its hidden states, and the values of many states at once. Knows no loss, no advantage
and no optimiser.

``head``      a linear map on the policy's own hidden states; its gradient goes into the policy's decoder
``separate``  the same on a decoder of its own, which starts as a copy of the policy the run began with

The state of the token at position t is the context before it, read from the hidden state at t - 1, as its
log-probability is: what a value knows is exactly what the policy knew when it chose the token.

Invariant: a new critic says 0 of every state, whatever the model.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hotpot.learner.batches.arrangement import Packing
from hotpot.learner.batches.asking import asked
from hotpot.learner.batches.passes import MicroBatch, cut
from hotpot.learner.batches.states import PieceStates
from hotpot.learner.scores.forward import hidden_states
from hotpot.models import Policy

CriticKind = Literal["head", "separate"]


class Critic(nn.Module):
    """A value head, on a decoder of its own or on the policy's hidden states."""

    def __init__(self, policy: Policy, kind: CriticKind) -> None:
        super().__init__()
        self.head = nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.decoder: Policy | None = None
        if kind == "separate":
            self.decoder = policy.duplicate()

    def values(self, micro: MicroBatch, policy_hidden: Tensor | None) -> Tensor:
        """Return the value of the state before each loss token of ``micro``, float32 ``[k]``, with gradient.

        ``policy_hidden`` float ``[k, hidden_size]``: the policy's hidden states at the same places, read only where the
        critic has no decoder of its own.
        """
        if self.decoder is not None:
            hidden = hidden_states(self.decoder, micro)
        elif policy_hidden is not None:
            hidden = policy_hidden
        else:
            raise ValueError("a value head reads the policy's hidden states; give them")
        values: Tensor = self.head(hidden)
        return values[:, 0].float()


@torch.no_grad()
def state_values(
    critic: Critic, policy: Policy, states: Sequence[PieceStates], *, max_tokens: int, packing: Packing
) -> list[NDArray[np.float64]]:
    """Return the values of each piece's states, float64 ``[k]``, the final one last where it has one, without gradient.

    Passes hold at most ``max_tokens`` tokens each, padding included.
    """
    members, rows, size = asked(states)
    found = np.zeros(size)
    reader = policy if critic.decoder is None else critic.decoder
    for micro in cut(members, max_tokens=max_tokens, packing=packing, share=reader.caches):
        hidden = hidden_states(reader, micro)
        found[micro.flat] = critic.head(hidden)[:, 0].double().numpy()
    return [found[part] for part in rows]
