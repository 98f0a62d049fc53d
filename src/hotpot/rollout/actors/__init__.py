"""Who calls environments: in the main loop, in threads, or in processes of their own.

``calls`` what is asked and answered, and the protocol
"""

from hotpot.rollout.actors.calls import Actors, ActorState, Call, CallKind, Reply

__all__ = ["ActorState", "Actors", "Call", "CallKind", "Reply"]
