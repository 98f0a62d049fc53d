"""A run with a critic: what is on record, that it repeats and resumes, that one sample of a task is enough."""

import numpy as np
import pytest

from hotpot.experience import open_run
from hotpot.topology import train

CRITIC = (
    "learner.advantages=gae",
    "learner.critic=separate",
    "learner.critic_extra_epochs=1",
    "topology.updates=2",
)


def learned(folder):
    return (
        open_run(folder)
        .sql(
            'select tokens, loss_mask, advantages, "returns" from learned_tokens order by "update", position'
        )
        .to_pylist()
    )


def test_what_the_critic_learned_is_on_record_and_repeats_bit_by_bit(run, tmp_path) -> None:
    folder = run(*CRITIC, "run.deterministic=true")
    rows = open_run(folder).sql('select * from updates order by "update"').to_pylist()
    assert all(row["num_groups_kept"] == row["num_groups"] for row in rows)
    assert all(row["explained_variance"] is not None for row in rows)
    sums = open_run(folder).sql("select trajectory_id, reward from trajectories").to_pylist()
    tokens = learned(folder)
    # Lambda 1 and no discount: the return of every token is what its trajectory earned in the end.
    returns = [np.array(row["returns"])[np.array(row["loss_mask"]) == 1] for row in tokens]
    assert all(len(set(values.tolist())) == 1 for values in returns)
    assert {float(values[0]) for values in returns} <= {row["reward"] for row in sums}
    again = run(*CRITIC, "run.deterministic=true", "run.id=again")
    other = open_run(again).sql('select batch_hash, losses from updates order by "update"').to_pylist()
    assert [row["batch_hash"] for row in rows] == [row["batch_hash"] for row in other]
    assert [row["losses"] for row in rows] == [row["losses"] for row in other]


def test_a_resumed_run_has_its_critic_back(run, recipe) -> None:
    straight = run(*CRITIC)
    folder = run(*CRITIC, "topology.updates=1", "run.id=resumed")
    train(recipe(*CRITIC, "run.id=resumed"), resume=folder)
    found = [
        open_run(path).sql('select explained_variance from updates order by "update"').to_pylist()[1]
        for path in (straight, folder)
    ]
    # Had it begun anew it would say 0 of every state and explain nothing.
    assert found[0]["explained_variance"] != pytest.approx(0, abs=1e-9)
    assert found[1]["explained_variance"] != pytest.approx(0, abs=1e-9)


def test_one_sample_of_a_task_is_enough(run) -> None:
    folder = run(*CRITIC, "rollout.samples_per_task=1", "topology.updates=1")
    rows = (
        open_run(folder).sql("select num_groups_kept, num_groups, optimizer_steps from updates").to_pylist()
    )
    assert rows[0]["num_groups_kept"] == rows[0]["num_groups"] > 1
    assert rows[0]["optimizer_steps"] > 0
