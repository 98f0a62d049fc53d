"""Optimiser steps that cannot be taken leave an event, a bounded file of evidence and a count."""

import dataclasses
import json
import math
import signal
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from hotpot.experience import open_run
from hotpot.learner import NonFiniteError, OptimizerStep
from hotpot.learner.faults.findings import Finding
from hotpot.learner.faults.norm_watch import NormWatch
from hotpot.learner.losses.policy_loss import LossStatistics
from hotpot.learner.update import steps
from hotpot.metrics import metric, sql
from hotpot.topology.updates.evidence import Evidence


def read(path: Path) -> tuple[pa.Table, dict]:
    with pa.ipc.open_file(path) as file:
        table = file.read_all()
    return table, json.loads(table.schema.metadata[b"hotpot.finding"])


def spoil(monkeypatch: pytest.MonkeyPatch, wrong) -> None:
    """Replace log-probabilities of training passes by NaN where ``wrong(call)`` says so, in their first loss token."""
    real, calls = steps.score, [0]

    def score(decoder, micro, **keywords):
        scores = real(decoder, micro, **keywords)
        if not torch.is_grad_enabled():
            return scores
        calls[0] += 1
        bad = torch.zeros(len(micro.flat), dtype=torch.bool)
        bad[0] = wrong(calls[0])
        return dataclasses.replace(scores, logprobs=scores.logprobs.masked_fill(bad, math.nan))

    monkeypatch.setattr(steps, "score", score)


def test_a_skipped_step_names_its_token_and_keeps_the_evidence(run, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda call: call == 1)
    folder = run()
    reader = open_run(folder)
    (event,) = reader.sql("select * from events where kind = 'non_finite'").to_pylist()
    detail = json.loads(event["detail"])
    (first, *_) = reader.sql('select * from updates order by "update"').to_pylist()
    assert (event["update"], detail["update"], detail["skipped"]) == (first["update"], first["update"], True)
    assert (first["skipped_steps"], first["skipped_trajectories"]) == (1, detail["trajectories"])
    (token,) = detail["tokens"]
    assert (token["term"], token["cause"], token["new_logprob"]) == ("policy", "new_logprob", "nan")
    assert "token" not in token
    table, finding = read(folder / detail["evidence"])
    assert finding["tokens"][0].items() >= token.items()
    row = table.to_pylist()[0]
    assert row["trajectory_id"] == token["trajectory_id"]
    assert row["tokens"][token["position"]] == finding["tokens"][0]["token"]
    assert math.isnan(row["new_logprobs"][token["position"]])
    learned = reader.sql(
        'select tokens, loss_mask from learned_tokens where "update" = ? and trajectory_id = ?',
        [first["update"], row["trajectory_id"]],
    ).to_pylist()
    assert learned == [{"tokens": row["tokens"], "loss_mask": row["loss_mask"]}]
    ((count,),) = [reader.sql(sql(metric("learn/non_finite_steps")))["value"].to_pylist()]
    assert count == 1


def test_a_run_that_gives_up_leaves_the_evidence_of_every_step(run, tmp_path, monkeypatch) -> None:
    spoil(monkeypatch, lambda _: True)
    with pytest.raises(NonFiniteError, match="evidence"):
        run("learner.max_skipped_in_a_row=3", "learner.evidence_files=2")
    folder = tmp_path / "run"
    details = [
        json.loads(text)
        for text in open_run(folder).sql("select detail from events where kind = 'non_finite'")["detail"].to_pylist()
    ]  # fmt: skip
    assert [bool(detail["evidence"]) for detail in details] == [True, True, False]
    kept = sorted(path.relative_to(folder).as_posix() for path in folder.glob("evidence/**/*.arrow"))
    assert kept == sorted(detail["evidence"] for detail in details if detail["evidence"])
    assert not list(folder.glob("evidence/**/*.partial"))


@pytest.mark.parametrize("kind", ["async", "batched_async"])
def test_so_does_one_that_was_to_end_while_it_learned(run, tmp_path, monkeypatch, kind: str) -> None:
    def asked_to_stop(call: int) -> bool:
        if call == 1:
            signal.raise_signal(signal.SIGTERM)
        return True

    spoil(monkeypatch, asked_to_stop)
    with pytest.raises(NonFiniteError):
        run(f"topology.kind={kind}", "topology.serial=true", "learner.max_skipped_in_a_row=2")
    found = open_run(tmp_path / "run").sql("select detail from events where kind = 'non_finite'")
    assert all(json.loads(text)["evidence"] for text in found["detail"].to_pylist())
    assert found.num_rows == 2


def step(number: int) -> OptimizerStep:
    found = Finding(
        reason="exploding_gradient",
        skipped=False,
        trajectories=tuple(f"{n}.0.0" for n in range(100)),
        norms=(math.inf, 3.0),
        grad_norm=50.0,
        median_norm=1.0,
    )
    return OptimizerStep(
        epoch=0, minibatch=number, loss=0.0, policy_loss=0.0, kl_loss=0.0, grad_norm=50.0, entropy=0.0,
        statistics=LossStatistics(), num_trajectories=1, hash="", finding=found,
    )  # fmt: skip


def test_evidence_stays_within_its_bytes_over_the_life_of_a_run(tmp_path: Path) -> None:
    ((kind, detail),) = Evidence(tmp_path, max_files=99, max_bytes=10**6).keep(1, [step(0)])
    size = (tmp_path / detail["evidence"]).stat().st_size
    assert (kind, detail["norms"], len(detail["trajectories"])) == ("exploding", ["inf", 3.0], 32)
    assert detail["num_trajectories"] == 100
    again = Evidence(tmp_path, max_files=99, max_bytes=int(2.5 * size))
    found = again.keep(2, [step(0), dataclasses.replace(step(1), finding=None), step(2)])
    assert [bool(detail["evidence"]) for _, detail in found] == [True, False]
    total = sum(path.stat().st_size for path in tmp_path.glob("evidence/*/*.arrow"))
    assert total <= 2.5 * size


def test_a_resumed_run_measures_norms_against_those_of_its_chain(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run()
    recorded = (
        open_run(folder).sql('select grad_norms from updates order by "update"')["grad_norms"].to_pylist()
    )
    recalled: list[list[float]] = []
    monkeypatch.setattr(NormWatch, "recall", lambda _, norms: recalled.append(list(norms)))
    run("topology.updates=4", resume=folder)
    assert recalled[-2:] == [[norm for norms in recorded for norm in norms], []]  # the policy's, no critic's
    assert len(recalled[-2]) == 6
