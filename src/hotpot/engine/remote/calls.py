"""Requests under way: a thread each, tried again while the server says that it cannot now, ended as one outcome.

::

    send ──► thread: POST ──► 200, read ──────────────────► Answered ─┐
                      ▲  └──► 429, 5xx, connection lost               ├──► collect
                      └── pause with jitter ◄┘   └─ no try left ► Failed ─┘

Owns the threads. Each job ends in exactly one outcome, within its tries times the deadline of one; :meth:`Calls.close`
breaks them all off. Knows nothing of budgets, weights or who asked.
"""

import json
import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hotpot.engine.remote.backoff import Backoff
from hotpot.engine.remote.http import Http, Lost, Reply
from hotpot.engine.remote.wire import Call, WireError

TRANSIENT = frozenset({429, 500, 502, 503, 504})
"""Statuses with which a server says that it can't now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """``value`` is what the job's reader made of the answer."""

    request_id: str
    epoch: int
    value: Any
    sent_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """No answer that can be used. ``lost``: the server may be gone; otherwise it refused, or answered nonsense."""

    request_id: str
    epoch: int
    cause: str
    lost: bool


Outcome = Answered | Failed
Work = Callable[["Asker"], Any]
"""Asks as often as it must and returns a value; raises :class:`WireError` where an answer is not what it should be."""


class Broken(Exception):
    """A job's call came to nothing; never leaves this package."""

    def __init__(self, cause: str, *, lost: bool) -> None:
        super().__init__(cause)
        self.lost = lost


class Asker:
    """Makes the calls of one job, with pauses between tries."""

    def __init__(
        self, http: Http, backoff: Backoff, *, timeout_s: float, over: threading.Event, retry_lost: bool
    ) -> None:
        self._http = http
        self._backoff = backoff
        self._timeout_s = timeout_s
        self._over = over
        self._retry_lost = retry_lost

    def ask(self, call: Call) -> Any:
        """Return the parsed JSON of the answer. Raises :class:`Broken`."""
        tries = 0
        while True:
            found = self._http.post(call.path, call.body, timeout_s=self._timeout_s)
            lost = isinstance(found, Lost)
            if isinstance(found, Reply):
                if found.status == 200:
                    return _parsed(found)
                cause, told = found.words(), found.retry_after_s
                if found.status not in TRANSIENT:
                    raise Broken(cause, lost=False)
            else:
                cause, told = found.cause, None
            tries += 1
            pause = self._backoff.pause_s(tries, random.random(), told)
            if pause is None or (lost and not self._retry_lost) or self._over.wait(pause):
                raise Broken(f"{cause} (tried {tries} times)", lost=True)


class Calls:
    """Runs jobs against one server, at most ``max_concurrency`` at once."""

    def __init__(
        self, http: Http, backoff: Backoff, *, timeout_s: float, max_concurrency: int, retry_lost: bool
    ) -> None:
        self._over = threading.Event()
        self._http = http
        self._asker = Asker(http, backoff, timeout_s=timeout_s, over=self._over, retry_lost=retry_lost)
        self._threads = ThreadPoolExecutor(max_concurrency, thread_name_prefix="engine-call")
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def send(self, request_id: str, epoch: int, work: Work) -> None:
        """Begin a job; ``epoch`` comes back with its outcome."""
        self._threads.submit(self._run, request_id, epoch, work)

    def collect(self, wait_s: float) -> list[Outcome]:
        """Return every outcome there is; where there is none, wait up to ``wait_s`` for the first."""
        found: list[Outcome] = []
        try:
            found.append(self._outcomes.get(timeout=wait_s))
            while True:
                found.append(self._outcomes.get_nowait())
        except queue.Empty:
            return found

    def now(self, work: Work) -> Any:
        """Run ``work`` in this thread. Raises :class:`Broken` or :class:`WireError`."""
        return work(self._asker)

    def close(self) -> None:
        """Break off what is under way and end the threads."""
        self._over.set()
        self._http.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _run(self, request_id: str, epoch: int, work: Work) -> None:
        began = time.perf_counter()
        outcome: Outcome
        try:
            value = work(self._asker)
        except Broken as broken:
            outcome = Failed(request_id=request_id, epoch=epoch, cause=str(broken), lost=broken.lost)
        except WireError as error:
            outcome = Failed(request_id=request_id, epoch=epoch, cause=str(error), lost=False)
        else:
            outcome = Answered(
                request_id=request_id,
                epoch=epoch,
                value=value,
                sent_s=began,
                seconds=time.perf_counter() - began,
            )
        self._outcomes.put(outcome)


def _parsed(reply: Reply) -> Any:
    try:
        return json.loads(reply.body)
    except ValueError as error:
        raise WireError(f"the answer is no JSON ({error}): {reply.body[:80]!r}") from None
