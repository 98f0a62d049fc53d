"""An actor's process as its parent sees it: started, asked, watched, ended with everything it started.

Owns the process, the connection to it, and the calls that are with it. Knows no attempts' order and no replacement. Nothing
here waits. ``dead`` says why nothing comes from here any more.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotpot.config import ActorsSection
from hotpot.rollout.actors.calls import ActorState, Call, Reply
from hotpot.rollout.actors.channel import Channel
from hotpot.rollout.actors.codec import STACKS_SIGNAL, Answered, Asked, Beat, Hello, Ready, Source, Unfit

GRACE_S = 3.0
"""Time between asking a process to end and killing it; longer than it takes to close environments that don't hang."""
LATE_S = 10.0
"""Time beyond a call's deadline after which a process that has not said that the call hangs counts as standing still."""
_EXIT_S = 1.0
"""Time that a process may take to be gone after its connection has ended."""
_PROGRAM = (
    "import json, sys\n"
    "sys.path[:] = json.loads(sys.argv[1])\n"
    "from hotpot.orphans import end_with\n"
    "parent = end_with(int(sys.argv[3]))\n"
    "from hotpot.rollout.actors.child import main\n"
    "main(int(sys.argv[2]), parent)"
)


@dataclass(slots=True, eq=False)
class _Out:
    """A call that is with the process, and since when."""

    call: Call
    since_s: float


class Worker:
    """One process. ``log`` takes what it prints; None: what this process' standard error takes."""

    def __init__(
        self,
        actor_id: str,
        sources: Sequence[Source],
        settings: ActorsSection,
        *,
        beat_s: float,
        seconds: Callable[[], float],
        log: Path | None,
    ) -> None:
        self.actor_id = actor_id
        self.ready = False
        self.dead = ""
        self._broken = ""
        self._settings = settings
        self._seconds = seconds
        self._log = log
        self._progress = 0
        self._out: dict[int, _Out] = {}
        self._start_by_s = seconds() + settings.start_timeout_s
        self._ready_s = 0.0
        self._broken_s = seconds()
        self._ended_s = 0.0
        self._kill_by_s = 0.0
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _start(theirs.fileno(), log)
        self.channel = Channel(ours)
        self.channel.send(
            Hello(
                actor_id=actor_id,
                parent=os.getpid(),
                call_timeout_s=settings.call_timeout_s,
                max_hung=settings.max_hung,
                beat_s=beat_s,
                sources=tuple(sources),
            )
        )

    @property
    def pid(self) -> int:
        """Process id, also that of its process group."""
        return self._process.pid

    @property
    def broken(self) -> str:
        """Why no further call should go here; empty where one may."""
        return self.dead or self._broken

    def ask(self, ticket: int, call: Call) -> None:
        """Send a call; its answer comes by :meth:`answers`, unless the process dies. Raises ValueError where it is too long."""
        self.channel.send(Asked(ticket=ticket, call=call))
        self._out[ticket] = _Out(call, self._seconds())

    def forget(self, ticket: int) -> None:
        """Wait no longer for the answer to a call."""
        self._out.pop(ticket, None)

    def given_up(self) -> list[Call]:
        """Take the calls that are with the process out of its hands and return them."""
        calls = [out.call for out in self._out.values()]
        self._out.clear()
        return calls

    def state(self, actor_group: str) -> ActorState:
        """Return how the actor stands; where it is broken it has one call more, so that it is never without work. Until it is
        ready, which has a deadline of its own, it has none."""
        since = [out.since_s for out in self._out.values()] if self.ready else []
        if self.broken:
            since.append(self._broken_s)
        return ActorState(
            actor_id=self.actor_id,
            actor_group=actor_group,
            progress=self._progress,
            calls=len(since),
            since_s=min(since, default=None),
            broken=self.broken,
        )

    def answers(self) -> list[Reply]:
        """Take what the process has said, and return the replies somebody waits for; see whether it is alive."""
        if self.dead:
            return []
        self.channel.flush()
        replies = []
        for said in self.channel.receive():
            if isinstance(said, Answered):
                self._progress += 1
                out = self._out.pop(said.ticket, None)
                if out is not None and _answers(said.reply, out.call):
                    replies.append(said.reply)
                elif out is not None:
                    self._out[said.ticket] = out
                    self.channel.fault = f"an answer to another call: {said.reply!r:.200}"
            elif isinstance(said, Beat):
                self._broken = said.broken
            elif isinstance(said, Ready):
                self.ready, self._ready_s = True, self._seconds()
            elif isinstance(said, Unfit):
                self.dead = f"{self.actor_id} is not fit: {said.reason}"
        self._look()
        if not self.broken:
            self._broken_s = self._seconds()
        return replies

    def end(self, *, stacks: bool) -> None:
        """Ask the process to end; :meth:`gone` kills it where it doesn't. With ``stacks`` it is asked for these first."""
        if stacks and self.ready and not self._exited():
            os.kill(self.pid, STACKS_SIGNAL)
        self.channel.close()
        self.dead = self.dead or f"{self.actor_id} was ended"
        self._kill_by_s = self._seconds() + GRACE_S

    def gone(self, *, kill: bool = False) -> bool:
        """Whether the process has ended, after :meth:`end`; kills it where its grace is over, or at once with ``kill``.

        What it started and left behind is killed too.
        """
        if kill or self._exited() or self._seconds() >= self._kill_by_s:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return self._exited() and self._process.wait(0) is not None

    def _exited(self) -> bool:
        """Whether it has ended; where it has, its id is kept from being used again until somebody waits for it."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _look(self) -> None:
        """See whether the process is as it should be; if not, ``dead`` says why."""
        now_s, channel = self._seconds(), self.channel
        oldest = next(iter(self._out.values()), None)
        if self.dead:
            return
        if channel.fault:
            self.dead = f"{self.actor_id} sent what is no message of it: {channel.fault}"
        elif channel.ended:
            self._ended_s = self._ended_s or now_s
            if self._exited() or now_s >= self._ended_s + _EXIT_S:
                self.dead = self._death()
        elif not self.ready and now_s >= self._start_by_s:
            self.dead = (
                f"{self.actor_id} had no environments ready after {self._settings.start_timeout_s:g} s "
                f"(actors.start_timeout_s){self._see()}"
            )
        elif oldest is not None and self.ready:
            waited_s = now_s - max(oldest.since_s, self._ready_s)
            if waited_s >= self._settings.call_timeout_s + LATE_S:
                call = oldest.call
                self.dead = (
                    f"{self.actor_id} stands still: {waited_s:.0f} s after the {call.kind} of attempt {call.attempt_id} "
                    f"in environment {call.environment!r} it has neither answered nor said that it hangs{self._see()}"
                )

    def _death(self) -> str:
        code = self._process.wait(_EXIT_S) if self._exited() else None
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        else:
            how = f"ended with exit status {code}"
        names = sorted({out.call.environment for out in self._out.values()})
        doing = f" with {len(self._out)} calls under way in {', '.join(names)}" if names else ""
        return f"the process of {self.actor_id} {how}{doing}{self._see()}"

    def _see(self) -> str:
        return "" if self._log is None else f"; see logs/{self._log.name}"


def _start(connection: int, log: Path | None) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(connection), str(os.getpid())]
    with contextlib.ExitStack() as stack:
        output = None if log is None else stack.enter_context(log.open("ab"))
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=output,
            pass_fds=(connection,),
            start_new_session=True,  # Ctrl-C is the parent's; and all that it starts can be killed with it
        )


def _answers(reply: Reply, call: Call) -> bool:
    return (reply.kind, reply.attempt_id) == (call.kind, call.attempt_id)
