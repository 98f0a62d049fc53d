"""The engine that runs in this process.

``engine``          what happens in a step: admit, plan, compute, sample, finish; and publish
``scheduler``       who is prefilled when, and in which slot of the key/value cache
``shared_prompts``  who computes a prompt that several requests have in common
``rows``            the running requests as arrays
``stream``          which tokens one forward pass computes
``passes``          who computes them: the packed decoder, or a policy's own module
``forward``, ``attention``, ``cache``, ``weights``   the packed decoder
``sampler``         from logits to tokens and log-probabilities
"""

from hotpot.engine.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
