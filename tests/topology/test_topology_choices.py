"""Tasks that a resume of an asynchronous run issues again: the same ones, and the record tells of each choice once."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from flow_parts import QUICK
from test_topology_async import Broke, broken_off, sql

from conftest import Train
from hotpot.rollout import TaskSampler

SETTINGS = (*QUICK, "topology.kind=async", "topology.serial=true", "topology.updates=4", "engine.max_concurrency=24", "tasks.num_tasks=8", "tasks.pools=true")  # fmt: skip

Death = Callable[[Train, pytest.MonkeyPatch], None]


def learning(run: Train, patch: pytest.MonkeyPatch) -> None:
    """Two updates were heard of since some of what is under way was chosen."""
    broken_off(run, patch, "learned", *SETTINGS)


def untold(run: Train, patch: pytest.MonkeyPatch) -> None:
    """Numbers were handed out, and nothing of what they stand for is on the record."""
    left, take = [3], TaskSampler.take_choices

    def die(sampler: TaskSampler) -> list[object]:
        left[0] -= 1
        if not left[0]:
            raise Broke
        return list(take(sampler))

    with patch.context() as inner:
        inner.setattr(TaskSampler, "take_choices", die)
        with pytest.raises(Broke):
            run(*SETTINGS)


@pytest.mark.parametrize("die", [learning, untold])
def test_what_is_issued_again_is_the_same_task_and_told_once(
    run: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, die: Death
) -> None:
    die(run, monkeypatch)
    folder = run(*SETTINGS, resume=tmp_path / "run")
    told = [
        json.loads(row["detail"])
        for row in sql(folder, "SELECT detail FROM events WHERE kind = 'tasks_chosen'")
    ]
    choices = [(task["issue"], task["task_id"]) for detail in told for task in detail["tasks"]]
    assert sorted(issue for issue, _ in choices) == list(range(len(choices)))
    ran = sql(folder, "SELECT DISTINCT group_id, task_id FROM trajectories WHERE purpose = 'training'")
    assert {(int(row["group_id"][1:]), row["task_id"]) for row in ran} <= set(choices)
