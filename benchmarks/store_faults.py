"""``make bench-store-faults``: what is left after the writer is killed at every named place, again and again.

Each scenario is one run: its writer is killed at three places in a row, taken over after each, and at last ended in
order. Beside it, on the same lake, a second run is written (and killed at random moments) and a third process compacts
without pause (and is killed at its own places). After every death a reader compares the run with the model of what was
promised (``hotpot.testing.promises``); at rest the raw Delta tables are compared too.

Environment: ``HITS`` (times each place is hit on a local lake, default 5), ``S3_HITS`` (on an object server, default 2).
Exit code 1 where anything is lost, double or torn, or a place was not hit as often as asked.
"""

import itertools
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hotpot.config import StoreSection
from hotpot.testing.killable import Died, KillableWriter
from hotpot.testing.promises import Violations
from hotpot.testing.tracked import TrackedRun

MOST_ROUNDS = 60
"""Rounds in which an armed place must be reached."""


@dataclass(slots=True)
class Tally:
    """What the scenarios came to."""

    kills: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    found: Violations = field(default_factory=Violations)
    missed: list[str] = field(default_factory=list)

    def add(self, found: Violations, where: str) -> None:
        """Take over what a check found."""
        for name in ("lost", "duplicated", "torn", "other"):
            getattr(self.found, name).extend(f"{where}: {text}" for text in getattr(found, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Where the lakes lie: a prefix for their URIs, S3 settings, and the environment with the credentials."""

    name: str
    prefix: str
    settings: dict[str, object]
    environment: dict[str, str]


def scenario(storage: Storage, places: list[str], seed: int, tally: Tally) -> None:
    """Kill one run's writer at ``places``, one after the other, beside a second writer and a compaction."""
    home = Path(tempfile.mkdtemp(prefix="hotpot-faults-"))
    chance = random.Random(seed)
    section = StoreSection.model_validate(
        {
            "archive_every_batches": 2,
            "archive_every_s": 0.05,
            "lake": f"{storage.prefix or home}/lake-{seed}",
            **storage.settings,
        }
    )
    try:
        first = TrackedRun(home / "one", run_id="one", settings=section, environment=storage.environment)
        with beside(home, section, storage, chance, tally):
            for place in places:
                die_at(first, place, chance, tally)
                tally.add(first.check(at_rest=False), f"{storage.name} {place}")
            first.start()
            first.round()
            first.close()
            tally.add(first.check(at_rest=True), f"{storage.name} at rest")
    finally:
        shutil.rmtree(home, ignore_errors=True)


def die_at(run: TrackedRun, place: str, chance: random.Random, tally: Tally) -> None:
    """Start the run and write until ``place`` kills it."""
    count = 1 if place.startswith(("recover", "compact")) else chance.randint(1, 3)
    alive = run.start(crash_at=(place, count))
    for _ in range(MOST_ROUNDS):
        if not alive:
            break
        alive = run.round()
    if alive:
        tally.missed.append(place)
        run.kill()
    else:
        tally.hits[place] += 1
    tally.kills += 1


@contextmanager
def beside(
    home: Path, section: StoreSection, storage: Storage, chance: random.Random, tally: Tally
) -> Iterator[None]:
    """Write a second run and compact the lake until the block ends; then end and check the second run."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def guarded(work: object) -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001 - raised below, in the main thread
            errors.append(error)

    def write() -> None:
        second = TrackedRun(home / "two", run_id="two", settings=section, environment=storage.environment)
        own = random.Random(chance.random())
        while not stop.is_set():
            second.start()
            for _ in range(own.randint(1, 8)):
                second.round()
            second.kill()
            tally.kills += 1
            tally.add(second.check(at_rest=False), f"{storage.name} second writer")
        second.start()
        second.close()
        tally.add(second.check(at_rest=True), f"{storage.name} second writer at rest")

    threads = [threading.Thread(target=guarded, args=(write,))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def known_places(storage: Storage) -> list[str]:
    """Return every place a run passes: opening, working, archiving, being taken over."""
    home = Path(tempfile.mkdtemp(prefix="hotpot-faults-"))
    section = StoreSection.model_validate(
        {"archive_every_batches": 2, "archive_every_s": 0.05, "lake": f"{storage.prefix or home}/lake-places", **storage.settings}
    )
    try:
        run = TrackedRun(home / "one", run_id="one", settings=section, environment=storage.environment)
        passed: set[str] = set()
        for crash in (("lake_after_steps", 2), ("wal_written", 9), None):
            run.start(watch=True)
            if crash:
                run.arm(*crash)
            while run.round():
                passed |= set(run.passed())
                if crash is None:
                    break
        run.flush()
        passed |= set(run.passed())
        run.close()
        return sorted(passed)
    finally:
        shutil.rmtree(home, ignore_errors=True)
