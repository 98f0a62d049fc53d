"""Engines over a real vLLM server (its CPU build): the contract, publishing, what happens when it dies, a whole run."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_cases import CONTEXT, Server, decoder, serving, vllm_python, weights

from hotpot.engine.remote import make_remote_engine
from hotpot.engine.remote.hosts import VllmHost
from hotpot.errors import EngineError
from hotpot.experience import RunReader
from hotpot.models import checksum, next_token_logprobs, save_model
from hotpot.testing.contracts_engine import ENGINE_CONTRACTS, EngineCase, drain, generate, make_request
from hotpot.types import Purpose, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.mark.parametrize("contract", ENGINE_CONTRACTS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("kind", ["vllm", "vllm, continue", "openai"])
def test_contract(contract: Callable[[EngineCase], None], kind: str, server: Server) -> None:
    changes: dict[str, Any] = {"in_flight": "continue"} if kind == "vllm, continue" else {}
    contract(server.case(lambda: server.attach(kind.partition(",")[0], **changes)))


def test_requests_under_way_change_weights_between_two_tokens(server: Server) -> None:
    """Eight times as many requests as the server takes at once, so that some are in the middle whenever the weights come."""
    engine = server.attach("vllm", in_flight="continue", max_concurrency=256)
    case = server.case(lambda: engine)
    prompt, count = np.ones(3, dtype=np.int32), 256
    for number in range(count):
        engine.submit(make_request(case, number, prompt=prompt, max_tokens=120))
    early = engine.step()
    assert len(early) < count
    engine.publish(weights(1), 4)
    answers = [*early, *drain(engine, count - len(early)).values()]
    old, new = (0, checksum(weights(0))), (4, checksum(weights(1)))
    found = [[(span.policy_version, span.checksum) for span in answer.versions] for answer in answers]
    assert [old, new] in found
    assert all(spans in ([old], [old, new], [new]) for spans in found), found
    engine.close()


def test_at_another_temperature_both_log_probabilities_are_those_of_the_weights(server: Server) -> None:
    sampling = SamplingParams(temperature=0.7)
    engine = make_remote_engine(
        decoder(0),
        weights(0),
        settings=server.settings.model_copy(update={"url": server.owner.url}),
        max_context_tokens=CONTEXT - 1,
        sampling={Purpose.TRAINING: sampling},
    )
    request = make_request(server.case(lambda: engine), 0, sampling=sampling)
    answer = generate(engine, [request])["r0"]
    context = np.concatenate([request.prompt, answer.tokens])
    places = np.arange(len(request.prompt) - 1, len(context) - 1)
    raw = next_token_logprobs(decoder(0), context)[places].astype(np.float64)
    warm = raw / 0.7 - np.log(np.exp(raw / 0.7).sum(axis=-1, keepdims=True))
    picked = (np.arange(len(answer.tokens)), answer.tokens)
    np.testing.assert_allclose(answer.model_logprobs, raw[picked], atol=1e-4)
    np.testing.assert_allclose(answer.behaviour_logprobs, warm[picked], atol=1e-4)
    engine.close()


def test_a_reload_that_keeps_a_layer_is_found(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the head tied to the embedding: vLLM says that it loaded it, and keeps the head."""
    engine = server.attach("vllm")
    served = engine.info()
    with monkeypatch.context() as patched:
        patched.setattr(
            "hotpot.engine.remote.weights.save_served", lambda folder, policy: save_model(folder, policy, {})
        )
        with pytest.raises(EngineError, match=r"version 1 was not published.*Version 0 goes on serving"):
            engine.publish(weights(1), 1)
    assert engine.info() == served
    assert engine.publish(weights(1), 2).checksum == checksum(weights(1))
    engine.close()


def test_a_server_that_is_killed_comes_back_with_the_current_weights(server: Server) -> None:
    engine = server.owner
    engine.serving.take()
    engine.publish(weights(1), engine.info().policy_version + 1)
    case = server.case(lambda: engine)
    requests = [make_request(case, number, max_tokens=40) for number in range(6)]
    before = generate(engine, requests)
    for request in requests:
        engine.submit(request)
    early = {answer.request_id: answer for answer in engine.step()}
    host = engine.serving.host
    assert isinstance(host, VllmHost)
    assert host.process is not None
    assert host.process.pid is not None
    os.killpg(host.process.pid, signal.SIGKILL)
    after = early | drain(engine, len(requests) - len(early))
    for name, answer in before.items():
        assert answer.tokens.tolist() == after[name].tokens.tolist()
        assert answer.versions == after[name].versions


def hotpot(*words: str) -> str:
    """Run a command as a user does and return what it said."""
    program = [sys.executable, "-c", "from hotpot.cli.main import main; main()", *words]
    done = subprocess.run(program, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(
    1500
)  # two commands and a server of their own: two minutes, many more where others use the cores
def test_the_order_desk_trains_through_it(tmp_path: Path) -> None:
    engine = ["engine.kind=vllm", f"engine.python={vllm_python()}"]
    model, runs, recipe = str(tmp_path / "model"), str(tmp_path / "runs"), "recipes/order_desk.toml"
    hotpot("model", "warmstart", recipe, "warmstart.steps=300", "--out", model)
    small = ["rollout.tasks_per_batch=4", "rollout.samples_per_task=4", "topology.updates=2"]
    small += ["evaluation.num_tasks_final=8", "evaluation.greedy=false", f"model.path={model}"]
    hotpot("train", recipe, *small, *engine, f"run.folder={runs}", "run.id=through-vllm")
    reader = RunReader.open(Path(runs) / "through-vllm")
    events = reader.sql("select kind, detail from events where kind in ('publish', 'self_test')").to_pylist()
    assert sorted(event["kind"] for event in events) == ["publish", "publish", "self_test"]
    gaps = reader.sql("select logprob_difference_max as gap from updates").to_pylist()
    assert all(row["gap"] is None or row["gap"] < 1e-4 for row in gaps)
    (steps,) = reader.sql(
        "select count(*) as n, count(distinct span_policy_version) as v from steps"
    ).to_pylist()
    assert steps["n"] > 0
