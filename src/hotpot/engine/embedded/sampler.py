"""From logits to tokens: what is sampled, and how probable it was.

Owns the order of transformations (repetition penalty, temperature, top-k, top-p, renormalise), the inverse of the
cumulative distribution, and both log-probabilities. Knows no model; where a random number comes from is its caller's.
NumPy, since at small vocabularies its cost a call is a third of torch's.

Rules where the definitions leave a choice: of equal logits the lower id comes first (greedy, top-k and top-p alike);
top-p keeps the token that crosses the mass; the repetition penalty divides positive logits and multiplies negative ones
(CTRL, arXiv:1909.05858), once per token however often it occurred.

Invariants: one uniform number a token; a token of probability 0 is never drawn; a row depends on no other row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotpot.types import SamplingParams

Floats = NDArray[np.float32]
Rows = NDArray[np.intp]

_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """One token a row: ``tokens`` int64 ``[B]``; log-probabilities float32 ``[B]``, in nats.

    ``behaviour_logprobs``: under the distribution sampled from (0 where greedy); ``model_logprobs``: under the softmax
    of the raw logits. A row whose logits are not a distribution (NaN, +inf, all -inf) has NaN in ``model_logprobs``.
    """

    tokens: NDArray[np.int64]
    behaviour_logprobs: Floats
    model_logprobs: Floats


def sample(
    logits: Floats,
    groups: Sequence[tuple[SamplingParams, Rows]],
    uniforms: NDArray[np.float64],
    seen: NDArray[np.bool_] | None = None,
) -> Sampled:
    """Sample one token a row.

    ``logits`` float32 ``[B, V]``; ``groups`` cover every row once; ``uniforms`` float64 ``[B]`` in
    [0, 1); ``seen`` bool ``[B, V]``: tokens in each row's context, needed where a repetition penalty is on.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        if len(groups) == 1:
            return _sample_alike(logits, groups[0][0], uniforms, seen)
        batch = len(logits)
        tokens = np.empty(batch, dtype=np.int64)
        behaviour = np.empty(batch, dtype=np.float32)
        model = np.empty(batch, dtype=np.float32)
        for params, rows in groups:
            part = _sample_alike(logits[rows], params, uniforms[rows], None if seen is None else seen[rows])
            tokens[rows] = part.tokens
            behaviour[rows] = part.behaviour_logprobs
            model[rows] = part.model_logprobs
        return Sampled(tokens=tokens, behaviour_logprobs=behaviour, model_logprobs=model)


def _sample_alike(
    logits: Floats, params: SamplingParams, uniforms: NDArray[np.float64], seen: NDArray[np.bool_] | None
) -> Sampled:
    """Sample rows that share ``params``."""
    rows = np.arange(len(logits))
    weights = _Weights(logits)
    log_total = np.log(weights.total)
    if params.temperature == 1 and not params.filtered:
        tokens = weights.draw(uniforms)
        logprobs = (weights.shifted[rows, tokens] - log_total).astype(np.float32)
        return Sampled(tokens=tokens, behaviour_logprobs=logprobs, model_logprobs=logprobs)
    changed = _penalise(logits, params.repetition_penalty, seen)
    if params.temperature == 0:
        tokens = changed.argmax(axis=1)
        behaviour = np.zeros(len(logits), dtype=np.float32)
    else:
        changed = changed - changed.max(axis=1, keepdims=True)
        changed /= np.float32(max(params.temperature, _TINY))
        if params.top_k or params.top_p < 1:
            changed = np.where(_kept(changed, params), changed, np.float32(-np.inf))
        sampled_from = _Weights(changed)
        tokens = sampled_from.draw(uniforms)
        behaviour = (sampled_from.shifted[rows, tokens] - np.log(sampled_from.total)).astype(np.float32)
    model = (weights.shifted[rows, tokens] - log_total).astype(np.float32)
    return Sampled(tokens=tokens, behaviour_logprobs=behaviour, model_logprobs=model)


class _Weights:
    """exp(logits - max) of each row, summed in blocks, so that one draw reads a row once and a block once more."""

    def __init__(self, logits: Floats) -> None:
        batch, size = logits.shape
        block = 32 if size <= 4096 else 256
        count = -(-size // block)
        self._block = block
        self.shifted = logits - logits.max(axis=1, keepdims=True)
        padded = np.zeros((batch, count * block), dtype=np.float32)
        np.exp(self.shifted, out=padded[:, :size])
        self._blocks = padded.reshape(batch, count, block)
        self._cumulative = self._blocks.sum(axis=2).cumsum(axis=1, dtype=np.float64)
        self.total: NDArray[np.float64] = self._cumulative[:, -1]

    def draw(self, uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return for each row the first token whose cumulative weight exceeds its uniform share of the total."""
        rows = np.arange(len(uniforms))
        # Always below the total: 1 - 2**-53 times a float64 rounds to a smaller float64.
        target = uniforms * self.total
        block = (self._cumulative <= target[:, None]).sum(axis=1)
        before = np.where(block > 0, self._cumulative[rows, block - 1], 0.0)
        inside = self._blocks[rows, block].cumsum(axis=1, dtype=np.float64)
        # The block's own sum is rounded differently from the running sum: stay below the latter.
        rest = np.minimum(target - before, np.nextafter(inside[:, -1], 0.0))
        tokens: NDArray[np.int64] = block * self._block + (inside <= rest[:, None]).sum(axis=1)
        return tokens


def _penalise(logits: Floats, penalty: float, seen: NDArray[np.bool_] | None) -> Floats:
    if penalty == 1:
        return logits
    if seen is None:
        raise ValueError("a repetition penalty needs the tokens seen in each row's context")
    factor = np.float32(penalty)
    return np.where(seen, np.where(logits > 0, logits / factor, logits * factor), logits)


def _kept(shifted: Floats, params: SamplingParams) -> NDArray[np.bool_]:
    """Return which tokens top-k and then top-p keep; ``shifted`` are scaled logits with maximum 0."""
    size = shifted.shape[1]
    most = min(params.top_k, size) if params.top_k else size
    ordered = -np.sort(-shifted, axis=1)[:, :most]
    counts = np.full(len(shifted), most)
    if params.top_p < 1:
        weights = np.exp(ordered.astype(np.float64))
        mass_before = weights.cumsum(axis=1)
        total = mass_before[:, -1:].copy()
        mass_before -= weights
        counts = np.maximum((mass_before < params.top_p * total).sum(axis=1), 1)
    threshold = ordered[np.arange(len(shifted)), counts - 1][:, None]
    kept = shifted > threshold
    ties = shifted == threshold
    room = counts - kept.sum(axis=1)
    for row in np.flatnonzero(ties.sum(axis=1) > room):
        ties[row, np.flatnonzero(ties[row])[room[row] :]] = False
    result: NDArray[np.bool_] = kept | ties
    return result
