"""A run from its first line to its last: what stands around any topology.

::

    new run folder ─► evaluate before ─► topology ─► evaluate after ─► checkpoint ─► close ─► summary, trace

Owns the ends: how a run starts, is resumed, is stopped and is summed up. The loop itself is the topology's.
"""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from hotpot import __version__
from hotpot.config import Recipe
from hotpot.config.load import build_recipe
from hotpot.config.sections import VllmEngineSection
from hotpot.errors import ModelFilesError, RecipeError, RunFolderError
from hotpot.experience import read_manifest
from hotpot.experience.crashpoints import reach
from hotpot.observability.summary import SummaryInputs, summarise, write_summary
from hotpot.observability.trace import write_trace
from hotpot.topology.async_ import run_async
from hotpot.topology.batched_async import run_batched_async
from hotpot.topology.halves import run_from_record, run_rollout_only
from hotpot.topology.resume.checkpoints import LAST, list_checkpoints, point_at
from hotpot.topology.resume.history import check_complete, last_recipe
from hotpot.topology.session import Session
from hotpot.topology.supervision.stopping import StopRequested, StopSignal
from hotpot.topology.sync import run_sync
from hotpot.topology.wiring import EVALUATING, RESUMED, wire
from hotpot.types import EvaluationRow, Purpose

TOPOLOGIES: dict[str, Callable[[Session], None]] = {
    "sync": run_sync,
    "batched_async": run_batched_async,
    "async": run_async,
}
"""Who waits for whom, by ``topology.kind``."""


def train(
    recipe: Recipe,
    *,
    resume: Path | None = None,
    checkpoint: str | None = None,
    console: Console | None = None,
    json_output: bool = False,
) -> Path:
    """Run a recipe to its end, or go on with the run in ``resume`` from a checkpoint of it (the last); return its folder.

    Raises :class:`hotpot.errors.UsageError` before anything is written where something cannot work, and
    :class:`StopRequested` after a clean end where the operator asked for one.
    """
    reach("process_begun")
    console = console or Console(quiet=json_output)
    _check_waits(recipe)
    if resume is not None:
        _check_resumable(recipe)
        check_complete(recipe, resume)
        run_id, folder = read_manifest(resume).run_id, resume
    else:
        run_id = recipe.run.id or f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = recipe.run.folder / run_id
    stopped: StopRequested | None = None
    with (
        StopSignal() as stop,
        wire(
            recipe,
            run_id=run_id,
            folder=folder,
            resume=None if resume is None else RESUMED,
            checkpoint=checkpoint,
            console=console,
            stop=stop,
        ) as session,
    ):
        status = "failed"
        # What it says is true of the process before; `hotpot runs` must not take it for this one's.
        (folder / "summary.json").unlink(missing_ok=True)
        if checkpoint not in (None, LAST):
            point_at(folder, session.progress.update, after=max(0, session.store.ledger.mark("update")))
        try:
            _drive(session)
            status = "finished"
        except StopRequested as request:
            stopped, status = request, "stopped"
        finally:
            _finish(session, status)
    if stopped is not None:
        raise stopped
    return folder


def evaluate_run(
    run: Path, *, checkpoint: str | None = None, num_tasks: int | None = None, greedy: bool = True
) -> list[EvaluationRow]:
    """Measure a checkpoint of ``run`` on its hold-out tasks and record it in the run's lake under the label manual.

    Raises :class:`hotpot.errors.UsageError` where the run, the checkpoint or its writer's lock forbid it.
    """
    if not (run / "manifest.json").is_file():
        raise RunFolderError(
            f"{run} is no run folder (no manifest.json); `hotpot runs` lists those there are"
        )
    if not list_checkpoints(run):
        raise ModelFilesError(
            f"{run} has no checkpoint to evaluate; it ended before its first one was written"
        )
    manifest = read_manifest(run)
    recipe = build_recipe(last_recipe(run), [f"evaluation.greedy={str(greedy).lower()}"], origin=str(run))
    with (
        StopSignal() as stop,
        wire(
            recipe,
            run_id=manifest.run_id,
            folder=run,
            resume=EVALUATING,
            checkpoint=checkpoint,
            console=Console(quiet=True),
            stop=stop,
        ) as session,
    ):
        return session.evaluate("manual", num_tasks or recipe.evaluation.num_tasks_final)


