"""Engines behind HTTP against a stub of a server: the contract, every fault, publishing, recovery."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stub_server import StubServer

from hotpot.config.sections import OpenAIEngineSection, VllmEngineSection
from hotpot.engine.remote import RemoteEngine, borrow, make_remote_engine
from hotpot.errors import EngineError
from hotpot.models import Decoder, DecoderConfig, checksum, next_token_logprobs
from hotpot.testing.contracts_engine import (
    CONTRACT_SAMPLING,
    ENGINE_CONTRACTS,
    EngineCase,
    drain,
    generate,
    make_request,
)
from hotpot.types import Purpose, SamplingParams

VOCAB, CONTEXT = 40, 64


def decoder(seed: int, *, tied: bool = True) -> Decoder:
    model = Decoder(
        DecoderConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            max_context_tokens=CONTEXT,
            initializer_range=0.3,
            tie_embeddings=tied,
        )
    )
    model.initialize(seed)
    return model


def weights(number: int) -> dict[str, torch.Tensor]:
    return dict(decoder(number).named_parameters())


class Bench:
    """A stub and the engines made over it."""

    def __init__(self) -> None:
        self.sampling = dict(CONTRACT_SAMPLING)
        self.server: StubServer | None = None
        self.engines: list[RemoteEngine] = []
        self.context = CONTEXT

    @property
    def stub(self) -> StubServer:
        if self.server is None:
            self.server = StubServer(decoder(0), sampling=self.sampling, max_context_tokens=CONTEXT)
        return self.server

    def vllm(self, **changes: Any) -> RemoteEngine:
        told = {"max_concurrency": 16, "retries": 3, "request_timeout_s": 5.0, "python": "none", **changes}
        return self.make(VllmEngineSection(url=self.stub.url, **told))

    def openai(self, **changes: Any) -> RemoteEngine:
        told = {"max_concurrency": 16, "retries": 3, "request_timeout_s": 5.0, "weights": "vllm", **changes}
        return self.make(OpenAIEngineSection(url=self.stub.url, salted=True, **told))

    def make(self, settings: VllmEngineSection | OpenAIEngineSection) -> RemoteEngine:
        self.settings = settings
        engine = make_remote_engine(
            decoder(0),
            weights(0),
            settings=settings,
            max_context_tokens=self.context,
            sampling=self.sampling,
        )
        self.engines.append(engine)
        return engine

    def case(self, make: Callable[[], Any]) -> EngineCase:
        return EngineCase(
            make=make,
            weights=weights,
            overrides=lambda engine, purpose: engine.gate.overrides[purpose],
            vocab_size=VOCAB,
            max_context_tokens=CONTEXT,
        )

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        if self.server is not None:
            self.server.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    found = Bench()
    yield found
    found.close()


def ask(bench: Bench, engine: RemoteEngine, *numbers: int, **changes: Any) -> dict[str, Any]:
    case = bench.case(bench.vllm)
    return generate(engine, [make_request(case, number, **changes) for number in numbers])


@pytest.mark.parametrize("contract", ENGINE_CONTRACTS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("kind", ["vllm", "vllm, continue", "openai"])
def test_contract(contract: Callable[[EngineCase], None], kind: str, bench: Bench) -> None:
    make = {
        "vllm": bench.vllm,
        "vllm, continue": lambda: bench.vllm(in_flight="continue"),
        "openai": bench.openai,
    }[kind]
    contract(bench.case(make))


@pytest.mark.parametrize("fault", ["429", "503", "500", "reset", "cut", "abort", "foreign weights"])
def test_what_passes_is_asked_again_and_gives_the_same_tokens(fault: str, bench: Bench) -> None:
    engine = bench.vllm()
    calm = ask(bench, engine, 0, 1, 2)
    bench.stub.faults.extend([fault, "", fault])
    stormy = ask(bench, engine, 0, 1, 2)
    for name, answer in calm.items():
        assert answer.tokens.tolist() == stormy[name].tokens.tolist()


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("400", "HTTP 400"),
        ("nonsense", "no JSON"),
        ("other model", "'another'"),
        ("no log-probability", "None"),
        ("NaN", "-9999"),
        ("one short", "logprobs are of"),
        ("other tokens", "logprobs are of"),
        ("truncated prompt", "prompt tokens"),
        ("finish", "content_filter"),
        ("gap", "weight versions"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_it_and_the_others_go_on(
    fault: str, named: str, bench: Bench
) -> None:
    engine = bench.vllm(max_concurrency=1)
    case = bench.case(bench.vllm)
    for number in range(3):
        engine.submit(make_request(case, number))
    bench.stub.faults.extend(["", fault])
    answered: list[str] = []

    def go_on() -> None:
        while True:
            answered.extend(one.request_id for one in engine.step())

    with pytest.raises(EngineError, match=named) as caught:
        go_on()
    assert "'r1'" in str(caught.value)
    assert answered + list(drain(engine, 2 - len(answered))) == ["r0", "r2"]
    assert engine.idle


def test_a_server_that_never_can_ends_the_run_with_its_words(bench: Bench) -> None:
    engine = bench.vllm(retries=1, recoveries=1)
    bench.stub.faults.extend(["503"] * 2 + [""] * 8 + ["503"] * 2)
    engine.submit(make_request(bench.case(bench.vllm), 0))
    with pytest.raises(EngineError, match=r"failed 2 times in a row.*HTTP 503.*not now"):
        drain(engine, 1)


def test_a_server_that_hangs_is_left_at_the_deadline_and_asked_again(bench: Bench) -> None:
    engine = bench.vllm(request_timeout_s=0.4)
    bench.stub.faults.append("hang")
    assert list(ask(bench, engine, 3)) == ["r3"]


def test_closing_breaks_off_what_hangs(bench: Bench) -> None:
    """Closing that waited for the answer would last until the test's own deadline."""
    engine = bench.vllm(request_timeout_s=600.0)
    bench.stub.faults.append("hang")
    engine.submit(make_request(bench.case(bench.vllm), 0))
    assert engine.step() == []
    while not bench.stub.hanging:
        time.sleep(0.001)
    engine.close()


