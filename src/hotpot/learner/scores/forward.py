"""Log-probabilities of loss tokens: the model's forward pass over one micro-batch.

Owns which hidden states become logits (those that predict a loss token, no others), the computation of a shared prefix
once for all rows, and what each token of a packed row sees. Knows no loss and no optimiser.

Invariants: the token at position t is scored from the hidden state at t - 1; a token sees the prefix and its own
sequence, whatever else stands in its row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hotpot.errors import LearnerError
from hotpot.learner.batches.passes import MicroBatch
from hotpot.learner.losses.policy_loss import entropy
from hotpot.learner.scores.picked import picked
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


class _OwnKeys:
    """The :class:`hotpot.models.PastTokens` of a prefix: a layer sees what it has just written, and nothing else.

    What the first pass of a layer wrote is kept in ``kept``. A layer that is computed again in the backward pass
    (gradient checkpointing) writes once more, and changes nothing of that: gradients flow through what was kept.
    """

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._written: dict[int, tuple[Tensor, Tensor]] = {}

    def write(
        self, layer: int, rows: slice | Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Take the keys and values of a layer, float ``[B, num_kv_heads, T, head_dim]``."""
        del rows, positions
        self.kept.setdefault(layer, (keys, values))
        self._written[layer] = (keys, values)

    def read(self, layer: int, rows: slice | Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return, once, what the last :meth:`write` of ``layer`` took."""
        del rows, length
        return self._written.pop(layer)


class _BehindPrefix:
    """The :class:`hotpot.models.PastTokens` behind a prefix, whose keys and values come before those of every row;
    gradients flow back into the prefix."""

    def __init__(self, prefix: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        self._prefix = prefix
        self._joined: dict[int, tuple[Tensor, Tensor]] = {}

    def write(
        self, layer: int, rows: slice | Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Take the keys and values of a layer, float ``[B, num_kv_heads, T, head_dim]``, one row for each that follows."""
        del rows, positions
        before_keys, before_values = self._prefix[layer]
        shape = (len(keys), -1, -1, -1)
        self._joined[layer] = (
            torch.cat([before_keys.expand(shape), keys], dim=2),
            torch.cat([before_values.expand(shape), values], dim=2),
        )

    def read(self, layer: int, rows: slice | Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return, once, what the last :meth:`write` of ``layer`` took, the prefix before it."""
        del rows, length
        return self._joined.pop(layer)


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
    targets = torch.from_numpy(micro.targets)
    scaled = logits if temperature == 1.0 else logits / temperature
    if spread and entropy_gradient:
        distribution = scaled.log_softmax(dim=-1)
        logprobs = distribution.gather(-1, targets[:, None])[:, 0]
        spread_over = entropy(distribution)
    else:
        logprobs, spread_over = picked(scaled, targets, spread=spread)
    model_logprobs = logprobs.detach()
    if temperature != 1.0:
        model_logprobs, _ = picked(logits.detach(), targets, spread=False)
    return TokenScores(hidden=hidden, logprobs=logprobs, model_logprobs=model_logprobs, entropy=spread_over)


def hidden_states(decoder: Policy, micro: MicroBatch) -> Tensor:
    """Return the hidden states that predict loss tokens, float32 ``[k, hidden_size]``, those of the prefix first.

    The products inside are of the decoder's ``precision``. Raises :class:`LearnerError` where one of the states would
    stand at a position the model does not know.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=decoder.precision == torch.bfloat16):
        hidden = _hidden_states(decoder, micro)
    return hidden.float() if hidden.dtype == torch.bfloat16 else hidden


def _hidden_states(decoder: Policy, micro: MicroBatch) -> Tensor:
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
    prefix = _OwnKeys()
    early: Tensor = decoder(
        torch.from_numpy(micro.prefix)[None],
        torch.arange(before)[None],
        cache=prefix,
        rows=slice(0, 1),
        attend=torch.ones(before, before, dtype=torch.bool).tril()[None, None],
        wanted=torch.from_numpy(micro.prefix_columns),
    )
    late: Tensor = decoder(
        tokens,
        positions,
        cache=_BehindPrefix(prefix.kept),
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
