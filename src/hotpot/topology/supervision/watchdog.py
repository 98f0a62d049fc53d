"""The watchdog: ends a run that gets nowhere, and says who it waited for.

::

    main loop ──turn()──► count ◄── looks at it ── watchdog's thread ── nothing for stop_after_s ──► verdict, stacks, exit 1
    timeline ──moves────►              │ re-arms
                                       ▼
                       faulthandler's timer in C: where not even this thread comes to run ──► stacks, exit 1

Before a run can be watched each part of its start has a deadline (:func:`bounded`).

Owns that judgement and the last seconds of the process. What is progress is said by whoever calls; what a part does about
its own dead is the supervisor's (:mod:`hotpot.topology.supervision.supervisor`).
Invariants: a run whose progress, or spans, or turns without a progress number move at least every ``stop_after_s`` is never
ended; neither is one that was not running meanwhile (a machine that slept, a suspended process), for silence is counted
in looks (:mod:`hotpot.topology.supervision.counted_time`). Once silent that long, the process is gone in a few seconds,
whatever any thread hangs in. Nothing is flushed that a hanging thread may hold a lock of: what was acknowledged is in the
log already.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from hotpot.places import thread_place
from hotpot.timeline import Timeline
from hotpot.topology.supervision.counted_time import CountedTime
from hotpot.topology.supervision.verdict import (
    Verdict,
    set_aside,
    stacks_path,
    write_verdict,
)

_LAST_S = 5.0
"""Longest time between the decision to end the process and its end."""
_CHILDREN_S = 1.0
"""Time that children have to write their stacks."""
_LOOK_S = 1.0
"""Longest time between two looks."""
_NATIVE_FACTOR = 2
"""The timer in C runs out after so many times stop_after_s: where this thread can run, it is always first."""
_BEHIND = {"hotpot.experience.log.journal": "hotpot-log", "hotpot.experience.lake.archive": "hotpot-archive"}
"""By the module in which the main thread waits for another of ours: how that one's name begins."""


class Watchdog:
    """Made by :func:`watch`. :meth:`turn` costs next to nothing and may be called from any thread. :attr:`silent` names the part
    that is waited for where the loop still turns, :attr:`children` the run's other processes; whoever comes to know may set them."""

    def __init__(
        self,
        run_folder: Path,
        *,
        stop_after_s: float,
        timeline: Timeline | None,
        silent: Callable[[], str],
        children: Callable[[], Mapping[str, int]],
    ) -> None:
        self._folder, self._stop_after_s = run_folder, stop_after_s
        self._timeline, self.silent, self.children = timeline, silent, children
        self._main = threading.main_thread().ident or 0
        self._turns = self._moved = 0
        self._progress: float | None = None
        self._over = threading.Event()
        stacks_path(run_folder).parent.mkdir(parents=True, exist_ok=True)
        set_aside(run_folder)
        self._stacks = stacks_path(run_folder).open("w")
        self._thread = threading.Thread(target=self._watch, name="hotpot-watchdog", daemon=True)

    def turn(self, progress: float | None = None) -> None:
        """Say that the loop came by. Without ``progress`` that is progress itself; with it, only a change of it is, so that
        a loop that turns and gets nowhere is found."""
        self._turns += 1
        if progress is None or progress != self._progress:
            self._progress = progress
            self._moved += 1

    def start(self) -> None:
        """Begin to watch."""
        self._arm()
        self._thread.start()

    def stop(self) -> None:
        """Watch no more, and leave nothing behind."""
        self._over.set()
        self._thread.join(_LAST_S)
        faulthandler.cancel_dump_traceback_later()
        self._stacks.close()
        path = stacks_path(self._folder)
        if not path.stat().st_size:
            path.unlink()

    def _arm(self) -> None:
        limit_s = _NATIVE_FACTOR * self._stop_after_s + _LAST_S
        faulthandler.dump_traceback_later(limit_s, exit=True, file=self._stacks)

    def suspended(self, _number: int, _frame: FrameType | None) -> None:
        """Handle SIGTSTP (Ctrl-Z): the timer in C must not run out while the process may not run."""
        faulthandler.cancel_dump_traceback_later()
        os.kill(os.getpid(), signal.SIGSTOP)
        if not self._over.is_set():
            self._arm()

    def _watch(self) -> None:
        part_s = self._stop_after_s / 4
        clock = CountedTime(part_s)
        at_s = moved_s = turned_s = armed_s = clock.at(time.monotonic())
        seen, turns = self._moves(spans=True), self._turns
        while not self._over.wait(min(_LOOK_S, part_s / 4)):
            at_s = clock.at(time.monotonic())
            if self._turns != turns:
                turns, turned_s = self._turns, at_s
            # Where the loop says how far it is, opening spans is no progress.
            counted = self._progress is None or at_s - turned_s > part_s
            if (found := self._moves(spans=counted)) != seen:
                seen, moved_s = found, at_s
            if at_s - armed_s >= part_s:
                self._arm()
                armed_s = at_s
            if at_s - moved_s >= self._stop_after_s:
                self._end(at_s - moved_s, turning=at_s - turned_s <= part_s)

    def _moves(self, *, spans: bool) -> tuple[int, int]:
        return self._moved, self._timeline.moves if spans and self._timeline is not None else 0

    def _end(self, silent_s: float, *, turning: bool) -> None:
        """Write what there is to say and end the process; in C, should a disk hang under it."""
        faulthandler.dump_traceback_later(_LAST_S, exit=True, file=self._stacks)
        try:
            faulthandler.dump_traceback(file=self._stacks, all_threads=True)
            verdict = self._verdict(silent_s, turning=turning)
            write_verdict(self._folder, verdict)
            os.write(2, (_words(verdict, self._folder) + "\n").encode())
            self._end_children(verdict)
        finally:
            os._exit(1)

    def _end_children(self, verdict: Verdict) -> None:
        if not (children := self.children()):
            return
        write_verdict(self._folder, replace(verdict, children=tuple(children)))
        for number, pause_s in ((signal.SIGUSR1, _CHILDREN_S), (signal.SIGKILL, 0.0)):
            for pid in children.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(pause_s)

    def _verdict(self, silent_s: float, *, turning: bool) -> Verdict:
        spans = () if self._timeline is None else self._timeline.open_spans
        where = _main_place(self._main)
        if turning:
            culprit = self.silent() or "nobody: the main loop turns, and no part has work"
        else:
            culprit = spans[-1] if spans else where
        return Verdict(
            culprit=culprit,
            where=where,
            spans=spans,
            turning=turning,
            silent_s=round(silent_s, 3),
            stop_after_s=self._stop_after_s,
            pid=os.getpid(),
        )


