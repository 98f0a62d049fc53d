"""Who calls environments: in the main loop, in threads, or in processes of their own.

``calls`` what is asked and answered, and the protocol · ``desk`` the order of calls · ``roster`` who is there, and whose
turn it is · ``seats`` one attempt's environment · ``inline`` calls made at once · ``threads`` calls made in threads, by
``crew`` · ``processes`` calls made in processes: ``worker`` one as its parent sees it, ``child`` its program, ``channel`` and
``codec`` what they say to each other, ``sources`` where it gets environments from
"""

from hotpot.rollout.actors.calls import Actors, ActorState, Call, CallKind, Reply
from hotpot.rollout.actors.inline import InlineActors
from hotpot.rollout.actors.processes import ProcessActors
from hotpot.rollout.actors.threads import ThreadActors

__all__ = [
    "ActorState",
    "Actors",
    "Call",
    "CallKind",
    "InlineActors",
    "ProcessActors",
    "Reply",
    "ThreadActors",
]
