"""The process that the kill tests end: the real command line on the coin environment, saying what was acknowledged.

usage: topology_kill_worker.py WHERE:COUNT:SIGNAL|never ARGUMENTS...

Lines on standard output: ``kept ID...`` after an append returned, ``learned N`` after an update was recorded, and
whatever the command prints. The process sends itself SIGNAL the COUNT-th time it gets to WHERE; where that is ``hang``, it hangs
there.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from coin_recipe import use_coin

from hotpot.cli.main import main
from hotpot.experience import ExperienceStore, Ledger
from hotpot.learner import Learner
from hotpot.rollout import TaskSampler
from hotpot.topology.collecting import intake
from hotpot.topology.resume import checkpoints
from hotpot.topology.session import Session

where, count, number = sys.argv[1].split(":") if sys.argv[1] != "never" else ("", "0", "0")
left = int(count)


def reach(place: str) -> None:
    global left  # noqa: PLW0603 - a counter of the process
    if place == where:
        left -= 1
        if left == 0:
            if number == "hang":
                time.sleep(3600)
            os.kill(os.getpid(), int(number))


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def wrap(
    owner: Any, name: str, before: Callable[..., None] | None, after: Callable[..., None] | None
) -> None:
    inner = getattr(owner, name)

    def outer(*arguments: Any, **named: Any) -> Any:
        if before is not None:
            before(*arguments, **named)
        found = inner(*arguments, **named)
        if after is not None:
            after(found, *arguments, **named)
        return found

    setattr(owner, name, outer)


def appended(report: Any, _store: Any, trajectories: Any) -> None:
    say("kept", *report.accepted)
    training = trajectories[0].row.purpose == "training"
    reach("collecting" if training else "evaluating")


def recorded(_nothing: Any, _store: Any, update: Any, *_rest: Any) -> None:
    say("learned", update.update)
    reach("recorded")


def applying(
    _ledger: Any,
    _position: Any,
    _attempts: Any,
    _consumptions: Any = (),
    update: int | None = None,
    _discards: Any = (),
) -> None:
    if update is not None:
        reach("logged")


use_coin(pytest.MonkeyPatch())
intake.CHUNK = 3
wrap(Ledger, "__init__", None, lambda *_, **__: reach("opened"))
wrap(ExperienceStore, "append", None, appended)
wrap(ExperienceStore, "record_update", lambda *_: reach("recording"), recorded)
wrap(Ledger, "apply", applying, None)
wrap(Ledger, "not_logged", lambda *_: reach("asking"), None)
wrap(TaskSampler, "issue", None, lambda *_: reach("issued"))
wrap(Session, "learn", None, lambda *_: reach("learned"))
wrap(Session, "publish", None, lambda *_: reach("published"))
wrap(Session, "evaluate", None, lambda *_: reach("evaluated"))
wrap(Learner, "load", None, lambda *_: reach("loaded"))
wrap(Learner, "save", None, lambda *_: reach("saving"))
wrap(checkpoints.shutil, "rmtree", None, lambda *_: reach("pruned"))
say("begun")
sys.argv = ["hotpot", *sys.argv[2:]]
main()
