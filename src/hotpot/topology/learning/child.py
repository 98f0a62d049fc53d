"""The learner's process: builds the learner of a run, learns what it is given, and writes weights where both can see them.

::

    parent ──Work, Save──► box ──► learner ──► weights in the buffer that was not written last ──► Done, Saved, Failure ──► parent
           one byte: look                └──► progress: every pass of a model, every optimiser step        one byte: look

Owns the life of the process: it ends when its parent does, or closes the channel, and not by Ctrl-C or SIGTERM, which are for
the parent to hear. What the learner raises is told; anything else ends the process, and its traceback stands in its log.
"""

import faulthandler
import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from hotpot.config.load import build_recipe
from hotpot.experience.crashpoints import reach
from hotpot.learner import Learner
from hotpot.models import checksum, keep_freed_memory, seldom_collected, use_threads
from hotpot.topology.learning.memory import Box, Progress, WeightBuffers
from hotpot.topology.learning.parcels import Done, Failure, Save, Saved, describe
from hotpot.topology.learning.protocol import TOLD, Learned, Work
from hotpot.topology.parts.ingredients import read_model
from hotpot.topology.parts.learners import make_learner


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the process begins with: settings, folders, and the descriptors it was given.

    ``recipe`` is the recipe as JSON; ``source`` the checkpoint to go on from and ``first`` the run's first one, where there
    are any.
    """

    recipe: str
    source: str | None
    first: str | None
    num_threads: int
    lost_updates: int
    channel: int
    work: int
    outcomes: int
    progress: int
    weights: int

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, file: TextIO) -> "Start":
        """Return what :meth:`to_json` wrote into ``file``."""
        return cls(**json.load(file))


def main() -> None:
    """Be the learner's process, and end it; what it begins with stands on the standard input."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    code = 1
    try:
        _run(Start.read(sys.stdin))
        code = 0
    except BaseException:  # noqa: BLE001 - the traceback goes to the log, and the process ends here
        sys.excepthook(*sys.exc_info())
    finally:
        # At once: the interpreter takes its time to clear up, and whoever waits would think that it hangs.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(start: Start) -> None:
    keep_freed_memory()
    use_threads(start.num_threads)
    channel, outcomes = socket.socket(fileno=start.channel), Box(start.outcomes)
    try:
        with seldom_collected():
            _serve(start, channel, outcomes)
    except ConnectionError:  # nobody is there to be told
        return
    except TOLD as error:
        outcomes.put(describe(error))
        channel.send(b"!")


def _serve(start: Start, channel: socket.socket, outcomes: Box) -> None:
    """Build the learner and do what is asked of it until the channel is closed."""
    work, progress = Box(start.work), Progress(start.progress)
    learner = _build(start)
    progress.count()
    learner.watch(progress.count)
    pupil = _Pupil(learner, WeightBuffers.make(start.weights, learner.weights()), progress)
    reach("learner_built")
    while channel.recv(1):
        outcomes.put(pupil.do(work.take()))
        reach("learner_answers")
        channel.send(b"!")


def _build(start: Start) -> Learner:
    recipe = build_recipe(json.loads(start.recipe), [], origin="the recipe of the run")
    source, first = (None if name is None else Path(name) for name in (start.source, start.first))
    learner = make_learner(recipe, read_model(recipe, model=source, first=first), source)
    learner.lost_updates = start.lost_updates
    return learner


class _Pupil:
    """Does one thing at a time with the learner; ``_next`` is the buffer that was not written last."""

    def __init__(self, learner: Learner, buffers: WeightBuffers, progress: Progress) -> None:
        self._learner, self._buffers, self._progress = learner, buffers, progress
        self._next = 0

    def do(self, order: Any) -> Done | Saved | Failure:
        """Return what came of ``order``."""
        try:
            return self._save(order) if isinstance(order, Save) else self._learn(order)
        except TOLD as error:
            return describe(error)
        finally:
            self._progress.count()

    def _learn(self, work: Work) -> Done:
        reach("learning_began")
        began = time.perf_counter()
        result = self._learner.update(
            work.sequences, update=work.update, policy_version=work.policy_version, peers=work.peers
        )
        reach("learning_ended")
        weights, buffer = self._learner.weights(), self._next
        self._buffers.write(buffer, weights)
        self._next = 1 - buffer
        # Of what was copied, not of the copy: whoever publishes compares.
        made = checksum(weights)
        reach("weights_written")
        learned = Learned(result=result, seconds=time.perf_counter() - began, checksum=made)
        return Done(learned=learned, buffer=buffer)

    def _save(self, order: Save) -> Saved:
        self._learner.save(order.folder, order.files, order.run)
        reach("learner_saved")
        return Saved(folder=order.folder)
