"""How much each loss token counts in an optimiser step: the three ways to average over tokens.

``token_mean``     over all loss tokens of the step (DAPO, arXiv:2503.14476, section 3.3)
``sequence_mean``  over trajectories, of the mean over each one's tokens (GRPO, arXiv:2402.03300, equation 3)
``fixed_length``   over trajectories, of the sum over each one's tokens divided by a constant, so that length carries no
                   bias (Dr. GRPO, arXiv:2503.20783, section 3.1)

Invariants: under the first two the weights of a step sum to 1; under the mask a weight is 0.
"""

from typing import Literal

import torch
from torch import Tensor

from hotpot.learner import masked

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]


def token_weights(mask: Tensor, owners: Tensor, aggregation: Aggregation, *, fixed_length: int = 0) -> Tensor:
    """Return the weight of every token of one optimiser step, float64 ``[B, T]``, 0 under the mask.

    ``mask`` bool ``[B, T]``; ``owners`` int64 ``[B]`` numbers the trajectory each row belongs to, so that the segments of
    one trajectory share its weight. ``token_mean``: every loss token weighs the same. ``sequence_mean``: every
    trajectory weighs the same, and so do the tokens within it. ``fixed_length``: every loss token weighs 1 /
    (trajectories with a loss token * ``fixed_length``), > 0 there.
    """
    per_row = mask.sum(dim=-1)
    if aggregation == "token_mean":
        row_weight = torch.full(per_row.shape, 1.0 / max(masked.count(mask), 1), dtype=torch.float64)
    else:
        if aggregation == "fixed_length" and fixed_length < 1:
            raise ValueError(
                f"aggregation fixed_length with a length of {fixed_length}; give one of at least 1 token"
            )
        per_owner = torch.zeros(int(owners.max()) + 1 if owners.numel() else 0, dtype=torch.int64)
        per_owner.index_add_(0, owners, per_row)
        num_owners = max(masked.count(per_owner > 0), 1)
        divisor = per_owner[owners].clamp(min=1).double()
        if aggregation == "fixed_length":
            divisor = torch.full_like(divisor, fixed_length)
        row_weight = 1.0 / (divisor * num_owners)
    return masked.only(row_weight[:, None].expand(mask.shape), mask)
