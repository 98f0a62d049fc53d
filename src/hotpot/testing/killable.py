"""A store in a process of its own that obeys commands and can be killed anywhere: for tests of what a crash leaves.

::

    test ──command──► pipe ──► process: ExperienceStore ──► run folder, lake
      ▲                 │
      └──answer, Died───┘

The trajectories are those of :mod:`hotpot.testing.records`, so commands carry numbers only: issue ``i`` is one task with
a group of trajectories. Processes are forked from a server that has imported everything, so that one costs some
milliseconds. Owns no expectation; those are in :mod:`hotpot.testing.promises`.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from hotpot.config import StoreSection
from hotpot.errors import HotpotError
from hotpot.experience import ExperienceStore, RunReader
from hotpot.experience.crashpoints import arm, watch
from hotpot.experience.maintenance import compact
from hotpot.testing.records import make_group, make_leases, make_row, make_trajectory
from hotpot.types import (
    ConsumptionRow,
    DiscardReason,
    DiscardRow,
    EvaluationRow,
    EventRow,
    GroupRow,
    LearnedTokensRow,
    MetricRow,
    UpdateRow,
    VersionRow,
)

ANSWER_TIMEOUT_S = 120.0
"""Longest wait for one answer; then the process is killed and the test fails."""

NUM_STEPS = 3
"""Steps of every trajectory."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


class Died(Exception):
    """The process was killed before it answered."""


class Refused(Exception):
    """The command raised an error of Hotpot's in the process; the text names it."""


class KillableWriter:
    """A writer of one run in a process of its own. Commands are the methods of :class:`Commands`, asked by name.

    ``settings`` are the store's. ``environment`` is added to the process's (S3 credentials).
    """

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str = "run",
        settings: StoreSection | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        section = settings or StoreSection(archive_every_batches=2, archive_every_s=0.05)
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(
            target=_serve,
            args=(theirs, str(folder), run_id, section.model_dump_json(), dict(environment)),
            daemon=True,
        )
        self._process.start()
        theirs.close()

    def ask(self, command: str, **arguments: Any) -> Any:
        """Return the answer to one command.

        Raises :class:`Died` where the process was killed meanwhile, :class:`Refused` where the command raised, and
        TimeoutError where there is no answer.
        """
        try:
            self._pipe.send((command, arguments))
            if not self._pipe.poll(ANSWER_TIMEOUT_S):
                self.kill()
                raise TimeoutError(
                    f"no answer to {command} within {ANSWER_TIMEOUT_S} s; the process was killed"
                )
            good, answer = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            self.kill()
            raise Died(command) from error
        if not good:
            raise Refused(answer)
        return answer

    def send(self, command: str, **arguments: Any) -> None:
        """Send a command without waiting for its answer, for a kill in the middle of it."""
        with contextlib.suppress(ConnectionError):
            self._pipe.send((command, arguments))

    def kill(self) -> None:
        """Kill the process and wait until it is gone. May be called twice."""
        if self._process.pid is not None and self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(ANSWER_TIMEOUT_S)
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Commands:
    """What a :class:`KillableWriter` can be asked; runs in its process."""

    def __init__(self, folder: Path, run_id: str, settings: StoreSection) -> None:
        self._folder, self._run_id, self._settings = folder, run_id, settings
        self._store: ExperienceStore | None = None

    @property
    def store(self) -> ExperienceStore:
        """The open store."""
        if self._store is None:
            raise RuntimeError("ask open first")
        return self._store

    def open(self) -> dict[str, int]:
        """Open or take over the run; return the ledger's marks."""
        resume = (self._folder / "manifest.json").exists()
        self._store = ExperienceStore.open(
            self._folder, run_id=self._run_id, settings=self._settings, vocabulary_size=64, resume=resume
        )
        return {name: self.store.ledger.mark(name) for name in ("issue", "update")}

    def arm(self, place: str, count: int = 1) -> None:
        """Die at the ``count``-th passing of ``place``."""
        arm(place, count)

    def watch(self) -> list[str]:
        """Begin to note crash points, or return those passed since."""
        return sorted(watch())

    def lease(self, issue: int, size: int) -> None:
        """Lease the attempts of a group."""
        self.store.ledger.advance("issue", issue)
        self.store.ledger.lease(make_leases(self._group(issue, size)))

    def append(self, issue: int, first: int, count: int, broken: int = 0) -> tuple[list[str], int]:
        """Append members ``first`` .. ``first + count`` of the group, the last ``broken`` of them with a wrong sum of
        rewards; return the accepted ids and how many were refused."""
        members = self._group(issue, first + count)[first:]
        for place in range(count - broken, count):
            row = members[place].row
            members[place] = replace(members[place], row=replace(row, reward=row.reward + 1.0))
        report = self.store.append(members)
        return list(report.accepted), len(report.quarantined)

    def end(self, issue: int, sample: int, state: str) -> None:
        """End an attempt as ``failed`` or ``dropped``."""
        attempt = make_trajectory(run_id=self._run_id, issue=issue, sample=sample).row.attempt_id
        ending: Callable[[str, str], None] = getattr(
            self.store.ledger, {"failed": "fail", "dropped": "drop"}[state]
        )
        ending(attempt, "asked")

    def learn(self, update: int, ids: list[str]) -> None:
        """Record an update that consumes ``ids``, with rows of every table an update writes."""
        self.store.ledger.advance("update", update)
        own = {"run_id": self._run_id, "update": update}
        self.store.record_update(
            make_row(UpdateRow, num_trajectories=len(ids), **own),
            [make_row(GroupRow, **own)],
            [make_row(LearnedTokensRow, trajectory_id=one, **own) for one in ids],
            [make_row(ConsumptionRow, trajectory_id=one, **own) for one in ids],
            [make_row(MetricRow, name="m", **own)],
        )

    def discard(self, ids: list[str]) -> None:
        """Discard finished trajectories."""
        own = {"run_id": self._run_id, "reason": DiscardReason.STALE.value}
        self.store.discard([make_row(DiscardRow, trajectory_id=one, **own) for one in ids])

    def note(self, number: int) -> None:
        """Record rows of the tables that come with neither trajectories nor updates."""
        own = {"run_id": self._run_id}
        self.store.record(
            [
                make_row(EventRow, kind="noted", detail=f'{{"number":{number}}}', **own),
                make_row(EvaluationRow, evaluation=number, **own),
                make_row(VersionRow, kind="policy", version=str(number + 1), **own),
            ]
        )

    def flush(self) -> None:
        """Wait until everything is in the lake."""
        self.store.flush()

    def close(self) -> None:
        """End the run in order."""
        self.store.close()
        self._store = None

    def compact(self) -> None:
        """Compact the run's part of the lake; needs no :meth:`open`, and may go on beside the writer's process."""
        compact(RunReader.open(self._folder))

    def _group(self, issue: int, size: int) -> list[Any]:
        return make_group(run_id=self._run_id, issue=issue, size=size, num_steps=NUM_STEPS)


def _serve(pipe: Connection, folder: str, run_id: str, settings: str, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    commands = Commands(Path(folder), run_id, StoreSection.model_validate_json(settings))
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = (True, getattr(commands, name)(**arguments))
        except HotpotError as error:
            answer = (False, f"{type(error).__name__}: {error}")
        pipe.send(answer)