@pytest.mark.parametrize("who", ["recipe", "server"])
def test_no_more_tokens_are_out_than_the_budget_holds_and_all_are_answered(who: str, bench: Bench) -> None:
    bench.stub.cache_tokens = 64 if who == "server" else 100_000
    engine = bench.vllm(max_tokens_in_flight=64 if who == "recipe" else 5000)
    bench.stub.most_out = 0
    bench.stub.slow_s = 0.001
    answers = ask(bench, engine, *range(40), prompt=np.ones(20, dtype=np.int32), max_tokens=10)
    assert len(answers) == 40
    assert bench.stub.most_out == 2  # 30 tokens each


def test_weights_come_back_after_somebody_restarted_the_server(bench: Bench) -> None:
    engine = bench.vllm()
    before = ask(bench, engine, 5)["r5"]
    bench.stub.restart(decoder(9))
    after = ask(bench, engine, 5)["r5"]
    assert after.tokens.tolist() == before.tokens.tolist()
    assert after.versions == before.versions


@pytest.mark.parametrize("in_flight", ["finish", "continue"])
def test_a_reload_that_does_nothing_is_found_and_the_old_version_goes_on(
    in_flight: str, bench: Bench
) -> None:
    engine = bench.vllm(in_flight=in_flight)
    served, before = engine.info(), ask(bench, engine, 5)["r5"]
    bench.stub.stale = True
    with pytest.raises(EngineError, match=r"policy version 7 was not published.*Version 0 goes on serving"):
        engine.publish(weights(1), 7)
    assert engine.info() == served
    after = ask(bench, engine, 5)["r5"]
    assert (after.tokens.tolist(), after.versions) == (before.tokens.tolist(), before.versions)
    bench.stub.stale = False
    assert engine.publish(weights(1), 8).checksum == checksum(weights(1))


def test_a_small_change_that_was_not_loaded_is_found_below_the_tolerance(bench: Bench) -> None:
    engine = bench.vllm(publish_tolerance=0.5)
    moved = {name: tensor * 1.0005 for name, tensor in weights(0).items()}
    bench.stub.stale = True
    with pytest.raises(EngineError, match="those of the former weights"):
        engine.publish(moved, 1)


