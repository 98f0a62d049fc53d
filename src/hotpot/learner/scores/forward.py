"""Log-probabilities of loss tokens: the model's forward pass over one micro-batch.

Owns which hidden states become logits (those that predict a loss token, no others), the computation of a shared prefix
once for all rows, and what each token of a packed row sees. Knows no loss and no optimiser.

Invariants: the token at position t is scored from the hidden state at t - 1; a token sees the prefix and its own
sequence, whatever else stands in its row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hotpot.errors import LearnerError
from hotpot.learner.batches.passes import MicroBatch
from hotpot.learner.losses.policy_loss import entropy
from hotpot.models import Policy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenScores:
    """Per loss token of a micro-batch, float32 ``[k]``.

    ``logprobs``: log-probability at the training temperature, differentiable. ``model_logprobs``: at temperature 1,
    detached. ``entropy``: of the whole distribution at the training temperature, detached unless asked for with a gradient.
    ``hidden`` float ``[k, hidden_size]``: the hidden states all of it comes from, differentiable.
    """

    hidden: Tensor
    logprobs: Tensor
    model_logprobs: Tensor
    entropy: Tensor


class SharedPrefix:
    """Keys and values of one prefix, put before those of every row; gradients flow back into the prefix.

    The :class:`hotpot.models.PastTokens` of a pass with a prefix: the first pass (one row) writes the prefix, the second
    (all rows) sees it before its own keys.
    """

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._prefix: dict[int, tuple[Tensor, Tensor]] = {}

    def write(
        self, layer: int, rows: slice | Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Take the keys and values of a pass, float ``[B, num_kv_heads, T, head_dim]``; the first pass is the prefix."""
        del rows, positions
        if layer not in self._prefix:
            self._prefix[layer] = (keys, values)
            self.keys[layer], self.values[layer] = keys, values
            return
        before_keys, before_values = self._prefix[layer]
        shape = (len(keys), -1, -1, -1)
        self.keys[layer] = torch.cat([before_keys.expand(shape), keys], dim=2)
        self.values[layer] = torch.cat([before_values.expand(shape), values], dim=2)

    def read(self, layer: int, rows: slice | Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return what the last :meth:`write` of ``layer`` left, prefix first."""
        del rows, length
        return self.keys[layer], self.values[layer]


def score(
    decoder: Policy,
    micro: MicroBatch,
    *,
    temperature: float,
    spread: bool = True,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Return the log-probability and (where ``spread``, else 0) the entropy of every loss token of ``micro``."""
    hidden = hidden_states(decoder, micro)
    logits = decoder.logits(hidden)
    targets = torch.from_numpy(micro.targets)[:, None]
    scaled = logits if temperature == 1.0 else logits / temperature
    distribution = scaled.log_softmax(dim=-1)
    logprobs = distribution.gather(-1, targets)[:, 0]
    with torch.no_grad():
        if temperature == 1.0:
            model_logprobs = logprobs.detach()
        else:
            model_logprobs = logits.log_softmax(dim=-1).gather(-1, targets)[:, 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        spread_over = entropy(distribution) if spread else torch.zeros_like(model_logprobs)
    return TokenScores(hidden=hidden, logprobs=logprobs, model_logprobs=model_logprobs, entropy=spread_over)


def hidden_states(decoder: Policy, micro: MicroBatch) -> Tensor:
    """Return the hidden states that predict loss tokens, float ``[k, hidden_size]``, those of the prefix first.

    Raises :class:`LearnerError` where one of them would stand at a position the model does not know.
    """
    needed, context = micro.num_positions, decoder.config.max_context_tokens
    if needed > context:
        raise LearnerError(
            f"a sequence has {needed} tokens before its last loss token, more than the model's context of {context}; "
            "cut it, or give a model with a longer context"
        )
    tokens = torch.from_numpy(micro.tokens)
    before, width = len(micro.prefix), tokens.shape[1]
    columns = torch.arange(width)
    starts = None if micro.starts is None else torch.from_numpy(micro.starts)
    offsets = columns.expand(tokens.shape) if starts is None else columns - starts
    # Padding may run past the last position the model knows; what it computes there is never read.
    positions = (before + offsets).clamp(max=context - 1)
    wanted = torch.from_numpy(micro.rows * width + micro.columns)
    if before == 0:
        attend = None if starts is None else _sees(starts, 0)
        alone: Tensor = decoder(tokens, positions, attend=attend, wanted=wanted)
        return alone
    cache = SharedPrefix()
    early: Tensor = decoder(
        torch.from_numpy(micro.prefix)[None],
        torch.arange(before)[None],
        cache=cache,
        rows=slice(0, 1),
        attend=torch.ones(before, before, dtype=torch.bool).tril()[None, None],
        wanted=torch.from_numpy(micro.prefix_columns),
    )
    late: Tensor = decoder(
        tokens,
        positions,
        cache=cache,
        rows=slice(0, len(tokens)),
        attend=_sees(torch.zeros(1, width, dtype=torch.int64) if starts is None else starts, before),
        wanted=wanted,
    )
    return torch.cat([early, late])


def _sees(starts: Tensor, before: int) -> Tensor:
    """Return which keys each token sees, bool ``[B, 1, L, before + L]``: the prefix, and its own sequence up to itself.

    ``starts`` int64 ``[B, L]``: the column where each token's sequence begins.
    """
    columns = torch.arange(starts.shape[1])
    own = (columns[None, None, :] <= columns[None, :, None]) & (columns[None, None, :] >= starts[:, :, None])
    prefix = own.new_ones(*own.shape[:2], before)
    return torch.cat([prefix, own], dim=2)[:, None]