def _check_waits(recipe: Recipe) -> None:
    """Refuse waits that the watchdog would not see the end of. Recorded recipes are read as they are."""
    waits = {}
    if isinstance(recipe.engine, VllmEngineSection):
        waits["engine.start_timeout_s"] = recipe.engine.start_timeout_s
    if recipe.actors.kind != "inline":
        waits["actors.call_timeout_s"] = recipe.actors.call_timeout_s
    if recipe.actors.kind == "processes":
        waits["actors.start_timeout_s"] = recipe.actors.start_timeout_s
    for name, seconds in waits.items():
        if seconds > recipe.supervision.stop_after_s:
            raise RecipeError(
                f"{name} = {seconds} is longer than supervision.stop_after_s = {recipe.supervision.stop_after_s}: the run would "
                "be ended while it may still wait; raise the latter, or lower the former"
            )


def _check_resumable(recipe: Recipe) -> None:
    if recipe.debug.mode == "learn_from_record":
        raise RecipeError(
            f"a run that learns from a record (debug.source_run = {recipe.debug.source_run}) is not resumed; its record "
            "is still there: start it anew under another run.id"
        )


def _drive(session: Session) -> None:
    recipe, mode = session.recipe, session.recipe.debug.mode
    session.timeline.start()
    session.checkpoint()
    if mode == "rollout_only":
        run_rollout_only(session)
        return
    if not _measured_before(session):
        session.evaluate("before", recipe.evaluation.num_tasks_final)
    if session.progress.done >= recipe.topology.updates:
        session.view.message(_finished_words(session))
    elif session.progress.done and not _measured(session, "scheduled"):
        session.due()  # an earlier process may have died before it did what was due
    if mode == "learn_from_record":
        run_from_record(session)
    else:
        TOPOLOGIES[recipe.topology.kind](session)
    # Ahead of the evaluation, so that nothing has to be learned again where that is cut off.
    session.checkpoint()
    if not _measured(session, "after"):
        session.evaluate("after", recipe.evaluation.num_tasks_final)


def _finished_words(session: Session) -> str:
    measured = "measured" if _measured(session, "after") else "to be measured"
    return (
        f"the run is finished: it has all its {session.recipe.topology.updates} updates, the last weights are {measured}; "
        "raise topology.updates to train further"
    )


def _measured_before(session: Session) -> bool:
    """Return whether the starting model was measured whole, maybe by an earlier process; learning ends the chance."""
    return session.progress.done > 0 or _measured(session, "before")


def _measured(session: Session, label: str) -> bool:
    """Return whether the present weights were measured whole under ``label``, maybe by an earlier process."""
    settings = session.recipe.evaluation
    wanted = {Purpose.EVALUATION.value}
    if settings.greedy:
        wanted.add(Purpose.EVALUATION_GREEDY.value)
    num_tasks = settings.num_tasks if label == "scheduled" else settings.num_tasks_final
    found = {
        (row.purpose, row.env_version, row.reward_version)
        for row in session.evaluations
        if (row.label, row.update, row.num_tasks + row.num_failed)
        == (label, session.progress.update, num_tasks)
    }
    return all((purpose, *one.member.versions) in found for purpose in wanted for one in session.environments)


def _finish(session: Session, status: str) -> None:
    """Write the last checkpoint and everything that sums the run up, all its processes; also when the loop failed."""
    if status != "failed":
        session.checkpoint()
    session.store.record([session.event(status, {"updates": session.progress.done})])
    totals = Counter(session.history.seconds)
    totals.update(session.timeline.totals())
    used = {
        "env": [one.environment.env_version.version for one in session.environments],
        "reward": [one.environment.reward_version.version for one in session.environments],
        "prompt": [one.prompt.version for one in session.environments],
    }
    versions = {kind: list(dict.fromkeys(found)) for kind, found in used.items()}
    summary = summarise(
        SummaryInputs(
            run_id=session.run_id,
            status=status,
            hotpot_version=__version__,
            evaluations=session.evaluations,
            updates=session.updates,
            span_seconds=totals,
            num_trajectories=session.intake.counts.training,
            num_evaluation_trajectories=session.intake.counts.evaluation,
            num_tokens=session.intake.counts.tokens,
            num_sampled_tokens=session.intake.counts.sampled_tokens,
            versions=versions,
        )
    )
    write_summary(session.folder / "summary.json", summary)
    if session.recipe.run.trace:
        timeline = session.timeline
        details = {"run_id": session.run_id, "dropped_slices": timeline.dropped_slices}
        threads = {"main loop": timeline.slices, "archive": session.store.archive_slices()}
        write_trace(session.folder / "trace.json", threads, details=details)