@pytest.mark.parametrize(("eager", "said"), [(True, "compile: 1"), (False, "compile: as it likes")])
def test_a_server_that_does_not_start_is_quoted_and_eager_means_that_nothing_is_compiled(
    eager: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "compile: ${TORCH_COMPILE_DISABLE:-as it likes}"\nexit 7\n')
    program.chmod(0o755)
    bench = Bench()
    with pytest.raises(EngineError, match=rf"exit code 7: {said}; see .*\.log") as told:
        bench.make(VllmEngineSection(python=program, eager=eager))
    Path(str(told.value).rsplit("see ", 1)[1]).unlink()


def test_a_server_with_other_weights_is_refused_at_the_start(bench: Bench) -> None:
    bench.stub.restart(decoder(4))
    with pytest.raises(EngineError, match="does not serve version 0"):
        bench.openai(weights="fixed")
    bench.stub.logprobs_mode = "raw_logprobs"
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        bench.vllm()


def test_requests_under_way_go_on_under_the_new_weights_and_say_so(bench: Bench) -> None:
    engine = bench.vllm(in_flight="continue")
    bench.stub.slow_s = 0.01
    engine.submit(make_request(bench.case(bench.vllm), 0, max_tokens=40))
    assert engine.step() == []
    engine.publish(weights(1), 3)
    bench.stub.slow_s = 0.0
    answer = drain(engine, 1)["r0"]
    assert [(one.policy_version, one.checksum) for one in answer.versions] == [
        (0, checksum(weights(0))),
        (3, checksum(weights(1))),
    ]


def test_at_another_temperature_the_raw_log_probability_is_asked_for(bench: Bench) -> None:
    bench.sampling = {Purpose.TRAINING: SamplingParams(temperature=0.7)}
    with pytest.raises(EngineError, match="one token of room"):
        bench.vllm()
    bench.context -= 1
    engine = bench.vllm()
    sampling = bench.sampling[Purpose.TRAINING]
    request = make_request(bench.case(bench.vllm), 0, sampling=sampling)
    answer = generate(engine, [request])["r0"]
    context = np.concatenate([request.prompt, answer.tokens])
    places = np.arange(len(request.prompt) - 1, len(context) - 1)
    raw = next_token_logprobs(decoder(0), context)[places].astype(np.float64)
    warm = raw / 0.7 - np.log(np.exp(raw / 0.7).sum(axis=-1, keepdims=True))
    picked = (np.arange(len(answer.tokens)), answer.tokens)
    np.testing.assert_allclose(answer.model_logprobs, raw[picked], atol=1e-5)
    np.testing.assert_allclose(answer.behaviour_logprobs, warm[picked], atol=1e-5)
    with pytest.raises(EngineError, match="raw model's log-probability"):
        bench.openai()
    with pytest.raises(EngineError, match="raw model's log-probability"):
        bench.vllm(in_flight="continue")


def test_a_borrowed_server_gets_its_weights_back(bench: Bench) -> None:
    engine = bench.vllm()
    before = ask(bench, engine, 5)["r5"]
    other = borrow(engine, decoder(2), weights(2), bench.settings)
    assert other.info().checksum == checksum(weights(2))
    other.publish(weights(3), 1)
    other.close()
    after = ask(bench, engine, 5)["r5"]
    assert (after.tokens.tolist(), after.versions) == (before.tokens.tolist(), before.versions)


def test_weights_of_another_shape_are_refused_before_the_server_hears_of_them(bench: Bench) -> None:
    engine = bench.vllm()
    spoiled = dict(weights(1))
    spoiled.pop("norm.weight")
    with pytest.raises(EngineError, match=r"missing \['norm.weight'\]"):
        engine.publish(spoiled, 1)
    assert engine.info().policy_version == 0
    assert list(ask(bench, engine, 1)) == ["r1"]
    for number in (1, 2):  # the copy that serves was not written over
        assert engine.publish(weights(number), number).checksum == checksum(weights(number))
