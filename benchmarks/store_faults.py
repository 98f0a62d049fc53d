"""``make bench-store-faults``: what is left after the writer is killed at every named place, again and again.

Each scenario is one run: its writer is killed at three places in a row, taken over after each, and at last ended in
order. Beside it, on the same lake, a second run is written (and killed at random moments), and a third process compacts
the first run without pause (and is killed at places of its own). After every death a reader compares the run with the
model of what was promised (``hotpot.testing.promises``); at rest the raw Delta tables are compared too, through no code
of Hotpot's.

Environment: ``HITS`` (times each place is hit on a local lake, default 5), ``S3_HITS`` (on an object server, default 2;
0 leaves it out), ``SEED``, ``PLACES`` (only these, with commas between). Exit code 1 where anything is lost, double or
torn, a place was not hit as often as asked, or there were fewer than 200 kills at the defaults.
"""

import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from hotpot.config import StoreSection
from hotpot.testing.killable import Died, KillableWriter
from hotpot.testing.object_server import BUCKET, object_server
from hotpot.testing.promises import Violations
from hotpot.testing.tracked import TrackedRun
from hotpot.types import TABLES

MOST_ROUNDS = 60
"""Rounds in which an armed place must be reached."""

CHAIN = 3
"""Places at which one run is killed, one after the other."""

LEADS_TO = {"recovery_deleted": "after_watermark"}
"""Places that are passed only where the owner before died at another one: there the log still has what the lake holds."""

COMPACTION = ("compact_before", "compact_written", "compact_after")
"""Places of the compacting process."""


