"""``make bench-faults``: each fault at each named place, in each topology; every run ends well or says who stopped it.

A case is one small run in a process of its own, under an outer deadline, with a plan of faults
(``hotpot.testing.faults``). It ends well (exit code 0, all updates), or stops and names the part where the fault lay; then
it is resumed without faults and has to end well. Afterwards every attempt has ended, and each finished training trajectory
was collected once, discarded, or (not in sync) waits. A case whose fault did not bite shows nothing and counts as wrong.

Controls: a run without faults meets none; one that hangs with nobody watching is found to hang.

Environment: ``CASES`` (beginnings of names, ``engine_step,lake``), ``TOPOLOGIES`` (``sync,async``), ``TIMES`` (default 3),
``SEED``, ``JOBS`` (runs side by side, default 2; twice as many beside them that mostly wait), ``PATIENCE`` (default 1; longer
deadlines on a busy machine), ``CONTROLS`` (0 leaves them out), ``KEEP`` (a folder for the runs, which stay). The last line is
JSON.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from faults_parts import runs
from faults_parts.cases import TOPOLOGIES, Case, chosen
from faults_parts.judge import Verdict, imbalance, last_words, verdict

from hotpot.testing.faults import Fault, Kind

Attempt = tuple[Path, str, Case, int]
"""Folder, topology, case and turn."""


@dataclass(slots=True)
class Tally:
    """What came of all cases; a complaint for each that shows a fault of ours."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    imbalance: int = 0
    not_bitten: int = 0
    not_resumed: int = 0
    survivors: int = 0
    complaints: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one case."""

    words: str
    verdict: Verdict
    bitten: bool
    resumed: bool
    survivors: bool
    unbalanced: tuple[str, ...]
    said: str
    seconds: float


def main() -> int:
    """Run the cases and print what came of them."""
    times, seed = int(os.environ.get("TIMES", "3")), int(os.environ.get("SEED", "0"))
    names = [name for name in os.environ.get("CASES", "").split(",") if name]
    topologies = [name for name in os.environ.get("TOPOLOGIES", ",".join(TOPOLOGIES)).split(",") if name]
    began_s, kept = time.monotonic(), os.environ.get("KEEP")
    shared = Path("/dev/shm")
    base = kept or tempfile.mkdtemp(prefix="hotpot-faults-", dir=shared if shared.is_dir() else None)
    folder, tally = Path(base), Tally()
    try:
        runs.make_model(folder / "model")
        if os.environ.get("CONTROLS", "1") != "0":
            controls(folder, topologies, tally)
        todo = [
            (folder / f"{number}-{turn}", topology, case.at(turn, seed), turn)
            for number, (topology, case) in enumerate(chosen(names, topologies))
            for turn in range(times)
        ]
        for outcome in attempts(folder / "model", todo, keep=bool(kept)):
            count(outcome, tally)
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    report(tally, began_s)
    return 1 if tally.complaints or not tally.verdicts.total() else 0


def attempts(model: Path, todo: Sequence[Attempt], *, keep: bool) -> Iterator[Outcome]:
    """Make all of ``todo`` and yield what came of each as it ends. What mostly waits has places of its own, so that the
    processors don't."""
    jobs = int(os.environ.get("JOBS", "2"))
    with ThreadPoolExecutor(jobs) as busy, ThreadPoolExecutor(2 * jobs) as waiting:
        made = [
            (waiting if case.waits else busy).submit(attempt, model, folder, topology, case, turn, keep=keep)
            for folder, topology, case, turn in todo
        ]
        try:
            for future in as_completed(made):
                yield future.result()
        finally:
            for future in made:
                future.cancel()


