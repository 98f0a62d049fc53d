"""``make bench-resume``: training is killed at every named place of the loop, taken up, and compared with a run that was not.

A scenario is one tiny run in deterministic mode that is killed at three places in a row and taken up after each, then
runs to its end. What it computed is compared with an uninterrupted run of the same recipe: batch hash, losses, gradient
norms and learning rate of every update, bit for bit, and the checksum of the final weights. Recipes: the plain loop, one
that replays its own experience, and one that caches prompts of many episodes in few slots.

Environment: ``HITS`` (times each place is hit, default 5), ``SEED``. The last line is JSON: ``kills``, ``resumed`` (kills
after which the run was taken up), ``identical`` (those whose run came to the same bits). Exit code 1 where these differ,
a place was not hit as often as asked, or an attempt, update or policy version was used twice.
"""

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resume_parts import killed

from hotpot.experience import RunReader

PLACES = (
    "update_begun", "leased", "wal_written", "before_ledger", "after_ledger", "kept", "collected", "learned", "publish_marked", "published",
    "update_unrecorded", "update_recorded", "evaluation_unrecorded", "evaluated", "checkpoint_begun",
    "checkpoint_weights", "checkpoint_moments", "checkpoint_written", "checkpoint_renamed", "checkpoint_pointed",
    "checkpoint_pruned", "log_segment_sealed", "before_watermark", "after_watermark", "rolled_forward", "resume_learned",
)  # fmt: skip
"""Where the process is killed. The last two are passed by a resume only."""

LATE = ("rolled_forward", "resume_learned")

RECIPES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "replay": ("replay.share=0.5", "replay.hot_share=0.5", "replay.weighting=positive"),
    "crowded": ("engine.max_concurrency=3", "engine.admit_share=0.5", "learner.epochs=2"),
}

CHAIN = 3
"""Places at which one run is killed, one after the other."""


@dataclass(slots=True)
class Tally:
    """``hits`` by place; of all kills those ``resumed``, and those whose run came to the ``identical`` end."""

    hits: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    identical: int = 0
    complaints: list[str] = field(default_factory=list)


def main() -> int:
    """Run all scenarios and print what came of them."""
    hits, chance = int(os.environ.get("HITS", "5")), random.Random(int(os.environ.get("SEED", "0")))
    began_s, tally = time.monotonic(), Tally()
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="hotpot-resume-", dir=shared if shared.is_dir() else None))
    try:
        killed.make_model(folder / "model")
        wanted = {name: reference(folder, name, overrides) for name, overrides in RECIPES.items()}
        number = 0
        while left := [place for place in PLACES if tally.hits[place] < hits]:
            if number > 6 * hits * len(PLACES):
                tally.complaints.append(f"{left} were not hit {hits} times each")
                break
            name = list(RECIPES)[number % len(RECIPES)]
            places = plan(left, tally.hits, chance)
            run_scenario(folder, name, places, wanted[name], tally, number)
            number += 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    kills = sum(tally.hits.values())
    for complaint in tally.complaints:
        print(complaint)
    found = {
        "kills": kills, "resumed": tally.resumed, "identical": tally.identical,
        "places": len(PLACES), "least_hits": min(tally.hits[place] for place in PLACES),
        "seconds": round(time.monotonic() - began_s, 1),
    }  # fmt: skip
    print(json.dumps(found))
    return 1 if tally.complaints or not kills == tally.resumed == tally.identical else 0


def reference(folder: Path, name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return what the recipe computes when nobody kills it; twice, since it must do so again."""
    found = []
    for turn in range(2):
        place = folder / f"reference-{name}-{turn}"
        was_killed, _ = killed.go(folder / "model", place, overrides)
        if was_killed:
            raise RuntimeError("the reference was killed by somebody else")
        found.append(killed.fingerprint(place))
    if found[0] != found[1]:
        raise RuntimeError(f"recipe {name} does not repeat itself, so there is nothing to compare with")
    return found[0]


def plan(left: Sequence[str], hits: Counter[str], chance: random.Random) -> list[tuple[str, int]]:
    """Return the places of one scenario with their counts: those hit least first, resume-only ones not first."""
    order = sorted(left, key=lambda place: (hits[place], chance.random()))
    first = [place for place in order if place not in LATE][:1] or ["collected"]
    rest = [place for place in order if place not in first]
    rest += [chance.choice(PLACES) for _ in range(CHAIN)]
    return [(place, chance.choice((1, 1, 2, 3, 5))) for place in [*first, *rest][:CHAIN]]


def run_scenario(
    folder: Path,
    name: str,
    places: Sequence[tuple[str, int]],
    wanted: dict[str, Any],
    tally: Tally,
    number: int,
) -> None:
    """Kill one run at ``places``, end it, and compare."""
    run, overrides, kills = folder / f"run-{number}", RECIPES[name], list[str]()
    for place, count in places:
        was_killed, _ = killed.go(folder / "model", run, overrides, place, count)
        if not was_killed:
            break
        kills.append(f"{place}:{count}")
        tally.hits[place] += 1
    else:
        killed.go(folder / "model", run, overrides)
    if kills:
        judge(run, name, kills, wanted, tally)
    shutil.rmtree(run)


def judge(run: Path, name: str, kills: Sequence[str], wanted: dict[str, Any], tally: Tally) -> None:
    """Count a run that has ended, and say what is wrong with it."""
    told = killed.resumes(run)
    found, words = killed.fingerprint(run), f"{name} killed at {', '.join(kills)}"
    tally.resumed += len(kills)
    inexact = [reason for one in told for reason in one["inexact_because"]]
    if found == wanted and not inexact and not doubled(run):
        tally.identical += len(kills)
        print(f"{words}: identical", flush=True)
        return
    differing = [a[0] for a, b in zip(found["updates"], wanted["updates"], strict=False) if a != b]
    tally.complaints.append(
        f"{words}: updates {differing} differ, {found['recorded']} recorded, weights {found['weights']}, not "
        f"{wanted['weights']}; inexact: {inexact}; doubled: {doubled(run)}"
    )
    print(tally.complaints[-1], flush=True)


def doubled(run: Path) -> list[str]:
    """Return what was used twice: attempts, episodes on record, updates, policy versions."""
    reader = RunReader.open(run / "run")
    queries = {
        "attempt": "SELECT attempt_id FROM attempts",
        "episode": "SELECT episode_id FROM trajectories WHERE purpose = 'training'",
        "update": 'SELECT "update" FROM updates',
        "policy version": "SELECT version FROM versions WHERE kind = 'policy'",
    }
    found = []
    for what, query in queries.items():
        counts = Counter(reader.sql(query).column(0).to_pylist())
        found += [f"{what} {value}" for value, count in counts.items() if count > 1]
    return found


if __name__ == "__main__":
    sys.exit(main())
