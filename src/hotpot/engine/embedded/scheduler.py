"""Who is prefilled when, and in which slot: plain Python, no tensors.

Owns the waiting queue, the running set and the slots. Knows neither tokens nor weights: whether what a slot holds may
be reused is the engine's to verify. A pure state machine: no clock, no randomness.

::

    submit ──► waiting ──admit──► running ──finish──► slot idle (kept for its session)
                                                          │ least recently used first
                                                          └──► evicted when another request needs a slot

Invariants: a slot belongs to at most one request; requests are admitted in the order they came, so nothing starves; a
session has at most one idle slot.
"""

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request that leaves the queue for ``slot``. ``returning``: the slot last served the same session."""

    request_id: str
    slot: int
    returning: bool


class Scheduler:
    """Admission in batches, and slots with a memory.

    Parameters
    ----------
    num_slots: requests that can run at once.
    admit_share: waiting requests are admitted together once they are this share of all requests in the engine (as far
        as there are slots), or nothing runs. High values make prefills and decode batches large, at the price of
        rows that stand still.
    """

    def __init__(self, *, num_slots: int, admit_share: float) -> None:
        self._num_slots = num_slots
        self._admit_share = admit_share
        self._waiting: deque[tuple[str, str]] = deque()
        self._running: dict[str, tuple[int, str]] = {}
        self._free = list(range(num_slots))
        self._idle: OrderedDict[str, int] = OrderedDict()

    def submit(self, request_id: str, session_id: str) -> None:
        """Put a request at the end of the queue."""
        self._waiting.append((request_id, session_id))

    def begin(self, session_id: str) -> bool:
        """Forget all idle slots where nothing waits or runs and ``session_id`` has none: somebody begins anew.

        What ran before then decides nothing any more about who gets which slot. Return whether it was so.
        """
        anew = not self._waiting and not self._running and session_id not in self._idle
        if anew:
            self._free, self._idle = list(range(self._num_slots)), OrderedDict()
        return anew

    def admit(self) -> list[Admission]:
        """Return the requests to prefill now, each with its slot; ``[]`` where it is better to go on decoding."""
        total = min(len(self._waiting) + len(self._running), self._num_slots)
        count = min(len(self._waiting), self._num_slots - len(self._running))
        if count == 0 or (self._running and count < self._admit_share * total):
            return []
        batch = [self._waiting.popleft() for _ in range(count)]
        kept: dict[str, int] = {}
        for request_id, session_id in batch:
            # Sessions of this batch take their own slots first, so that nobody else evicts them.
            if session_id in self._idle:
                kept[request_id] = self._idle.pop(session_id)
        admissions = []
        for request_id, session_id in batch:
            slot = kept.get(request_id)
            returning = slot is not None
            if slot is None:
                slot = self._take_slot()
            self._running[request_id] = (slot, session_id)
            admissions.append(Admission(request_id=request_id, slot=slot, returning=returning))
        return admissions

    def finish(self, request_id: str) -> None:
        """End a running request; its slot stays with its session until another request needs it."""
        slot, session_id = self._running.pop(request_id)
        if session_id in self._idle:
            heapq.heappush(self._free, self._idle.pop(session_id))
        self._idle[session_id] = slot

    def _take_slot(self) -> int:
        if self._free:
            # The lowest first: running slots stay close together, and the engine reads one range of its cache.
            return heapq.heappop(self._free)
        _, slot = self._idle.popitem(last=False)
        return slot
