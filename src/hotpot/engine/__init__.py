"""Inference engines: token ids in, token ids and log-probabilities out.

``protocol``    what every engine is
``gate``        what every engine checks before it takes a request
``probe``       asking an engine a short question, to verify a publish
``replicas``    several engines as one (imports torch, with hotpot.models)
``randomness``  the uniform number that samples a token, fixed by its key and position
``embedded``    the engine that runs in this process (the only room here that imports torch)
"""

from hotpot.engine.gate import RequestGate
from hotpot.engine.protocol import Engine

__all__ = ["Engine", "RequestGate"]
