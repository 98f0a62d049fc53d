"""A run in deterministic mode: what the sampler recorded is what the learner computes, to the last bit."""

import json

from hotpot.experience import open_run


def test_sampler_and_learner_differ_by_exactly_0_in_every_update(run) -> None:
    reader = open_run(run("sampling.training.temperature=0.8", "learner.kl_coefficient=0.01"))
    rows = reader.sql(
        "select logprob_difference_max, logprob_difference_mean, cpu_capability, reference_kl, losses, approx_kl from updates "
        'order by "update"'
    ).to_pylist()
    assert len(rows) == 3
    assert [(row["logprob_difference_max"], row["logprob_difference_mean"]) for row in rows] == [
        (0.0, 0.0)
    ] * 3
    assert all(row["cpu_capability"].endswith(", exact") for row in rows)
    told = reader.sql("select detail from events where kind = 'self_test'")["detail"].to_pylist()
    assert [json.loads(one)["tolerance"] for one in told] == [0.0]


def test_without_deterministic_mode_they_agree_up_to_rounding(run) -> None:
    reader = open_run(run("run.deterministic=false", "run.threads=1", "topology.updates=1"))
    row = reader.sql("select logprob_difference_max, cpu_capability from updates").to_pylist()[0]
    assert 0 < row["logprob_difference_max"] < 1e-4
    assert "exact" not in row["cpu_capability"]
