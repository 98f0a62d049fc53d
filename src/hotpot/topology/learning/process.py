"""Learning in a process of its own: begun, asked for, and ended whatever it does.

::

    begin ──Work──► box ──► child.py: the learner ──► box ──► poll ──► Learned
                                   │      └──► progress ──► beat
                                   └──► two buffers in memory ──► weights

Owns the process, the memory both see (:mod:`hotpot.topology.learning.memory`) and the log of what it says. Builds no learner.
Nothing here waits but :meth:`LearnerProcess.poll`, as long as it is told, and :meth:`LearnerProcess.close`, for seconds: records
lie in memory, and the channel between the two carries single bytes.

Invariants: one piece of work is under way at most, so the buffer that :meth:`LearnerProcess.weights` shows is written again at
the earliest in the update after the next; the memory has no name and is gone with both processes.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hotpot.config import Recipe
from hotpot.errors import LearnerError
from hotpot.models import Weights
from hotpot.topology.learning.child import Start
from hotpot.topology.learning.memory import Box, Progress, WeightBuffers, nameless
from hotpot.topology.learning.parcels import Done, Failure, Save, Saved, revive
from hotpot.topology.learning.protocol import Learned, Work

LOG = Path("logs") / "learner.log"
"""File in the run folder with what the process says, and its stacks where it had to be killed."""

_ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask a run to end. They are for the main loop, which ends its learner where that is due."""

_CODE = (
    "import signal; ending = (signal.SIGINT, signal.SIGTERM); [signal.signal(one, signal.SIG_IGN) for one in ending]; "
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, ending); import sys; from hotpot.orphans import end_with; "
    "end_with(int(sys.argv[1])); from hotpot.topology.learning.child import main; main()"
)
"""What the process runs. It comes with these signals blocked; from its first line on it ignores them, and ends with its parent."""

_GRACE_S = 2.0
"""Longest wait for the process to end by itself."""

_STACKS_S = 0.2
"""Time that a process which is about to be killed gets to write its stacks."""

_TAIL_BYTES = 2000


