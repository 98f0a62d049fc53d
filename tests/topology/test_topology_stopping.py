"""Ctrl-C and SIGTERM while the loop waits for others: the wait ends soon, nothing is interrupted in the midst."""

import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from hotpot.rollout.collector import WAIT_S
from hotpot.topology.supervision.stopping import StopRequested, StopSignal


@contextmanager
def signalled(*numbers: int) -> Iterator[None]:
    """Send signals to this process from beside, one after the other, once the block is under way."""

    main = threading.main_thread().ident or 0

    def send() -> None:
        for number in numbers:
            signal.pthread_kill(main, number)

    timer = threading.Timer(0.2, send)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join(5)


def turns_until_asked_to_stop(stop: StopSignal, *, at_most: int) -> int:
    """Wait for replies that never come, as the asynchronous loop does."""
    replies: queue.SimpleQueue[None] = queue.SimpleQueue()
    for turn in range(at_most):
        with suppress(queue.Empty):
            replies.get(timeout=WAIT_S)
        try:
            stop.check()
        except StopRequested:
            return turn
    return at_most


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_loop_that_waits_in_short_slices_ends_at_its_next_turn(number: int) -> None:
    with StopSignal() as stop, signalled(number):
        assert turns_until_asked_to_stop(stop, at_most=400) < 400
        assert stop.signal_number == number
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_signal_ends_what_does_not_get_to_its_next_turn() -> None:
    stop = StopSignal()
    # Outermost: on a slow machine the signals may come before the wait begins.
    with pytest.raises(KeyboardInterrupt), stop, signalled(signal.SIGTERM, signal.SIGINT):
        threading.Event().wait(30)
    assert stop.requested
