"""A flow whose moves a test makes one by one: a wired run, a learner that takes its time, a clock that is told the time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from hotpot.config import Recipe
from hotpot.topology import flow
from hotpot.topology.learning.inline import InlineLearning
from hotpot.topology.learning.protocol import Learned, Work
from hotpot.topology.session import Session
from hotpot.topology.supervision.stopping import StopSignal
from hotpot.topology.wiring import wire

QUICK = ("run.self_test=false", "evaluation.every_updates=0", "evaluation.num_tasks_final=2", "evaluation.greedy=false", "run.trace=false", "checkpoint.every_updates=0")  # fmt: skip
"""Settings of a run that measures next to nothing."""

LOOSE = ("run.deterministic=false", "run.threads=1", "topology.serial=false")
"""Settings of a run whose decisions hang on the clock."""


class SlowLearning:
    """Learns here and now, and keeps what came of it to itself for ``polls`` polls; None: for ever."""

    def __init__(self, session: Session, polls: int | None) -> None:
        self._inner = InlineLearning(session.learner, num_threads=1)
        self._polls, self._left = polls, 0
        self.begun: list[Work | Path] = []
        self.on_poll = lambda: None

    @property
    def busy(self) -> bool:
        return self._inner.busy

    def begin(self, work: Work) -> None:
        self._inner.begin(work)
        self._keep(work)

    def begin_save(self, folder: Path, files: Mapping[str, bytes], run: Mapping[str, Any]) -> None:
        self._inner.begin_save(folder, files, run)
        self._keep(folder)

    def poll(self, timeout_s: float = 0.0) -> Learned | Path | None:
        self.on_poll()
        if self.busy and (self._polls is None or self._left > 0):
            self._left -= 1
            return None
        return self._inner.poll(timeout_s)

    def weights(self) -> Any:
        return self._inner.weights()

    def beat(self) -> tuple[int, float]:
        return self._inner.beat()

    def close(self) -> None:
        self._inner.close()

    def _keep(self, what: Work | Path) -> None:
        self.begun.append(what)
        self._left = self._polls or 0


class Seconds:
    """The flow's clock: stands still until it is moved."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        patch.setattr(flow, "time", SimpleNamespace(monotonic=lambda: self.now_s))


@contextmanager
def wired(recipe: Recipe, *, polls: int | None = 0) -> Iterator[tuple[Session, SlowLearning]]:
    """Yield the session of a new run, with the checkpoint it begins at, and who learns in it."""
    stop = StopSignal()
    folder = recipe.run.folder / "run"
    console = Console(quiet=True)
    with wire(recipe, run_id="run", folder=folder, resume=None, console=console, stop=stop) as session:
        session.timeline.start()
        session.checkpoint()
        learning = SlowLearning(session, polls)
        session.make_learning = lambda: learning
        yield session, learning
