"""Runs for the tests of maintenance: whole and consistent, many small files, or written by a process of its own.

usage: maintenance_runs.py RUN_FOLDER ROUNDS
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from hotpot.config import StoreSection
from hotpot.experience import ExperienceStore, open_run
from hotpot.testing.records import make_group, make_leases, make_row, make_trajectory
from hotpot.types import ConsumptionRow, EventRow, GroupRow, LearnedTokensRow, MetricRow, UpdateRow

SETTINGS = StoreSection(archive_every_batches=1000, archive_every_s=600.0)


def open_store(folder, *, settings=SETTINGS, **keywords):
    return ExperienceStore.open(folder, run_id="run", settings=settings, vocabulary_size=64, **keywords)


def learned(row, update, position, tokens):
    length = len(tokens)
    zeros = np.zeros(length, np.float32)
    return make_row(
        LearnedTokensRow, trajectory_id=row.trajectory_id, group_id=row.group_id, update=update, position=position,
        tokens=tokens, loss_mask=np.ones(length, np.int32), advantages=zeros, returns=zeros, old_logprobs=zeros,
        new_logprobs=zeros,
    )  # fmt: skip


def add_round(store, issue, *, size=4):
    """One group with a failed and a refused attempt, and the update that learns from it."""
    group = make_group(issue=issue, size=size, num_steps=3)
    broken = make_trajectory(issue=issue, sample=size)
    broken = replace(broken, row=replace(broken.row, reward=broken.row.reward + 1.0))
    lost = make_trajectory(issue=issue, sample=size + 1)
    store.ledger.lease(make_leases([*group, broken, lost]))
    store.ledger.fail(lost.row.attempt_id, "broke")
    accepted = store.append([*group, broken]).accepted
    update = store.ledger.mark("update") + 1 or 1
    store.ledger.advance("update", update)
    tokens = [np.concatenate([np.r_[s.prompt_tokens, s.sampled_tokens] for s in one.steps]) for one in group]
    store.record_update(
        make_row(UpdateRow, update=update, num_trajectories=len(accepted)),
        [make_row(GroupRow, group_id=group[0].row.group_id, update=update, size=size)],
        [learned(one.row, update, place, tokens[place]) for place, one in enumerate(group)],
        [make_row(ConsumptionRow, trajectory_id=one, update=update, source="fresh") for one in accepted],
        [make_row(MetricRow, name="m", update=update)],
    )
    return update


def make_run(folder, *, rounds=6, flush_every=1, close=True):
    """Write a run whose lake has a file per table and round; returns its folder (and the store, unless closed)."""
    store = open_store(folder)
    store.record([make_row(EventRow, kind="run_started", detail="{}")])
    for issue in range(rounds):
        add_round(store, issue)
        if flush_every and (issue + 1) % flush_every == 0:
            store.flush()
    if close:
        store.close()
        return folder
    return store


def contents(reader):
    """Everything a reader sees of some tables, in order, to compare before and after."""
    names = ("steps", "trajectories", "updates", "consumptions", "learned_tokens", "attempts", "quarantine")
    return {name: reader.table(name).to_pylist() for name in names}


def main(folder: Path, rounds: int) -> None:
    store = open_store(folder, resume=(folder / "manifest.json").exists())
    begin = open_run(folder).sql("SELECT count(*) AS n FROM updates").to_pylist()[0]["n"]
    for issue in range(begin, begin + rounds):
        add_round(store, issue)
        store.flush()
        sys.stdout.write(f"{issue}\n")
        sys.stdout.flush()
    store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
