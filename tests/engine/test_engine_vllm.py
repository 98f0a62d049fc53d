"""Engines over a real vLLM server (its CPU build): the contract, publishing, what happens when it dies, a whole run."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_cases import CONTEXT, Server, decoder, serving, vllm_python, weights

from hotpot.cli.main import main
from hotpot.engine.remote import make_remote_engine
from hotpot.engine.remote.hosts import VllmHost
from hotpot.errors import EngineError
from hotpot.models import checksum, next_token_logprobs, save_model
from hotpot.testing.contracts_engine import ENGINE_CONTRACTS, EngineCase, drain, generate, make_request
from hotpot.types import Purpose, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


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
    engine = server.attach("vllm", in_flight="continue")
    case = server.case(lambda: engine)
    engine.submit(make_request(case, 0, prompt=np.ones(3, dtype=np.int32), max_tokens=120))
    assert engine.step() == []
    engine.publish(weights(1), 4)
    spans = drain(engine, 1)["r0"].versions
    assert [(one.policy_version, one.checksum) for one in spans] == [
        (0, checksum(weights(0))),
        (4, checksum(weights(1))),
    ]
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
    engine.retake()
    engine.publish(weights(1), engine.info().policy_version + 1)
    case = server.case(lambda: engine)
    requests = [make_request(case, number, max_tokens=40) for number in range(6)]
    before = generate(engine, requests)
    for request in requests:
        engine.submit(request)
    assert engine.step() == []
    host = engine.host
    assert isinstance(host, VllmHost)
    assert host.process is not None
    assert host.process.pid is not None
    os.killpg(host.process.pid, signal.SIGKILL)
    after = drain(engine, len(requests))
    for name, answer in before.items():
        assert answer.tokens.tolist() == after[name].tokens.tolist()
        assert answer.versions == after[name].versions


def test_the_order_desk_trains_through_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, runs = tmp_path / "model", tmp_path / "runs"
    recipe = "recipes/order_desk.toml"
    assert main(["model", "warmstart", recipe, "warmstart.steps=300", "--out", str(model)]) == 0
    small = ["rollout.tasks_per_batch=4", "rollout.samples_per_task=4", "topology.updates=2"]
    small += ["evaluation.num_tasks_final=8", "evaluation.greedy=false", f"model.path={model}"]
    engine = ["engine.kind=vllm", f"engine.python={vllm_python()}"]
    assert main(["train", recipe, *small, *engine, "--runs", str(runs), "--run-id", "through-vllm"]) == 0
    capfd.readouterr()
    run = str(runs / "through-vllm")
    asked = "select kind, json_get_str(detail, 'problem') as problem from events where kind in ('publish', 'self_test')"
    assert main(["sql", run, asked, "--json"]) == 0
    said = capfd.readouterr().out
    assert said.count("publish") == 2
    assert said.count("self_test") == 1
