"""What is asked and what is not answered yet: the rules that every kind of actors keeps towards its caller.

Owns the order of calls of an attempt, and that each is answered once: OPEN, then STEPs one after the other, and a CLOSE at
any time, after which nothing but its own reply comes. Knows nothing of who carries calls out.
"""

from hotpot.rollout.actors.calls import Call, CallKind, Reply


class Desk:
    """Calls in, replies out."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        self._under_way: dict[str, CallKind] = {}
        self._replies: dict[str, Reply] = {}  # by attempt: it has never two

    def enter(self, call: Call) -> None:
        """Take note of a call. Raises ValueError where it is not its turn: that is its caller's fault."""
        attempt, kind = call.attempt_id, call.kind
        before = self._under_way.get(attempt)
        if kind is CallKind.CLOSE:
            allowed = before is not CallKind.CLOSE
        else:
            allowed = before is None and (attempt in self._open) == (kind is CallKind.STEP)
        if not allowed:
            state = (
                f"a {before} under way"
                if before
                else f"{'an' if attempt in self._open else 'no'} environment"
            )
            raise ValueError(f"a {kind} can't begin now: attempt {attempt} has {state}")
        if (kind is CallKind.OPEN and call.task is None) or (kind is CallKind.STEP and call.action is None):
            raise ValueError(f"an open needs a task, a step an action: {call!r}")
        if kind is CallKind.OPEN:
            self._open.add(attempt)
        elif kind is CallKind.CLOSE:
            self._open.discard(attempt)
            self._replies.pop(attempt, None)
        self._under_way[attempt] = kind

    def answer(self, reply: Reply) -> None:
        """Take the reply to the call that is under way. Raises ValueError where that is another."""
        if self._under_way.get(reply.attempt_id) is not reply.kind:
            raise ValueError(f"attempt {reply.attempt_id} waits for no {reply.kind}")
        self._replies[reply.attempt_id] = reply

    def take(self) -> list[Reply]:
        """Return the replies that are there, in order of their coming."""
        replies, self._replies = list(self._replies.values()), {}
        for reply in replies:
            del self._under_way[reply.attempt_id]
        return replies
