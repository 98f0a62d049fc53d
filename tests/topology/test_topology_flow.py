"""The moves of the asynchronous topologies, one by one: when is published, what a stop waits for, who takes places in line."""

from collections.abc import Callable
from pathlib import Path

import pytest
from coin_recipe import SETTINGS
from flow_parts import LOOSE, QUICK, Seconds, wired

from hotpot.config import Recipe
from hotpot.config.load import build_recipe
from hotpot.errors import LearnerError
from hotpot.experience import RunReader
from hotpot.topology.collecting.batches import BatchesAhead
from hotpot.topology.collecting.lines import BatchLine, StreamLine
from hotpot.topology.collecting.queue import TrajectoryQueue
from hotpot.topology.flow import Flow
from hotpot.topology.learning.protocol import Work
from hotpot.topology.resume.checkpoints import find_checkpoint
from hotpot.topology.session import Session
from hotpot.topology.supervision.stopping import StopRequested

Build = Callable[..., Recipe]

SERIAL = (*QUICK, "topology.kind=async", "topology.serial=true")
TURNS = 1000
"""More than any of these flows needs."""


def stream(session: Session) -> StreamLine:
    recipe = session.recipe
    queue = TrajectoryQueue(
        recipe.queue,
        batch_groups=recipe.rollout.tasks_per_batch,
        group_size=recipe.rollout.samples_per_task,
    )
    return StreamLine(queue)


def go_on(flow: Flow, until: Callable[[], bool] = lambda: False) -> bool:
    """Make the moves of the loop until something holds; return whether it came to."""
    for _ in range(TURNS):
        if until():
            return True
        flow.feed()
        flow.collect(idle_s=0.0)
        flow.learn()
        flow.publish()
    return until()


def test_newer_weights_serve_once_the_time_is_over_though_no_update_ends_then(
    recipe: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = ("topology.publish_every_updates=100", "topology.publish_every_s=5")
    clock = Seconds(monkeypatch)
    with wired(recipe(*QUICK, *LOOSE, "topology.kind=async", *every)) as (session, _):
        served: list[int] = []
        serve = session.serve
        monkeypatch.setattr(
            session, "serve", lambda weights, made: served.append(made) or serve(weights, made)
        )
        with Flow(session, stream(session)) as flow:
            assert go_on(flow, lambda: session.progress.done == 1)
            newest = session.progress.policy_version
            clock.now_s += 4.9
            flow.publish()
            assert served == []
            clock.now_s += 0.1
            flow.publish()  # no update was recorded meanwhile
            assert served == [newest]
            clock.now_s += 60.0
            flow.publish()  # the newest serve already
            assert served == [newest]


def batches(session: Session) -> BatchLine:
    return BatchLine(BatchesAhead(1), unit=session.recipe.rollout.tasks_per_batch)


def test_where_every_environment_rests_no_end_of_groups_is_begun(recipe: Build) -> None:
    with wired(recipe(*SERIAL)) as (session, _):
        session.rollout.held = {one.member.name for one in session.environments}
        with Flow(session, stream(session)) as flow:
            flow.feed()
            begun = flow.harvest.resting
            assert 0 < len(begun) <= 2 * session.rollout.capacity
            flow.feed()
            assert set(flow.harvest.resting) <= set(begun)
            assert flow.harvest.standing == (0, 0)


def mixed(model: Path, folder: Path, *more: str) -> Recipe:
    """A recipe with two environments, ``plain`` and ``strict``, half of the tasks each."""
    told = {
        **{name: section for name, section in SETTINGS.items() if name != "env"},
        "tasks": {
            "mix": [
                {"name": "plain", "kind": "coin"},
                {"name": "strict", "kind": "coin", "params": {"question": "which coin"}},
            ]
        },
    }
    sizes = (
        "rollout.tasks_per_batch=2",
        "rollout.samples_per_task=2",
        "learner.minibatches=1",
        "topology.updates=6",
    )
    where = (f"model.path={model}", f"run.folder={folder}")
    return build_recipe(told, [*where, *SERIAL, *sizes, *more], origin="test")


@pytest.mark.parametrize(("depth", "at_once"), [(12, 4), (4, 16)])
def test_episodes_of_a_resting_environment_do_not_take_every_place_in_line(
    model: Path, tmp_path: Path, depth: int, at_once: int
) -> None:
    places = (f"queue.depth={depth}", "queue.when_full=block", f"engine.max_concurrency={at_once}")
    with wired(mixed(model, tmp_path, *places)) as (session, _):
        session.rollout.held = {"strict"}
        with Flow(session, stream(session)) as flow:
            assert go_on(flow, lambda: session.progress.done == 6)
        versions = RunReader.open(session.folder).table("trajectories", ["env_version"])["env_version"]
        assert set(versions.to_pylist()) == {session.environments[0].environment.env_version.version}


def test_whole_batches_wait_for_no_more_than_the_trial_of_a_resting_environment(
    model: Path, tmp_path: Path
) -> None:
    with wired(mixed(model, tmp_path)) as (session, _):
        session.rollout.held = {"strict"}
        with Flow(session, batches(session)) as flow:
            go_on(flow, lambda: session.progress.done == 6)
            assert len(flow.harvest.resting) == 1
            session.rollout.held = set()
            assert go_on(flow, lambda: session.progress.done == 6)


@pytest.mark.parametrize("under_way", [Work, Path])
def test_a_stop_waits_for_the_update_or_the_checkpoint_that_is_under_way(
    recipe: Build, under_way: type[Work | Path]
) -> None:
    with wired(recipe(*SERIAL, "checkpoint.every_updates=1"), polls=3) as (session, learning):

        def stop() -> None:
            session.stop.requested |= isinstance(learning.begun[-1], under_way)

        learning.on_poll = stop
        with pytest.raises(StopRequested), Flow(session, stream(session)) as flow:
            go_on(flow)
        assert session.progress.done == 1
        assert [row.update for row in session.updates] == [1]
        assert session.engine.info().policy_version == session.progress.policy_version
        assert find_checkpoint(session.folder)[0] == 1
        assert list((session.folder / "checkpoints").glob("*.partial")) == []
        assert not learning.busy


def test_a_stop_does_not_wait_for_ever_for_a_learner_that_says_nothing(
    recipe: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, polls = Seconds(monkeypatch), 0
    told = recipe(*SERIAL, "supervision.stop_after_s=60")
    with wired(told, polls=None) as (session, learning):

        def wait() -> None:
            nonlocal polls
            polls += 1
            assert polls < TURNS, "nobody looks at the clock"
            clock.now_s += 1.0
            session.stop.requested = True

        learning.on_poll = wait
        with (
            pytest.raises(LearnerError, match=r"at work for 60 s \(supervision.stop_after_s\)"),
            Flow(session, stream(session)) as flow,
        ):
            go_on(flow)
        assert session.progress.done == 0
