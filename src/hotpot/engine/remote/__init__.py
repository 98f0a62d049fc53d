"""Engines behind HTTP: vLLM, and servers that speak OpenAI's completions.

``making``      from a recipe's section to an engine; starts vLLM where it is to
``engine``      the five calls of an engine: guards, requests under way, recovery
``serving``     which weights the server serves, verified
``questions``   one request as a piece of work
``admission``, ``backoff``   who goes out when, and when again (pure)
``wire``, ``completions``, ``generate``   requests and answers as JSON (pure)
``checking``, ``probes``   what is believed of an answer, and of a publish (pure)
``weights``     the copy, the folder and what the weights themselves say
``calls``, ``http``   threads and sockets
``hosts``, ``process``   the server: control calls of each make, and its process where it is ours
"""

from hotpot.engine.remote.engine import RemoteEngine
from hotpot.engine.remote.making import borrow, make_remote_engine

__all__ = ["RemoteEngine", "borrow", "make_remote_engine"]