@dataclass(slots=True)
class Tally:
    """What the scenarios came to. ``kills`` of any process, ``hits`` of each named place."""

    kills: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    found: Violations = field(default_factory=Violations)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def killed(self, place: str | None = None) -> None:
        """Count a kill, and the place where it was a named one."""
        with self.guard:
            self.kills += 1
            if place is not None:
                self.hits[place] += 1

    def add(self, found: Violations, where: str) -> None:
        """Take over what a check found."""
        with self.guard:
            for name in ("lost", "duplicated", "torn", "other"):
                getattr(self.found, name).extend(f"{where}: {text}" for text in getattr(found, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Where the lakes lie: a prefix of their addresses (empty: beside the run), S3 settings, the credentials."""

    name: str
    prefix: str = ""
    s3: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def section(self, home: Path, lake: str) -> StoreSection:
        """Return the settings of a store whose lake lies here."""
        return StoreSection.model_validate(
            {
                "archive_every_batches": 2,
                "archive_every_s": 0.05,
                "lake": f"{self.prefix or home}/{lake}",
                "s3": self.s3,
            }
        )


def scenario(storage: Storage, places: list[str], seed: int, tally: Tally) -> None:
    """Kill one run's writer at ``places``, one after the other, beside a second writer and a compaction."""
    home = Path(tempfile.mkdtemp(prefix="hotpot-faults-"))
    chance = random.Random(seed)
    section = storage.section(home, f"lake-{seed}")
    try:
        first = TrackedRun(home / "one", run_id="one", settings=section, environment=storage.environment)
        second = TrackedRun(home / "two", run_id="two", settings=section, environment=storage.environment)
        first.start()
        first.round()
        first.kill()
        tally.killed()
        stop = threading.Event()
        works = (
            lambda: write_on(second, stop, random.Random(seed + 1), storage, tally),
            lambda: compact_on(first, stop, random.Random(seed + 2), tally),
        )
        with beside(works, stop):
            for place in places:
                die_at(first, place, chance, tally)
                tally.add(first.check(at_rest=False), f"{storage.name}, seed {seed}, after {place}")
        finish(first, section, storage, seed, tally)
        finish(second, section, storage, seed, tally)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def die_at(run: TrackedRun, place: str, chance: random.Random, tally: Tally) -> None:
    """Take the run over and write until ``place`` kills the process; else kill it after the last round."""
    if place in LEADS_TO:
        die_at(run, LEADS_TO[place], chance, tally)
    count = 1 if place.startswith("recover") else chance.randint(1, 3)
    alive = run.start(crash_at=(place, count))
    for _ in range(MOST_ROUNDS):
        if not alive:
            break
        alive = run.round()
    tally.killed(None if alive else place)
    run.kill()


def finish(run: TrackedRun, section: StoreSection, storage: Storage, seed: int, tally: Tally) -> None:
    """Take the run over a last time, end it in order, and check it through Hotpot and through Delta alone."""
    where = f"{storage.name}, seed {seed}, run {run.run_id} at rest"
    run.start()
    run.round()
    run.close()
    tally.add(run.check(at_rest=True), where)
    tally.add(run.promises.check(raw(section, storage, run.run_id), at_rest=True), f"{where}, raw")


def raw(section: StoreSection, storage: Storage, run_id: str) -> Callable[[str], list[dict[str, Any]]]:
    """Return what answers a SELECT over one run's rows in the raw Delta tables, read by deltalake alone."""
    options = {"aws_conditional_put": "etag", **storage.environment} if storage.prefix else None
    database = duckdb.connect(":memory:")
    for name in TABLES:
        try:
            table = DeltaTable(f"{section.lake}/{name}", storage_options=options)
        except TableNotFoundError:
            continue
        rows = table.to_pyarrow_table(filters=[("_run", "=", run_id)])
        database.register(name, rows)
    return lambda query: database.sql(query).to_arrow_table().to_pylist()


@contextmanager
def beside(works: tuple[Callable[[], None], ...], stop: threading.Event) -> Iterator[None]:
    """Do ``works`` in threads until the block ends; raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
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


def write_on(
    run: TrackedRun, stop: threading.Event, chance: random.Random, storage: Storage, tally: Tally
) -> None:
    """Write a second run, killed at random moments and checked after each."""
    while not stop.is_set():
        run.start()
        for _ in range(chance.randint(1, 8)):
            run.round()
        run.kill()
        tally.killed()
        tally.add(run.check(at_rest=False), f"{storage.name}, second writer")


def compact_on(run: TrackedRun, stop: threading.Event, chance: random.Random, tally: Tally) -> None:
    """Compact ``run`` without pause, killed at places of the compaction."""
    while not stop.is_set():
        place = chance.choice(COMPACTION)
        with KillableWriter(run.folder, run_id=run.run_id, environment=run.environment) as process:
            try:
                process.ask("arm", place=place, count=chance.randint(1, 6))
                for _ in range(20):
                    process.ask("compact")
                    if stop.is_set():
                        return
            except Died:
                tally.killed(place)


def known_places() -> list[str]:
    """Return every place a run passes while it is opened, written, archived and taken over."""
    home = Path(tempfile.mkdtemp(prefix="hotpot-faults-"))
    passed: set[str] = set()
    try:
        run = TrackedRun(home / "one", run_id="one", settings=Storage(name="local").section(home, "lake"))
        for crash in (("lake_after_steps", 2), ("after_watermark", 2), ("wal_written", 9)):
            run.start(watch=True)
            run.round()
            run.flush()
            passed |= set(run.passed())
            run.arm(*crash)
            while run.round():
                pass
        run.start(watch=True)
        run.round()
        run.flush()
        passed |= set(run.passed())
        run.close()
        if run.check(at_rest=True):
            raise AssertionError("the run that lists the places broke a promise")
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return sorted(passed)


def chains(places: list[str], hits: int, chance: random.Random) -> list[list[str]]:
    """Return the places, each ``hits`` times, shuffled and dealt to runs of :data:`CHAIN` deaths."""
    wanted = [place for place in places for _ in range(hits)]
    chance.shuffle(wanted)
    return [wanted[begin : begin + CHAIN] for begin in range(0, len(wanted), CHAIN)]


def run_all(storage: Storage, places: list[str], hits: int, seed: int, tally: Tally) -> None:
    """Run scenarios until every place was hit ``hits`` times on this storage, in at most three passes."""
    chance = random.Random(seed)
    before = Counter(tally.hits)
    for attempt in range(3):
        missing = [place for place in places for _ in range(hits - (tally.hits[place] - before[place]))]
        if not missing:
            return
        chance.shuffle(missing)
        for begin in range(0, len(missing), CHAIN):
            number = seed + 10_000 * attempt + begin
            scenario(storage, missing[begin : begin + CHAIN], number, tally)
            print(
                f"{storage.name}: {tally.kills} kills, {sum(tally.hits.values())} at named places; "
                f"lost {len(tally.found.lost)}, duplicated {len(tally.found.duplicated)}, torn {len(tally.found.torn)}",
                flush=True,
            )


def main() -> None:
    """Run everything and print the line."""
    hits, s3_hits = int(os.environ.get("HITS", "5")), int(os.environ.get("S3_HITS", "2"))
    seed = int(os.environ.get("SEED", "1"))
    begin = time.perf_counter()
    wanted = os.environ.get("PLACES", "")
    places = [place for place in known_places() if not wanted or place in wanted.split(",")]
    tally = Tally()
    run_all(Storage(name="local"), places, hits, 1_000 * seed, tally)
    if s3_hits:
        with ExitStack() as stack:
            server = stack.enter_context(object_server())
            os.environ.update(server.environment)
            storage = Storage(
                name="s3",
                prefix=f"s3://{BUCKET}",
                s3={"endpoint": server.endpoint, "allow_http": True},
                environment=server.environment,
            )
            remote = [
                place
                for place in places
                if place.startswith(("lake", "before_w", "after_w", "log_", "recov"))
            ]
            run_all(storage, remote, s3_hits, 500_000 + 1_000 * seed, tally)
    found = tally.found
    for text in [*found.lost, *found.duplicated, *found.torn, *found.other][:40]:
        print(text)
    asked = places if wanted else [*places, *COMPACTION]
    short = [place for place in asked if tally.hits[place] < hits]
    for place in short:
        print(f"place {place} was hit {tally.hits[place]} times, not {hits}")
    line = {
        "crash_points": len(tally.hits),
        "kills": tally.kills,
        "lost": len(found.lost),
        "duplicated": len(found.duplicated),
        "torn": len(found.torn) + len(found.other),
        "seconds": round(time.perf_counter() - begin, 1),
    }
    print(json.dumps(line))
    few = hits >= 5 and not wanted and tally.kills < 200
    if found or short or few:
        sys.exit(1)


if __name__ == "__main__":
    main()
