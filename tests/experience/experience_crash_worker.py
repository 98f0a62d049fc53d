"""The process the crash tests kill: leases, appends, fails, drops and records updates, and prints what is acknowledged.

usage: experience_crash_worker.py RUN_FOLDER ROUNDS
"""

import sys
from pathlib import Path

from hotpot.config import StoreSection
from hotpot.experience import ExperienceStore
from hotpot.testing.records import make_group, make_leases, make_row, make_trajectory
from hotpot.types import ConsumptionRow, MetricRow, UpdateRow


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main(folder: Path, rounds: int) -> None:
    settings = StoreSection(archive_every_batches=2, archive_every_s=0.05)
    resume = (folder / "manifest.json").exists()
    store = ExperienceStore.open(folder, run_id="run", settings=settings, vocabulary_size=64, resume=resume)
    say("open", store.ledger.counts().leased)
    for _ in range(rounds):
        issue = store.ledger.mark("issue") + 1
        store.ledger.advance("issue", issue)
        group = make_group(issue=issue, size=4, num_steps=3)
        lost = [make_trajectory(issue=issue, sample=sample) for sample in (4, 5, 6)]
        store.ledger.lease(make_leases([*group, *lost]))
        store.ledger.fail(lost[0].row.attempt_id, "broke")
        store.ledger.drop(lost[1].row.attempt_id, "cut_off")
        accepted = store.append(group).accepted
        say("kept", *accepted)
        number = store.ledger.mark("update") + 1
        store.ledger.advance("update", number)
        used = [make_row(ConsumptionRow, trajectory_id=i, update=number) for i in accepted]
        update = make_row(UpdateRow, update=number, num_trajectories=len(used))
        store.record_update(update, [], [], used, [make_row(MetricRow, name="m", update=number)])
        say("learned", number)
    store.close()
    say("closed")


main(Path(sys.argv[1]), int(sys.argv[2]))
