"""The exact arithmetic over a grid of rows, as a learner lays its sequences out; see :mod:`hotpot.models.exact`.

Owns the grid: tokens end to end for everything but attention, which sees rows and works through their queries in tiles,
each with the keys it needs. Knows no loss; keys that come before a row are its caller's.

Invariant: the first key that a row sees is at position 0 of its context. Where sequences stand end to end in one row
(packing) their sums are cut elsewhere, and the bits are others.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name torch's own documentation uses
from torch.utils.checkpoint import checkpoint

from hotpot.models.exact import (
    LANES,
    ROWS,
    Attend,
    ExactWeights,
    LayerWeights,
    attention,
    layer_output,
    padding,
    require_one_thread,
)
from hotpot.models.policy import PastTokens

TILE = 128
"""Queries of a row that attend in one call: their scores stay in the processor's cache, and keys behind them are left
out."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grid:
    """Where a pass's tokens stand, and what they see; arguments of :meth:`hotpot.models.Policy.forward`.

    ``positions`` int64 ``[B, T]``; ``attend`` bool ``[B or 1, 1, T, S]``, None for causal over the row.
    """

    positions: Tensor
    cache: PastTokens | None
    rows: slice | Tensor | None
    attend: Tensor | None


class TiledAttention:
    """Attention of rows of queries that see keys as ``sees`` says: bool ``[B or 1, T, S]``; the same for every layer."""

    def __init__(self, sees: Tensor) -> None:
        sees = F.pad(sees, (0, padding(sees.shape[-1], LANES)))
        self._tiles: list[tuple[int, Tensor]] = []
        for own in torch.split(sees, TILE, dim=1):
            last = int(own.flatten(0, 1).any(dim=0).nonzero().max()) + 1
            own = own[:, :, : last + padding(last, LANES)]
            self._tiles.append((own.shape[2], torch.zeros(own.shape).masked_fill_(~own, float("-inf"))))

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return what ``q`` float32 ``[B, T, num_heads, head_dim]`` attends to, in the same shape.

        ``keys``, ``values`` float32 ``[B, num_kv_heads, S or more, head_dim]``.
        """
        keys, values = _in_lanes(keys), _in_lanes(values)
        parts = [
            attention(part, keys[:, :, :length], values[:, :, :length], hidden)
            for part, (length, hidden) in zip(torch.split(q, TILE, dim=1), self._tiles, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def exact_hidden_states(
    weights: ExactWeights,
    rotary: tuple[Tensor, Tensor],
    tokens: Tensor,
    grid: Grid,
    wanted: Tensor | None,
    *,
    checkpointing: bool,
) -> Tensor:
    """Return hidden states as :meth:`hotpot.models.Policy.forward` does, of ``tokens`` int64 ``[B, T]``.

    ``rotary``: see :func:`hotpot.models.rotary.rotary_table`. ``checkpointing``: keep each layer's input only.
    """
    require_one_thread()
    config, count = weights.config, tokens.numel()
    missing = padding(count, ROWS)
    places = F.pad(grid.positions.reshape(-1), (0, missing))
    turned = (rotary[0][places].unsqueeze(1), rotary[1][places].unsqueeze(1))
    rows = TiledAttention(_sees(grid))
    asked = None if wanted is None else F.pad(wanted, (0, padding(len(wanted), ROWS)))
    x = F.embedding(F.pad(tokens.reshape(-1), (0, missing)), weights.embedding)
    for index, layer in enumerate(weights.layers):
        chosen = asked if index == config.num_layers - 1 else None
        given = (layer, x, turned, _attend(grid, rows, index, missing, chosen), chosen)
        x = _again(weights, *given) if checkpointing else layer_output(config, *given)
    x = F.rms_norm(x, (config.hidden_size,), weights.norm, config.rms_norm_eps)
    return x[:count].view(*tokens.shape, -1) if wanted is None else x[: len(wanted)]


def _again(weights: ExactWeights, layer: LayerWeights, *given: object) -> Tensor:
    out: Tensor = checkpoint(
        layer_output, weights.config, layer, *given, use_reentrant=False, preserve_rng_state=False
    )
    return out


def _sees(grid: Grid) -> Tensor:
    """Return which keys each query sees, bool ``[B or 1, T, S]``."""
    if grid.attend is not None:
        return grid.attend[:, 0]
    count = grid.positions.shape[1]
    return torch.ones(count, count, dtype=torch.bool).tril()[None]


def _attend(grid: Grid, rows: TiledAttention, layer: int, missing: int, wanted: Tensor | None) -> Attend:
    """Return attention of layer ``layer``; ``missing`` tokens behind the grid are padding."""
    batch, count = grid.positions.shape

    def laid(x: Tensor) -> Tensor:
        return x[: batch * count].view(batch, count, *x.shape[1:])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = laid(k).transpose(1, 2), laid(v).transpose(1, 2)
        if grid.cache is not None:
            if grid.rows is None or grid.attend is None:
                raise ValueError("a cache needs rows and attend")
            grid.cache.write(layer, grid.rows, grid.positions, keys, values)
            keys, values = grid.cache.read(layer, grid.rows, grid.attend.shape[-1])
        out = rows(laid(q), keys, values).reshape(batch * count, -1)
        return F.pad(out, (0, 0, 0, missing)) if wanted is None else out[wanted]

    return attend


def _in_lanes(x: Tensor) -> Tensor:
    """Return keys or values float ``[B, num_kv_heads, S, head_dim]``, zeros behind them up to a multiple of ``LANES``, so laid
    that several tiles can read them."""
    missing = padding(x.shape[2], LANES)
    return F.pad(x, (0, 0, 0, missing)) if missing else x
