"""What came of a case: it ended well, or it stopped and said who it was; and whether the ledger balances.

Pure but for reading run folders.
"""

import json
import re
import signal
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from enum import StrEnum
from pathlib import Path

from faults_parts.cases import Case
from faults_parts.runs import UPDATES, Ended
from hotpot.experience import RunReader
from hotpot.testing.faults import EXIT_CODE, Kind
from hotpot.types import TABLES


class Verdict(StrEnum):
    """How one process of a case came out."""

    ENDED_WELL = "ended_well"
    """Exit code 0, all updates recorded."""
    STOPPED = "stopped_with_culprit"
    """It stopped, and named the part where the fault lay; or the fault was that it was killed."""
    HUNG = "hung"
    """The outer deadline killed it."""
    UNNAMED = "stopped_unnamed"
    """It stopped, and what it said names another part or none."""


_OWN_WORDS = re.compile(r"injected: [a-z_]+ at [a-z_]+:\d+")
_LAST = re.compile(
    r"^(failed:|error:|hotpot: no progress|(?<! process:\n)Traceback \(most recent)", re.MULTILINE
)
"""How a message begins. A traceback that is quoted belongs to the one before: "In the learner's process:" stands above it."""
_ENDS = {Kind.KILL.value: -signal.SIGKILL, Kind.EXIT.value: EXIT_CODE}


def verdict(ended: Ended, case: Case, run: Path) -> Verdict:
    """Judge one process."""
    if ended.code is None:
        return Verdict.HUNG
    if ended.code == 0:
        return Verdict.ENDED_WELL if num_updates(run) >= UPDATES else Verdict.UNNAMED
    if any(_ENDS.get(bite.kind) == ended.code for bite in ended.bites):
        return Verdict.STOPPED
    # The injector's own words don't count as naming anything.
    said = _OWN_WORDS.sub("", f"{last_words(ended.output)}\n{watchdog(run)}").lower()
    return Verdict.STOPPED if any(word in said for word in case.culprits) else Verdict.UNNAMED


def last_words(output: str) -> str:
    """Return what a process said of its end: the message, or the last traceback with what it quotes of another process."""
    starts = [found.start() for found in _LAST.finditer(output)]
    return output[starts[-1] :] if starts else output[-2000:]


def watchdog(run: Path) -> str:
    """Return what the watchdog left of the run's end."""
    path = run / "logs" / "watchdog.json"
    if not path.is_file():
        return ""
    told = json.loads(path.read_text(encoding="utf-8"))
    for name in ("stacks", "children"):  # they name everything that the run has
        told.pop(name, None)
    return json.dumps(told)


def num_updates(run: Path) -> int:
    """Return how many updates are recorded; 0 where there is no run."""
    if not (run / "manifest.json").is_file():
        return 0
    return RunReader.open(run).table("updates", ["update"]).num_rows


def imbalance(run: Path, *, may_wait: bool) -> list[str]:
    """Return what does not balance on the ledger of a run that has been closed: one line for each thing.

    ``may_wait``: trajectories may be left over that no update collected and nothing discarded.
    """
    with closing(
        sqlite3.connect(f"{(run / 'control.sqlite').absolute().as_uri()}?mode=ro", uri=True)
    ) as ledger:
        attempts = ledger.execute("SELECT attempt_id, state, purpose FROM attempts").fetchall()
        consumed = [row[0] for row in ledger.execute("SELECT DISTINCT trajectory_id FROM consumptions")]
    reader = RunReader.open(run)
    stored = reader.table("trajectories", ["trajectory_id", "purpose"]).to_pylist()
    updates = reader.table("updates", ["update", "collected_trajectories"]).to_pylist()
    collected = [name for row in updates for name in row["collected_trajectories"]]
    discarded = _discarded(reader)
    finished = {name for name, state, _ in attempts if state == "finished"}
    training = {name for name, state, purpose in attempts if state == "finished" and purpose == "training"}
    found = [f"attempt {name} is still leased" for name, state, _ in attempts if state == "leased"]
    found += _doubled("trajectory stored", [row["trajectory_id"] for row in stored])
    found += _doubled("trajectory collected", collected)
    found += _doubled("trajectory discarded", discarded)
    found += _doubled("update", [row["update"] for row in updates])
    on_record = {row["trajectory_id"] for row in stored}
    found += [f"{name} is finished and not on record" for name in sorted(finished - on_record)]
    found += [f"{name} is on record and not finished" for name in sorted(on_record - finished)]
    found += [f"{name} is collected and not finished" for name in sorted(set(collected) - training)]
    found += [f"{name} is consumed and not on record" for name in sorted(set(consumed) - on_record)]
    found += [f"{name} is collected and discarded" for name in sorted(set(collected) & set(discarded))]
    if not may_wait:
        waiting = training - set(collected) - set(discarded)
        found += [f"{name} is finished, and neither collected nor discarded" for name in sorted(waiting)]
    return found


def _discarded(reader: RunReader) -> list[str]:
    if "discards" not in TABLES:
        return []
    return [row["trajectory_id"] for row in reader.table("discards", ["trajectory_id"]).to_pylist()]


def _doubled(what: str, names: Sequence[object]) -> list[str]:
    return [f"{what} {count} times: {name}" for name, count in Counter(names).items() if count > 1]
