"""Who calls environments: in the main loop, in threads, or in processes of their own.

``calls`` what is asked and answered, and the protocol · ``seats`` one attempt's environment · ``roster`` who is there, and
whose turn it is · ``inline`` calls made at once
"""

from hotpot.rollout.actors.calls import Actors, ActorState, Call, CallKind, Reply
from hotpot.rollout.actors.inline import InlineActors

__all__ = ["ActorState", "Actors", "Call", "CallKind", "InlineActors", "Reply"]
