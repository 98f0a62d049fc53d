"""Reductions over unmasked values: the only place where the learner sums, averages or takes a maximum under a mask.

Owns the meaning of a mask: a value where the mask is false does not exist. Knows nothing of losses or batches.

Invariants: whatever stands under the mask (NaN and infinity too) changes neither a result nor a gradient by a bit;
counts are exact integers; where nothing is unmasked the result is 0, never NaN, and its gradient is 0.
"""

import torch
from torch import Tensor


def only(values: Tensor, mask: Tensor, *, fill: float = 0.0) -> Tensor:
    """Return ``values`` float ``[...]`` with ``fill`` wherever ``mask`` bool ``[...]`` is false.

    Apply it before any arithmetic: a derivative taken at a masked NaN would be NaN even if the result is thrown away.
    """
    _check(values, mask)
    return torch.where(mask, values, torch.full((), fill, dtype=values.dtype))


def count(mask: Tensor) -> int:
    """Return the number of unmasked entries of ``mask`` bool ``[...]``."""
    return int(mask.sum())


def total(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of the unmasked ``values`` float ``[...]``; a scalar of the same dtype."""
    return only(values, mask).sum()


def mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the unmasked ``values`` float ``[...]``; a scalar, 0 where all is masked."""
    return total(values, mask) / max(count(mask), 1)


def maximum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the largest unmasked value of ``values`` float ``[...]``; a scalar, 0 where all is masked."""
    _check(values, mask)
    if not bool(mask.any()):
        return only(values, mask).sum()
    return only(values, mask, fill=-torch.inf).max()


def group_means(values: Tensor, mask: Tensor, groups: Tensor) -> Tensor:
    """Return, at every entry, the mean of the unmasked ``values`` of its group: float ``[...]``, 0 where all are masked.

    ``groups`` int64 ``[...]`` >= 0 numbers each entry's group.
    """
    kept, flat = only(values, mask).flatten(), groups.flatten()
    size = int(flat.max()) + 1 if flat.numel() else 0
    totals = torch.zeros(size, dtype=values.dtype).index_add(0, flat, kept)
    counts = torch.zeros(size, dtype=torch.int64).index_add(0, flat, mask.flatten().long())
    return (totals / counts.clamp(min=1))[groups]


def _check(values: Tensor, mask: Tensor) -> None:
    if mask.dtype != torch.bool or mask.shape != values.shape:
        raise ValueError(
            f"a mask is bool and shaped like its values; got {mask.dtype} {tuple(mask.shape)} "
            f"for values {tuple(values.shape)}; build it with the same layout"
        )
