"""Inference engines: token ids in, token ids and log-probabilities out.

``protocol``    what every engine is
``gate``        what every engine checks before it takes a request
``randomness``  the uniform number that samples a token, fixed by its key and position
``sampler``     from logits to tokens and log-probabilities
``scheduler``   who is prefilled when, and in which slot of the key/value cache
``stream``      which tokens one forward pass computes
``rows``        the running requests as arrays
``embedded``    the engine that runs in this process (the only modules here that import torch are ``embedded*``)
"""

from hotpot.engine.gate import RequestGate
from hotpot.engine.protocol import Engine

__all__ = ["Engine", "RequestGate"]
