"""What is asked and what is not answered yet: the rules that every kind of actors keeps towards its caller.

Owns the order of calls of an attempt, and that each is answered once: OPEN, then STEPs one after the other, and a CLOSE at
any time, after which nothing but its own reply comes. Owns also the OPENs that wait for a broken actor's replacement.
Knows nothing of who carries calls out.
"""

from collections.abc import Callable

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


class Held:
    """OPENs for broken actors. Each waits, at most as long as any call may take, until its actor takes calls again or is
    replaced: were it refused at once, one broken actor would use up the tries of every task there is.
    """

    def __init__(self, timeout_s: float, seconds: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._seconds = seconds
        self._since: dict[str, tuple[Call, float]] = {}  # by attempt, oldest first

    def put(self, call: Call) -> None:
        """Have a call wait."""
        self._since[call.attempt_id] = (call, self._seconds())

    def drop(self, attempt_id: str) -> bool:
        """Take a call out; return whether it was here."""
        return self._since.pop(attempt_id, None) is not None

    def take(self, wanted: Callable[[Call], bool]) -> list[Call]:
        """Take the calls out that are wanted, oldest first."""
        calls = [call for call, _ in self._since.values() if wanted(call)]
        for call in calls:
            del self._since[call.attempt_id]
        return calls

    def take_late(self) -> list[Call]:
        """Take the calls out that have waited for too long."""
        late_s = self._seconds() - self._timeout_s
        late = {attempt for attempt, (_, since_s) in self._since.items() if since_s <= late_s}
        return self.take(lambda call: call.attempt_id in late)

    def __bool__(self) -> bool:
        return bool(self._since)
