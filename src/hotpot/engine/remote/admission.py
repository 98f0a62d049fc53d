"""Which requests are out at a server: as many as its cache holds, first come first served.

Owns the counting, in tokens: a request counts its prompt and all it may sample, from when it goes out until its answer is
settled. Plain Python, no clock, no thread; knows no HTTP and no model.

Invariants: no more than ``max_requests`` requests and ``max_tokens`` tokens are out; requests go out in the order in which
they came, and one that is asked again goes before those that never were; nothing is dropped.
"""

from collections import deque

from hotpot.errors import EngineError


class Admission:
    """Admits requests to a server within a budget of requests and tokens."""

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self.tokens_out = 0
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._tokens: dict[str, int] = {}
        self._waiting: deque[str] = deque()
        self._out: dict[str, None] = {}
        self._held = False

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the client."""
        return len(self._waiting)

    @property
    def num_out(self) -> int:
        """Requests that the server has."""
        return len(self._out)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._tokens

    def offer(self, request_id: str, tokens: int) -> None:
        """Put a new request of ``tokens`` tokens in line. Raises :class:`EngineError` where it could never go out."""
        if tokens > self._max_tokens:
            raise EngineError(
                f"request {request_id!r} may take {tokens} tokens and engine.max_tokens_in_flight is {self._max_tokens}; "
                "raise the latter, or lower rollout.max_context_tokens"
            )
        self._tokens[request_id] = tokens
        self._waiting.append(request_id)

    def admit(self) -> list[str]:
        """Return the requests that go out now, in order; none while held."""
        admitted = []
        while self._waiting and not self._held and self._fits(self._waiting[0]):
            request_id = self._waiting.popleft()
            self._out[request_id] = None
            self.tokens_out += self._tokens[request_id]
            admitted.append(request_id)
        return admitted

    def again(self, request_id: str) -> None:
        """Take back a request that is out and has no answer, and put it at the head of the line."""
        self._take_back(request_id)
        self._waiting.appendleft(request_id)

    def settle(self, request_id: str) -> None:
        """Forget a request that is out: it was answered, or given up."""
        self._take_back(request_id)
        del self._tokens[request_id]

    def hold(self) -> None:
        """Let nothing out until :meth:`release`."""
        self._held = True

    def release(self) -> None:
        """Let requests out again."""
        self._held = False

    def _fits(self, request_id: str) -> bool:
        return (
            len(self._out) < self._max_requests
            and self.tokens_out + self._tokens[request_id] <= self._max_tokens
        )

    def _take_back(self, request_id: str) -> None:
        del self._out[request_id]
        self.tokens_out -= self._tokens[request_id]
