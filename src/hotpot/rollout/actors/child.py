"""The program of an actor's process: environments made here, their calls carried out in threads, answers sent back.

Owns the process. Imports no torch. Ends by itself when its parent is gone (the connection ends), and when its own loop
stands still, which means that an environment holds the interpreter: then the stacks of all threads are in its log.
"""

import contextlib
import faulthandler
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hotpot.config import ActorsSection
from hotpot.envs import BoundEnvironment, load_environment
from hotpot.errors import EnvironmentFailure, EnvironmentSpecError
from hotpot.experience.crashpoints import reach
from hotpot.rollout import boundary
from hotpot.rollout.actors.calls import Reply
from hotpot.rollout.actors.channel import Channel
from hotpot.rollout.actors.codec import (
    STACKS_SIGNAL,
    Answered,
    Asked,
    Beat,
    Hello,
    Ready,
    Said,
    Source,
    Unfit,
)
from hotpot.rollout.actors.roster import Roster
from hotpot.rollout.actors.threads import ThreadActors

_STILL_S = 5.0
"""Time beyond a call's deadline that the loop may stand still before the process ends."""


_HELLO_S = 30.0
"""Longest time that the parent may take to say hello."""


def main(connection: int, parent: threading.Event) -> None:
    """Serve the parent at the other end of file descriptor ``connection``, then end the process.

    ``parent``: of :func:`hotpot.orphans.end_with`; set once there may be environments to close when the parent is gone.
    """
    os.dup2(2, 1)  # what environments print must not get among what the run prints
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    reach("actor_begun")
    channel = Channel(socket.socket(fileno=connection))
    hello, *calls = _first(channel) or (None,)
    if isinstance(hello, Hello):
        _serve(channel, hello, calls, parent)
    sys.stderr.flush()
    os._exit(0)  # at once: threads that hang in an environment must not keep the process alive


def _first(channel: Channel) -> list[Said]:
    """Wait for the parent's first messages; there are none where it says nothing, or is gone."""
    said: list[Said] = []
    until_s = time.monotonic() + _HELLO_S
    with selectors.DefaultSelector() as selector:
        selector.register(channel.socket, selectors.EVENT_READ)
        while not said and not channel.ended and time.monotonic() < until_s:
            selector.select(1.0)
            said = channel.receive()
    return said


def _serve(channel: Channel, hello: Hello, calls: Sequence[Said], parent: threading.Event) -> None:
    began_s = time.monotonic()
    try:
        environments = {source.name: _environment(source, hello) for source in hello.sources}
    except (Exception, SystemExit) as error:  # noqa: BLE001 (importing and binding runs users' code; the parent is told)
        reason = str(error) if isinstance(error, EnvironmentSpecError) else boundary.words(error)
        channel.send(Unfit(reason=reason))
    else:
        channel.send(Ready(seconds=time.monotonic() - began_s))
        parent.set()
        _Service(channel, hello, environments).run(calls)


def _environment(source: Source, hello: Hello) -> BoundEnvironment:
    """Make what ``source`` says. Raises EnvironmentSpecError, also where it has another version here than in the parent."""
    environment = load_environment(
        source.kind,
        json.loads(source.params),
        perturbation=source.perturbation,
        allow_unverifiable=source.unverifiable,
    )
    here = (environment.env_version.version, environment.reward_version.version)
    for mine, theirs in zip(here, (source.env_version, source.reward_version), strict=True):
        if mine != theirs:
            raise EnvironmentSpecError(
                f"environment {source.name!r} is version {mine} in {hello.actor_id} and {theirs} in the run: its files or what "
                "it runs on changed since the run began; put them back, or resume the run with what is there now"
            )
    return environment


class _Service:
    """Calls in, answers and beats out, until the parent is gone."""

    def __init__(self, channel: Channel, hello: Hello, environments: Mapping[str, BoundEnvironment]) -> None:
        self._channel = channel
        self._hello = hello
        self._tickets: dict[str, int] = {}  # by attempt: of its last call
        self._beat_due_s = 0.0
        self._woken, self._waker = os.pipe()
        for end in (self._woken, self._waker):
            os.set_blocking(end, False)
        self._actors = ThreadActors(
            {name: environment.make for name, environment in environments.items()},
            ActorsSection(kind="threads", call_timeout_s=hello.call_timeout_s, max_hung=hello.max_hung),
            roster=Roster({"": [hello.actor_id]}),
            notify=self._wake,
        )

    def run(self, calls: Sequence[Said]) -> None:
        """Serve ``calls`` and what comes, until the connection ends."""
        turn_s = min(self._hello.beat_s, self._hello.call_timeout_s / 4)
        channel = self._channel
        self._turn(calls)
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(channel.socket, selectors.EVENT_READ)
            while not (channel.ended or channel.fault) and os.getppid() == self._hello.parent:
                writes = selectors.EVENT_WRITE if channel.unsent else 0
                selector.modify(channel.socket, selectors.EVENT_READ | writes)
                selector.select(turn_s)
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
                channel.flush()
                self._turn(channel.receive())
        self._actors.close()

    def _turn(self, calls: Sequence[Said]) -> None:
        for said in calls:
            if isinstance(said, Asked):
                self._tickets[said.call.attempt_id] = said.ticket
                self._actors.begin(said.call)
        replies = self._actors.ready(0.0)
        for reply in replies:
            self._answer(reply)
        now_s = time.monotonic()
        if now_s >= self._beat_due_s or any(reply.failure for reply in replies):
            self._beat_due_s = now_s + self._hello.beat_s
            self._beat()

    def _answer(self, reply: Reply) -> None:
        ticket = self._tickets.pop(reply.attempt_id)
        try:
            self._channel.send(Answered(ticket=ticket, reply=reply))
        except ValueError as error:  # more than a message can hold
            failure = EnvironmentFailure(f"{reply.kind} returned too much: {error}")
            short = replace(reply, observation=None, result=None, failure=failure)
            self._channel.send(Answered(ticket=ticket, reply=short))

    def _beat(self) -> None:
        """Tell the parent how this actor stands, and put off the end for want of beats."""
        faulthandler.dump_traceback_later(self._hello.call_timeout_s + _STILL_S, exit=True)
        (state,) = self._actors.states()
        if not self._channel.unsent:
            self._channel.send(Beat(progress=state.progress, broken=state.broken))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            os.write(self._waker, b".")