def controls(folder: Path, topologies: list[str], tally: Tally) -> None:
    """Show that a run without faults meets none, and that a hang that nobody watches is found."""
    for topology in topologies:
        ended = runs.start(folder / f"plain-{topology}", folder / "model", topology, (), (), 0)
        if ended.code != 0 or ended.bites:
            tally.complaints.append(
                f"control {topology}: {ended.code}, {ended.bites}\n{last_words(ended.output)}"
            )
    if "sync" not in topologies:
        return
    hang = Fault(kind=Kind.HANG, place="environment_step")
    unwatched = ("supervision.stop_after_s=3600", "actors.call_timeout_s=3600")
    before_s, runs.DEADLINE_S = runs.DEADLINE_S, 25.0 * runs.PATIENCE
    ended = runs.start(folder / "unwatched", folder / "model", "sync", (hang,), unwatched, 0)
    runs.DEADLINE_S = before_s
    print(f"control: an unwatched hang {'was' if ended.code is None else 'was NOT'} found", flush=True)
    if ended.code is not None or not ended.bites:
        tally.complaints.append("control: a run that hangs with nobody watching was not found to hang")


def attempt(model: Path, folder: Path, topology: str, case: Case, turn: int, *, keep: bool) -> Outcome:
    """Run one case to its end, take it up again where it stopped, and judge it."""
    began_s = time.monotonic()
    first = runs.start(folder, model, topology, case.faults, case.settings(topology), turn)
    found, bitten, survivors = verdict(first, case, folder / "run"), bool(first.bites), first.survivors
    said = "" if found is Verdict.ENDED_WELL else last_words(first.output)
    if case.on_resume:
        second = runs.resume(folder, case.on_resume, turn, "upgraded")
        found, bitten = verdict(second, case, folder / "run"), bitten and bool(second.bites)
        survivors, said = survivors or second.survivors, last_words(second.output)
    resumed = True
    if found is not Verdict.ENDED_WELL:
        last = runs.resume(folder, (), turn) if (folder / "run" / "manifest.json").is_file() else None
        # What never came to a run folder left nothing to resume; it is started again.
        resumed = last is None or verdict(last, case, folder / "run") is Verdict.ENDED_WELL
        survivors = survivors or (last is not None and last.survivors)
        said += "" if resumed or last is None else f"\n--- the resume: {last_words(last.output)}"
    there = (folder / "run" / "control.sqlite").is_file()
    unbalanced = imbalance(folder / "run", may_wait=topology != "sync") if there and resumed else []
    if not keep:
        shutil.rmtree(folder)
    faults = ", ".join(map(str, case.faults))
    return Outcome(
        words=f"{topology} {case.name} ({faults}; seed {turn})",
        verdict=found,
        bitten=bitten,
        resumed=resumed,
        survivors=survivors,
        unbalanced=tuple(unbalanced),
        said=said,
        seconds=time.monotonic() - began_s,
    )


def count(outcome: Outcome, tally: Tally) -> None:
    """Add one case to the tally, and say what is wrong with it."""
    tally.verdicts[outcome.verdict] += 1
    tally.imbalance += len(outcome.unbalanced)
    tally.not_bitten += not outcome.bitten
    tally.not_resumed += not outcome.resumed
    tally.survivors += outcome.survivors
    wrong = [outcome.verdict.value] if outcome.verdict in (Verdict.HUNG, Verdict.UNNAMED) else []
    wrong += [] if outcome.bitten else ["the fault did not bite"]
    wrong += [] if outcome.resumed else ["it could not be resumed"]
    wrong += ["processes were left behind"] if outcome.survivors else []
    wrong += outcome.unbalanced[:3]
    print(f"{outcome.words}: {outcome.verdict} in {outcome.seconds:.1f} s {'; '.join(wrong)}", flush=True)
    if wrong:
        tally.complaints.append(f"{outcome.words}: {'; '.join(wrong)}\n{outcome.said[-1500:]}")


def report(tally: Tally, began_s: float) -> None:
    """Print the complaints, and the last line."""
    for complaint in tally.complaints:
        print(f"WRONG {complaint}")
    found = {
        "cases": tally.verdicts.total(),
        "ended_well": tally.verdicts[Verdict.ENDED_WELL],
        "stopped_with_culprit": tally.verdicts[Verdict.STOPPED],
        "stopped_unnamed": tally.verdicts[Verdict.UNNAMED],
        "hung": tally.verdicts[Verdict.HUNG],
        "ledger_imbalance": tally.imbalance,
        "not_bitten": tally.not_bitten,
        "not_resumed": tally.not_resumed,
        "left_processes": tally.survivors,
        "seconds": round(time.monotonic() - began_s, 1),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
