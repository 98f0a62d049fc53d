"""What the reference says of loss tokens, without gradient: to measure how far the policy is from it.

Owns the reference's passes. Knows no loss; who cuts the passes decides how large they are.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hotpot.learner.batches.passes import MicroBatch
from hotpot.learner.scores.forward import score
from hotpot.models import Policy


@torch.no_grad()
def reference_logprobs(
    reference: Policy, micros: Sequence[MicroBatch], num_loss_tokens: int, *, temperature: float
) -> NDArray[np.float64]:
    """Return the log-probability at ``temperature`` of each of ``num_loss_tokens`` loss tokens, float64 ``[N]``; ``micros``
    are passes over all of them."""
    found = np.zeros(num_loss_tokens)
    for micro in micros:
        scores = score(reference, micro, temperature=temperature, spread=False)
        found[micro.flat] = scores.logprobs.double().numpy()
    return found