class LearnerProcess:
    """:class:`hotpot.topology.learning.protocol.Learning` of a learner in a child of this process.

    Parameters
    ----------
    recipe: what the run was told last, secrets included.
    run: the run folder; the process writes its log there.
    num_threads: threads it computes with.
    source: the checkpoint it goes on from, None to begin with the recipe's model.
    first: the run's first checkpoint, where there is one (:func:`hotpot.topology.parts.ingredients.read_model`).
    lost_updates: numbers of updates that are not on the way to its weights (:class:`hotpot.learner.Learner`).

    The process starts at once and builds its learner by itself; what goes wrong there is raised by :meth:`poll`.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        run: Path,
        num_threads: int,
        source: Path | None = None,
        first: Path | None = None,
        lost_updates: int = 0,
    ) -> None:
        self._log, self._patience_s = run / LOG, recipe.supervision.stop_after_s
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._kept = ExitStack()
        self._channel, theirs = socket.socketpair()
        self._kept.enter_context(self._channel)
        work, outcomes, progress, self._memory = (
            self._descriptor(name) for name in ("work", "outcomes", "progress", "weights")
        )
        self._work, self._outcomes, self._progress = Box(work), Box(outcomes), Progress(progress)
        self._buffers: WeightBuffers | None = None
        self._served: Weights | None = None
        self._doing, self._saving = "", False
        self._begun, self._patient, self._began = 0, 0, time.monotonic()
        start = Start(
            recipe=recipe.model_dump_json(),
            source=None if source is None else str(source),
            first=None if first is None else str(first),
            num_threads=num_threads,
            lost_updates=lost_updates,
            channel=theirs.fileno(),
            work=work,
            outcomes=outcomes,
            progress=progress,
            weights=self._memory,
        )
        with theirs:
            self._process = self._spawn(start, (theirs.fileno(), work, outcomes, progress, self._memory))

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def busy(self) -> bool:
        """Whether something was begun whose end was not taken by :meth:`poll` yet."""
        return bool(self._doing)

    def begin(self, work: Work) -> None:
        """Begin an update. Raises :class:`LearnerError` where one is under way, or the process is dead."""
        self._ask(work, f"in update {work.update}")

    def begin_save(self, folder: Path, files: Mapping[str, bytes], run: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint into ``folder``, as :meth:`hotpot.learner.Learner.save` does. Raises as :meth:`begin`."""
        self._ask(Save(folder=folder.absolute(), files=files, run=run), f"writing {folder}")

    def poll(self, timeout_s: float = 0.0) -> Learned | Path | None:
        """Return what came of the work that was begun (the folder, for a checkpoint); None where it is not done within
        ``timeout_s`` seconds.

        Raises what the learner raised, with its trace as a note, and :class:`LearnerError` where the process died: with
        its exit code or signal and the end of what it said.
        """
        self._check_open()
        ready, _, _ = select.select([self._channel], [], [], timeout_s if self.busy else 0.0)
        if not ready:
            return None
        if not self._hear():
            raise self._mourned()
        outcome: Done | Saved | Failure = self._outcomes.take()
        self._doing, self._saving = "", False
        if isinstance(outcome, Failure):
            raise revive(outcome)
        if isinstance(outcome, Saved):
            return outcome.folder
        self._buffers = self._buffers or WeightBuffers.find(self._memory)
        self._served = self._buffers.read(outcome.buffer)
        return outcome.learned

    def weights(self) -> Weights:
        """Return the weights after the last update that was taken by :meth:`poll`. They lie in memory that the learner writes
        to, and stay as they are until the update after the next one is begun.

        Raises :class:`LearnerError` before the first.
        """
        if self._served is None:
            raise LearnerError(
                "no update was learned here yet; take the weights from where the learner began"
            )
        return self._served

    def beat(self) -> tuple[int, float]:
        """Return how much was done so far (passes of a model, optimiser steps, pieces of work begun and ended), and when
        last, on the monotonic clock.

        While the learner is built or a checkpoint written nothing of that is seen for a while: each beat counts then, for
        ``supervision.stop_after_s``.
        """
        count, last = self._progress.read()
        now = time.monotonic()
        if (count == 0 or self._saving) and now - self._began < self._patience_s:
            self._patient, last = self._patient + 1, now
        return count + self._begun + self._patient, max(last, self._began)

    def close(self) -> None:
        """End the process within a few seconds. One that is at work, or hangs, is killed, its stacks in the log."""
        if self._process.poll() is None:
            self._channel.shutdown(socket.SHUT_WR)
            try:
                self._process.wait(0 if self.busy else _GRACE_S)
            except subprocess.TimeoutExpired:
                self._kill()
        self._served = self._buffers = None
        self._kept.close()

    def _descriptor(self, name: str) -> int:
        descriptor = nameless(f"hotpot-{name}")
        self._kept.callback(os.close, descriptor)
        return descriptor

    def _spawn(self, start: Start, given: tuple[int, ...]) -> subprocess.Popen[bytes]:
        """Start the process; its standard input is a file that has everything already, so nothing waits for it to be read."""
        settings = nameless("hotpot-start")
        try:
            os.pwrite(settings, start.to_json().encode(), 0)
            with self._log.open("ab") as log, _blocked():
                return subprocess.Popen(
                    [sys.executable, "-P", "-c", _CODE, str(os.getpid())],
                    stdin=settings,
                    stdout=log,
                    stderr=log,
                    pass_fds=given,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                    process_group=0,
                )
        except BaseException:
            self._kept.close()
            raise
        finally:
            os.close(settings)

    def _ask(self, order: Work | Save, doing: str) -> None:
        self._check_open()
        if self.busy:
            raise LearnerError(
                f"the learner was given work while it was {self._doing}; poll until that is done"
            )
        if self._process.poll() is not None:
            self.poll()  # where it said why, that is raised
            raise self._mourned()
        self._work.put(order)
        self._doing, self._saving = doing, isinstance(order, Save)
        self._begun, self._began = self._begun + 1, time.monotonic()
        try:
            self._channel.send(b"!")
        except ConnectionError:
            raise self._mourned() from None

    def _hear(self) -> bool:
        """Take one byte; return whether there was one, and not the end of the process."""
        try:
            return bool(self._channel.recv(1, socket.MSG_DONTWAIT))
        except ConnectionError:
            return False

    def _check_open(self) -> None:
        if self._channel.fileno() < 0:
            raise LearnerError("the learner's process was closed")

    def _mourned(self) -> LearnerError:
        """Return the error that says how the process died."""
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:  # it let go of the channel and lives
            code = self._kill()
        if code < 0:
            how = f"was ended by signal {-code} ({signal.Signals(-code).name})"
        else:
            how = f"ended with exit code {code}"
        when = f" {self._doing}" if self._doing else ""
        said = self._tail()
        return LearnerError(
            f"the learner's process {self.pid} {how}{when}; "
            + (f"the end of {self._log}:\n{said}" if said else f"it left nothing in {self._log}")
            + "\nResume the run to go on from what is recorded"
        )

    def _kill(self) -> int:
        """End the process now, what it was doing in the log; return how it ended."""
        self._process.send_signal(signal.SIGUSR1)
        try:
            self._process.wait(_STACKS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        return self._process.wait(_GRACE_S)

    def _tail(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return log.read().decode(errors="replace").strip()


@contextmanager
def _blocked() -> Iterator[None]:
    """Let this thread, and what it starts, get no signal that asks the run to end; this process gets it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