@contextmanager
def watch(
    run_folder: Path,
    *,
    stop_after_s: float,
    timeline: Timeline | None = None,
    silent: Callable[[], str] = str,
    children: Callable[[], Mapping[str, int]] = dict,
) -> Iterator[Watchdog]:
    """Watch this process's main thread inside the block; yield the watchdog, whose :meth:`Watchdog.turn` says progress.

    Spans of ``timeline`` that open or close count as progress where the loop gives no number of its own (``sync``,
    evaluations, checkpoints). ``silent()`` names the part that is waited for where the loop still turns
    (:meth:`hotpot.topology.supervision.supervisor.Supervisor.silent`); ``children()`` are the process ids, by name, of the run's
    other processes: on SIGUSR1 they write their stacks where they log, then they are killed. What an earlier watchdog left in
    ``run_folder`` is set aside: read it first (:func:`hotpot.topology.supervision.verdict.read_verdict`).
    """
    dog = Watchdog(run_folder, stop_after_s=stop_after_s, timeline=timeline, silent=silent, children=children)
    main = threading.current_thread() is threading.main_thread()
    suspends = main and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
    if suspends:
        signal.signal(signal.SIGTSTP, dog.suspended)
    dog.start()
    try:
        yield dog
    finally:
        if suspends:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        dog.stop()


@contextmanager
def bounded(doing: str, *, limit_s: float) -> Iterator[None]:
    """End this process where what its main thread is ``doing`` inside the block takes longer than ``limit_s`` seconds: for what
    is done before :func:`watch` has a run folder to write to and progress to look at. Stacks and culprit go to standard
    error, the exit code is 1."""
    over = threading.Event()
    thread = threading.Thread(target=_bound, args=(doing, limit_s, over), name="hotpot-watchdog", daemon=True)
    faulthandler.dump_traceback_later(_NATIVE_FACTOR * limit_s + _LAST_S, exit=True, file=2)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LAST_S)
        faulthandler.cancel_dump_traceback_later()


def _bound(doing: str, limit_s: float, over: threading.Event) -> None:
    part_s = limit_s / 4
    clock = CountedTime(part_s)
    until_s = clock.at(time.monotonic()) + limit_s
    while not over.wait(min(_LOOK_S, part_s / 4)):
        if clock.at(time.monotonic()) < until_s:
            continue
        faulthandler.dump_traceback_later(_LAST_S, exit=True, file=2)
        try:
            faulthandler.dump_traceback(file=2, all_threads=True)
            where = _main_place(threading.main_thread().ident or 0)
            said = (
                f"hotpot: no progress for {limit_s:.0f} s (supervision.stop_after_s = {limit_s:g}): the run waits for {doing}, "
                f"in {where}; every stack is above; mend that and try again"
            )
            os.write(2, (said + "\n").encode())
        finally:
            os._exit(1)


def _main_place(main: int) -> str:
    """Return where the main thread is; where it waits for a thread of ours there, also where that one is."""
    frames = sys._current_frames()
    place = thread_place(frames.get(main))
    behind = tuple(name for module, name in _BEHIND.items() if place.startswith(f"{module}."))
    waited_for = [thread for thread in threading.enumerate() if thread.name.startswith(behind)]
    return place + "".join(
        f", for {thread.name}, which is in {thread_place(frames.get(thread.ident or 0))}"
        for thread in waited_for
    )


def _words(verdict: Verdict, run_folder: Path) -> str:
    return (
        f"hotpot: no progress for {verdict.silent_s:.0f} s (supervision.stop_after_s = {verdict.stop_after_s:g}): the run "
        f"waits for {verdict.culprit}, in {verdict.where}; every stack is in {stacks_path(run_folder)}; mend that and "
        f"resume the run with `hotpot train --resume {run_folder}`"
    )
