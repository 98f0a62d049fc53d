"""One half of the loop, for debugging: collect without learning, or learn without collecting.

::

    rollout_only        task sampler ──► rollout ⇄ engine ──► store
    learn_from_record   source run's lake ──► store (copied, with their versions) ──► learner ──► publish

Both use the same moves as the whole loop, so what works here works there.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hotpot.config import Recipe
from hotpot.errors import RecipeError, RunFolderError
from hotpot.experience import Lease, RunReader, from_table, read_trajectories
from hotpot.topology.resume.history import known_versions
from hotpot.topology.session import Session
from hotpot.topology.updates.batch import UpdateBatch
from hotpot.types import SCHEMA_VERSION, Purpose, Trajectory, VersionRow


def run_rollout_only(session: Session) -> None:
    """Collect and store as many batches as the recipe has updates, those of earlier processes counted in; the policy
    never changes.
    """
    recipe = session.recipe
    while session.sampler.next_issue < recipe.topology.updates * recipe.rollout.tasks_per_batch:
        collected = session.intake.collect(session.issue(recipe.rollout.tasks_per_batch), Purpose.TRAINING)
        session.store.record(session.measure(session.progress.update))
        solved = sum(trajectory.row.success for trajectory in collected)
        session.view.message(f"collected {len(collected)} trajectories, {solved} solved")
        session.stop.check()
        if session.out_of_time():
            return


def run_from_record(session: Session) -> None:
    """Learn from a source run's training trajectories, in the order they were issued, without inference.

    Each batch is first copied into this run's own store under its own run id, with the versions it was recorded with,
    so that lineage and ledger hold here too. Ends with the record or the recipe's number of updates.
    """
    source = session.recipe.debug.source_run
    if source is None:
        raise ValueError("learn_from_record needs debug.source_run")
    session.store.record(_foreign_versions(source, session))
    for recorded in recorded_batches(source, session.recipe.rollout.tasks_per_batch):
        if session.progress.done >= session.recipe.topology.updates or session.out_of_time():
            return
        update = session.begin_update()
        copied = [_adopt(session.run_id, trajectory) for trajectory in recorded]
        with session.timeline.span("store"):
            # A trajectory and its forks are of one attempt.
            leases = {trajectory.row.attempt_id: Lease.of(trajectory.row) for trajectory in copied}
            session.store.ledger.lease(list(leases.values()))
        kept = session.intake.keep(copied)
        batch = UpdateBatch(update=update, collected=kept, source="cold")
        result = session.learn(batch)
        published = session.publish(update)
        session.record_update(result, batch, published)
        session.stop.check()
        session.due()


def check_source(source: Path, recipe: Recipe) -> None:
    """Refuse a source whose training steps were sampled from another distribution than the recipe's.

    The ratio compares log-probabilities of one distribution; the learner takes its temperature from the recipe. Raises
    :class:`RecipeError` naming both.
    """
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    found = RunReader.open(source).sql(
        f"select distinct {', '.join(names)} from steps where purpose = 'training'"
    )
    wanted = recipe.sampling.training.model_dump()
    for row in found.to_pylist():
        if row != wanted:
            raise RecipeError(
                f"the steps of {source} were sampled with {row}, but sampling.training is {wanted}; give the recipe the "
                "source's sampling parameters, or name another debug.source_run"
            )


def first_policy_version(source: Path) -> int:
    """Return the highest policy version that sampled anything in ``source``: this run's versions must lie above it.

    Raises :class:`RunFolderError` where the run holds no training trajectory.
    """
    found = RunReader.open(source).sql(
        "select max(policy_version) as highest from steps where purpose = 'training'"
    )
    highest = found["highest"][0].as_py()
    if highest is None:
        raise RunFolderError(
            f"{source} holds no training trajectory to learn from; name another run in debug.source_run"
        )
    return int(highest)


def recorded_batches(source: Path, tasks_per_batch: int) -> Iterator[list[Trajectory]]:
    """Yield the training trajectories of ``source``, ``tasks_per_batch`` issued tasks at a time."""
    reader = RunReader.open(source)
    issues = reader.sql("select distinct issue from steps where purpose = 'training' order by issue")[
        "issue"
    ].to_pylist()
    for start in range(0, len(issues), tasks_per_batch):
        first, last = issues[start], issues[min(start + tasks_per_batch, len(issues)) - 1]
        yield read_trajectories(
            reader,
            "purpose = 'training' and trajectory_id in (select trajectory_id from steps where issue between ? and ?)",
            [first, last],
        )


def _foreign_versions(source: Path, session: Session) -> list[VersionRow]:
    """Return what explains the versions on the source's steps, as far as this run does not explain them itself."""
    known = known_versions(RunReader.open(session.folder))
    found: list[VersionRow] = from_table("versions", RunReader.open(source).table("versions"))
    return [
        dataclasses.replace(row, run_id=session.run_id)
        for row in found
        if (row.kind, row.version) not in known
    ]


def _adopt(run_id: str, trajectory: Trajectory) -> Trajectory:
    # Copied, a record is one of this run and of the release that writes it, whichever wrote the source.
    own: dict[str, Any] = {"run_id": run_id, "schema_version": SCHEMA_VERSION}
    steps = tuple(dataclasses.replace(step, **own) for step in trajectory.steps)
    return Trajectory(row=dataclasses.replace(trajectory.row, **own), steps=steps)
