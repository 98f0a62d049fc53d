"""Who runs, and in which row: plain Python, no tokens, no tensors, no memory.

Owns the queue and the running set. Whether there is memory for a request is the caller's to know: it looks at the
:attr:`Scheduler.head` of the queue and either starts it, lets it wait for another, or leaves it. A pure state machine: no
clock, no randomness.

::

    submit ──► waiting ──start──► running ──finish──►
                ▲  │ follow          │
                │  └──► followers ◄──┤ of a running request
                │            │ release
                └────────────┴───────┘ preempt

Invariants: a row belongs to one running request; the queue is served in order, preempted requests and followers that need
not wait any more before all others, so that nothing starves; the request that has run longest is never preempted while
there is another.
"""

import heapq
from collections import deque


class Scheduler:
    """Admission in batches, rows, and preemption.

    Parameters
    ----------
    num_rows: requests that can run at once.
    admit_share: waiting requests are admitted together once they are this share of all requests in the engine (as far
        as there are rows), or nothing runs. High values make prefills and decode batches large, at the price of rows
        that stand still.
    """

    def __init__(self, *, num_rows: int, admit_share: float) -> None:
        self._num_rows = num_rows
        self._admit_share = admit_share
        self._waiting: deque[str] = deque()
        self._urgent = 0
        self._running: dict[str, int] = {}
        self._followers: dict[str, list[str]] = {}
        self._free = list(range(num_rows))

    @property
    def head(self) -> str | None:
        """The request to start next, if one waits and a row is free."""
        return self._waiting[0] if self._waiting and self._free else None

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self._running)

    def submit(self, request_id: str) -> None:
        """Put a request at the end of the queue."""
        self._waiting.append(request_id)

    def ready(self) -> bool:
        """Return whether now is the time to admit: enough wait, or some that should not, or nothing runs."""
        count = min(len(self._waiting), len(self._free))
        if count == 0:
            return False
        total = min(len(self._waiting) + len(self._running), self._num_rows)
        return not self._running or self._urgent > 0 or count >= self._admit_share * total

    def next_row(self) -> int:
        """Return the row that the next request will get: the lowest free one."""
        return self._free[0]

    def start(self) -> tuple[str, int]:
        """Let the head of the queue run; return it and its row."""
        request_id, row = self._pop(), heapq.heappop(self._free)
        self._running[request_id] = row
        return request_id, row

    def follow(self, leader: str) -> None:
        """Let the head of the queue wait for ``leader``, which runs."""
        self._followers.setdefault(leader, []).append(self._pop())

    def release(self, leader: str) -> None:
        """Put those that waited for ``leader`` at the front of the queue, in their order."""
        self._push(self._followers.pop(leader, []))

    def finish(self, request_id: str) -> int:
        """End a running request; return its row. Who waited for it waits no longer."""
        row = self._running.pop(request_id)
        heapq.heappush(self._free, row)
        self.release(request_id)
        return row

    def preempt(self, request_id: str) -> int:
        """Put a running request back at the front of the queue; return the row it had."""
        row = self.finish(request_id)
        self._push([request_id])
        return row

    def newest(self) -> str:
        """Return the running request that was started last."""
        return next(reversed(self._running))

    def _pop(self) -> str:
        self._urgent = max(self._urgent - 1, 0)
        return self._waiting.popleft()

    def _push(self, requests: list[str]) -> None:
        self._waiting.extendleft(reversed(requests))
        self._urgent += len(requests)
