"""The engine that runs in this process.

``engine``      what happens in a step: admit, make room, compute, sample, finish; and publish
``scheduler``   who runs, in which row, and who waits for whom
``budget``      how many blocks there may be
``memory``      which blocks each context lies in: reuse, growth, what is kept
``prefixes``    which block holds what after what
``blocks``      which blocks are free, kept or read
``flights``     a request from submission to its answer
``rows``        the running requests as arrays
``stream``      which tokens one forward pass computes
``passes``      who computes them: the packed decoder, the exact one, or a policy's own module
``forward``, ``attention``, ``store``, ``weights``   the packed decoder, and keys and values
``exact_passes``, ``exact``   the decoder in the arithmetic of deterministic mode
``sampler``     from logits to tokens and log-probabilities
"""

from hotpot.engine.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
