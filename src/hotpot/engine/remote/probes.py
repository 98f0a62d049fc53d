"""Whether a server serves the weights it was given: what it says of tokens it sampled, beside what the weights say.

Owns the probes (short prompts of random tokens, sampled at temperature 1) and the verdict on them. Pure: the log-probabilities of
our own weights are given. A server's own word is not enough: vLLM's CPU build answers a reload with success and goes on with
the old packed head, and its weight checksums are of tensors that are empty by then.

What probes can't see: weights that none of these tokens touch (rows of the embedding), and differences below the server's
own rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotpot.types import GenerationRequest, Purpose, SampleKey, SamplingParams

NUM_PROBES = 8
PROBE_TOKENS = 8
_PROMPT_TOKENS = 12

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest difference in nats taken for the rounding of a server that computes in this precision."""

_CLEAR = 8.0
"""Old and new weights count as told apart where they differ by this many times the noise of the measurement."""

_CHANCE = -14.0
"""Natural logarithm of a chance (one in a million) that is not believed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Probed:
    """One probe's tokens: what the server said of each, what the weights say (``own``), what the former weights say
    (``former``), and the highest log-probability at each place (``best``); float64 ``[m]`` each. None: no former ones.
    """

    said: NDArray[np.float64]
    own: NDArray[np.float64]
    best: NDArray[np.float64]
    former: NDArray[np.float64] | None


def probe_requests(*, vocab_size: int, max_context_tokens: int, salt: int) -> list[GenerationRequest]:
    """Return the requests; ``salt`` gives each verification tokens of its own."""
    rng = np.random.default_rng([salt, 0x9E3779B9])
    size = max(1, min(_PROMPT_TOKENS, max_context_tokens - PROBE_TOKENS))
    return [
        GenerationRequest(
            request_id=f"probe:{salt}:{number}",
            session_id=f"probe:{salt}:{number}",
            prompt=rng.integers(0, vocab_size, size).astype(np.int32),
            stop_tokens=(),
            max_tokens=min(PROBE_TOKENS, max_context_tokens - size),
            purpose=Purpose.TRAINING,
            sampling=SamplingParams(),
            key=SampleKey(seed=salt, issue=number, sample=0, step=0),
        )
        for number in range(NUM_PROBES)
    ]


def verdict(probes: Sequence[Probed], *, tolerance: float) -> str:
    """Return what is wrong, empty where nothing is."""
    said, own, best = (
        np.concatenate([getattr(one, name) for one in probes]) for name in ("said", "own", "best")
    )
    gap = np.abs(said - own)
    at = int(gap.argmax())
    if not gap[at] <= tolerance:
        return (
            f"of a probe token it says {said[at]:.6f}, the weights say {own[at]:.6f}: {gap[at]:.3g} nats apart, more than "
            f"engine.publish_tolerance = {tolerance}; it serves other weights than it was given"
        )
    if all(one.former is not None for one in probes):
        former = np.concatenate([one.former for one in probes if one.former is not None])
        share = share_of_former(said, own, former)
        if share is not None and abs(share) >= 0.5:
            return f"its log-probabilities are those of the former weights (share {share:.2f}, 0 would be the new ones)"
    if bool((own >= best).all()) and float(own.sum()) < _CHANCE:
        return (
            f"each of {len(own)} tokens that were to be sampled at temperature 1 is the most likely one (chance "
            f"e^{own.sum():.0f}): it samples greedily, whatever it is asked"
        )
    return ""


def share_of_former(
    said: NDArray[np.float64], own: NDArray[np.float64], former: NDArray[np.float64]
) -> float | None:
    """Return where ``said`` lies on the line from ``own`` (0) to ``former`` (1), by least squares.

    None where the two are too close to be told apart in the noise that is left.
    """
    difference = former - own
    length = float(np.linalg.norm(difference))
    if length == 0:
        return None
    share = float((said - own) @ difference) / length**2
    noise = float(np.linalg.norm(said - own - share * difference)) / max(1.0, len(own) - 1.0) ** 0.5
    return share if length > _CLEAR * noise else None
