"""How many groups are begun: none ahead of a trial where every environment rests, of what was left no more than have places."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from hotpot.config import Recipe
from hotpot.topology.collecting.lines import StreamLine
from hotpot.topology.collecting.queue import TrajectoryQueue
from hotpot.topology.flow import Flow
from hotpot.topology.resume.left import Left
from hotpot.topology.session import Session
from hotpot.topology.supervision.stopping import StopSignal
from hotpot.topology.wiring import wire

Build = Callable[..., Recipe]

PLACES, SAMPLES = 8, 4
TURNS = 5

pytestmark = pytest.mark.timeout(120)


@contextmanager
def wired(recipe: Recipe, folder: Path) -> Iterator[Session]:
    console = Console(quiet=True)
    with wire(
        recipe, run_id="run", folder=folder, resume=None, console=console, stop=StopSignal()
    ) as session:
        session.timeline.start()
        session.checkpoint()
        yield session


def flow(session: Session) -> Flow:
    settings = session.recipe.rollout
    queue = TrajectoryQueue(
        session.recipe.queue, batch_groups=settings.tasks_per_batch, group_size=settings.samples_per_task
    )
    return Flow(session, StreamLine(queue))


@pytest.fixture
def serial(recipe: Build) -> Recipe:
    return recipe(
        "topology.kind=async",
        "topology.serial=true",
        f"engine.max_concurrency={PLACES}",
        f"rollout.samples_per_task={SAMPLES}",
    )


def test_where_every_environment_rests_a_trial_is_all_that_waits(serial: Recipe, tmp_path: Path) -> None:
    with wired(serial, tmp_path / "run") as session, flow(session) as moves:
        (one,) = session.environments
        session.rollout.held = {one.member.name}
        for _ in range(TURNS):
            moves.feed()
            moves.collect(idle_s=0.0)
        assert session.store.ledger.mark("issue") == PLACES // SAMPLES - 1
        assert moves.harvest.let_through(one.member.name) is not None
        session.rollout.held = ()
        moves.feed()
        moves.collect(idle_s=0.0)
        assert moves.harvest.live == PLACES


def test_of_what_an_earlier_process_left_no_more_is_begun_than_has_places(
    serial: Recipe, tmp_path: Path
) -> None:
    with wired(serial, tmp_path / "run") as session:
        session.store.ledger.advance("issue", 99)
        session.left = Left(issues=tuple(range(100)))
        with flow(session) as moves:
            moves.feed()
            assert len(moves.harvest.groups.under_way) == PLACES // SAMPLES
