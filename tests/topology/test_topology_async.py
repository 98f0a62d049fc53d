"""The asynchronous topologies as they run: what a run leaves on record adds up, whoever it was broken off by."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from conftest import Train
from hotpot.experience import RunReader
from hotpot.experience.crashpoints import arm
from hotpot.ids import group_id
from hotpot.topology.collecting.batches import BatchesAhead
from hotpot.topology.collecting.harvest import Harvest
from hotpot.topology.collecting.lines import BatchLine, Standing
from hotpot.topology.redo import redo
from hotpot.topology.session import Session

SERIAL = ("topology.serial=true", "topology.updates=4", "engine.max_concurrency=24", "checkpoint.every_updates=3", "evaluation.every_updates=0")  # fmt: skip
KINDS = ("async", "batched_async")
STANDING = Standing(under_way=0, expected=0, policy_version=1, served_version=1, learning=False)


class Broke(BaseException):
    """The process dies here."""


def sql(run: Path, text: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = RunReader.open(run).sql(text).to_pylist()
    return rows


def check_balance(run: Path) -> None:
    """Every attempt has ended; each finished training trajectory was collected once, discarded once, or waits; no number
    stands for two things; each update learned from whole groups of one issue each."""
    assert sql(run, "SELECT attempt_id FROM attempts WHERE state = 'leased'") == []
    finished = sql(run, "SELECT trajectory_id FROM trajectories WHERE purpose = 'training'")
    uses = Counter(
        row["t"]
        for query in (
            "SELECT unnest(collected_trajectories) AS t FROM updates",
            "SELECT trajectory_id AS t FROM discards",
        )
        for row in sql(run, query)
    )
    assert set(uses) <= {row["trajectory_id"] for row in finished}
    assert set(uses.values()) <= {1}
    versions = [row["version"] for row in sql(run, "SELECT version FROM versions WHERE kind = 'policy'")]
    assert len(set(versions)) == len(versions)
    updates = [row["update"] for row in sql(run, 'SELECT "update" FROM updates')]
    assert len(set(updates)) == len(updates)
    groups = sql(run, 'SELECT group_id, count(DISTINCT "update") AS n FROM groups GROUP BY group_id')
    assert all(row["n"] == 1 for row in groups)


def chain(run: Path) -> list[int]:
    """The updates on the way to the last weights."""
    parents = {
        row["update"]: row["parent_update"] for row in sql(run, 'SELECT "update", parent_update FROM updates')
    }
    at, found = max(parents), []
    while at:
        found.append(at)
        at = parents[at]
    return found[::-1]


def broken_off(run: Train, patch: pytest.MonkeyPatch, place: str, *settings: str) -> None:
    """Train until ``place`` is come to for the third time, and die there."""

    def kill(_pid: int, _signal: int) -> None:
        raise Broke

    with patch.context() as inner:
        inner.setattr(os, "kill", kill)
        arm(place, 3)
        try:
            with pytest.raises(Broke):
                run(*settings)
        finally:
            arm("")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_with_threads_and_a_learner_of_its_own(run: Train, kind: str) -> None:
    folder = run(
        "run.deterministic=false", "run.threads=1", f"topology.kind={kind}", "topology.updates=6", "actors.kind=threads",
        "actors.groups=2", "actors.actors_per_group=2", "engine.max_concurrency=24", "actors.over_issue=0.5",
        "topology.publish_every_updates=2", "learner.decoupled=stale", "queue.depth=40",
    )  # fmt: skip
    check_balance(folder)
    assert chain(folder) == [1, 2, 3, 4, 5, 6]
    assert len(sql(folder, "SELECT 1 FROM events WHERE kind = 'publish'")) >= 3
    served = {row["v"] for row in sql(folder, "SELECT DISTINCT unnest(span_policy_version) AS v FROM steps")}
    assert served < set(range(1, 8))
    assert {row["g"] for row in sql(folder, "SELECT DISTINCT actor_group AS g FROM steps")} == {
        "group-0",
        "group-1",
    }
    assert len(sql(folder, "SELECT DISTINCT actor_id FROM steps")) == 4
    assert sql(folder, "SELECT 1 FROM attempts WHERE reason LIKE 'cut: %'")
    assert {one.findings.verdict for one in redo(folder, "all")} == {"identical"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "place",
    [
        "learned",
        *(
            pytest.param(place, marks=pytest.mark.slow)
            for place in ("leased", "kept", "update_begun", "update_unrecorded", "published")
        ),
    ],
)
def test_broken_off_and_resumed(
    run: Train, monkeypatch: pytest.MonkeyPatch, kind: str, place: str, tmp_path: Path
) -> None:
    settings = (*SERIAL, f"topology.kind={kind}")
    broken_off(run, monkeypatch, place, *settings)
    folder = tmp_path / "run"
    before = sql(folder, "SELECT trajectory_id FROM trajectories WHERE purpose = 'training'")
    run(*settings, resume=folder)
    check_balance(folder)
    assert len(chain(folder)) == 4
    bound = sql(folder, "SELECT max(staleness_max) AS most FROM updates")
    assert bound[0]["most"] <= 8
    # What had finished was taken up, not forgotten.
    used = {row["t"] for row in sql(folder, "SELECT unnest(collected_trajectories) AS t FROM updates")}
    used |= {row["t"] for row in sql(folder, "SELECT trajectory_id AS t FROM discards")}
    waiting = {row["trajectory_id"] for row in before} - used
    newest = max(int(name.split(".")[0]) for name in used)
    assert {
        group_id(int(name.split(".")[0])) for name in waiting if int(name.split(".")[0]) < newest - 8
    } == set()
    assert {one.findings.verdict for one in redo(folder, "all")} == {"identical"}


@pytest.mark.parametrize("swap", ["in_flight", "between_episodes"])
def test_weights_are_swapped_in_flight_or_between_episodes(run: Train, swap: str) -> None:
    folder = run(*SERIAL, "topology.kind=async", f"topology.swap={swap}")
    mixed = sql(
        folder,
        "SELECT trajectory_id FROM (SELECT trajectory_id, unnest(span_policy_version) AS v FROM steps "
        "WHERE purpose = 'training') GROUP BY trajectory_id HAVING count(DISTINCT v) > 1",
    )
    assert bool(mixed) == (swap == "in_flight")


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_is_not_lost_where_its_swap_still_waits_at_the_end(
    run: Train, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    done: list[int] = []
    record, live = Session.record_update, Harvest.live.fget
    assert live is not None

    def recorded(self: Session, result: Any, *given: Any, **more: Any) -> None:
        record(self, result, *given, **more)
        done.append(result.update)

    monkeypatch.setattr(Session, "record_update", recorded)
    # From its update on, an episode is under way whenever the swap asks.
    monkeypatch.setattr(Harvest, "live", property(lambda self: 1 if 3 in done else live(self)))
    folder = run(
        *SERIAL, f"topology.kind={kind}", "topology.swap=between_episodes", "evaluation.every_updates=3", "run.self_test=false",
        "engine.max_concurrency=64", "evaluation.num_tasks=2", "evaluation.num_tasks_final=2", "evaluation.greedy=false",
    )  # fmt: skip
    found = sql(
        folder, "SELECT label, \"update\", policy_version AS v FROM evaluations WHERE label <> 'before'"
    )
    assert sorted((row["label"], row["update"], row["v"]) for row in found) == [
        ("after", 4, 5),
        ("scheduled", 4, 5),
    ]


def test_a_stale_group_is_dropped_with_its_reason(run: Train) -> None:
    folder = run(*SERIAL, "topology.kind=async", "queue.max_staleness=1", "topology.publish_every_updates=2")
    check_balance(folder)
    stale = sql(folder, "SELECT staleness FROM discards WHERE reason = 'stale'")
    assert stale
    assert min(row["staleness"] for row in stale) > 1
    assert sql(folder, "SELECT max(staleness_max) AS most FROM updates")[0]["most"] == 1


@pytest.mark.parametrize(
    "change",
    [
        ("topology.kind=batched_async", "topology.batches_ahead=0"),
        ("topology.kind=sync", "topology.serial=false"),
        ("topology.kind=async", "queue.max_staleness=1"),
    ],
)
def test_resumed_as_another_topology(
    run: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: tuple[str, ...]
) -> None:
    broken_off(run, monkeypatch, "learned", *SERIAL, "topology.kind=async")
    folder = tmp_path / "run"
    run(*SERIAL, *change, resume=folder)
    check_balance(folder)
    assert len(chain(folder)) == 4
    run(*SERIAL, *change, "topology.updates=5", resume=folder)
    check_balance(folder)
    assert len(chain(folder)) == 5


def test_what_waits_is_left_where_other_settings_would_have_brought_it(
    run: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = (*SERIAL, "topology.kind=async")
    broken_off(run, monkeypatch, "learned", *settings)
    folder = tmp_path / "run"
    first = sql(folder, "SELECT max(issue) AS last FROM steps WHERE purpose = 'training'")[0]["last"]
    changed = (*settings, "sampling.training.temperature=0.8", "run.self_test=false")
    run(*changed, resume=folder)
    run(*changed, "topology.updates=5", resume=folder)
    check_balance(folder)
    assert sql(folder, "SELECT 1 FROM discards WHERE reason = 'settings_changed'")
    late = 'SELECT unnest(collected_trajectories) AS trajectory_id FROM updates WHERE "update" > 3'
    used = sql(folder, f"SELECT DISTINCT temperature, issue FROM steps WHERE trajectory_id IN ({late})")
    assert {row["temperature"] for row in used} == {0.8}
    assert min(row["issue"] for row in used) > first


def test_a_batch_of_one_task_is_one_group(run: Train) -> None:
    folder = run(*SERIAL, "topology.kind=batched_async", "rollout.tasks_per_batch=1", "learner.minibatches=1")
    assert [row["num_groups"] for row in sql(folder, 'SELECT num_groups FROM updates ORDER BY "update"')] == [
        1
    ] * 4


def test_batches_of_which_nothing_comes_are_passed_over() -> None:
    line = BatchLine(BatchesAhead(1), unit=1)
    line.begin(["g0"])
    line.begin(["g1"])
    line.empty("g0")
    assert not line.take(0.0, 1).is_batch
    line.begin(["g2"])
    line.empty("g1")
    line.empty("g2")
    assert not line.take(0.0, 1).is_batch
    assert line.hold(STANDING) is None
