"""The engine contract, for the fake and the embedded engine; and that the contracts can fail."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hotpot.config.sections import EngineSection
from hotpot.engine.embedded import EmbeddedEngine
from hotpot.errors import EngineError
from hotpot.models import Decoder, DecoderConfig, load_policy
from hotpot.testing.contracts_engine import (
    CONTRACT_SAMPLING,
    ENGINE_CONTRACTS,
    EngineCase,
    drain,
    generate,
    make_request,
)
from hotpot.testing.engine import FakeEngine
from hotpot.testing.modules import write_module
from hotpot.types import Purpose

VOCAB, CONTEXT = 40, 64


def scripted(prompt: NDArray[np.int32]) -> Iterator[int]:
    rng = np.random.default_rng(prompt.tolist())
    while True:
        yield int(rng.integers(0, VOCAB))


def decoder(seed: int) -> Decoder:
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
        )
    )
    model.initialize(seed)
    return model


def make_fake(**changes: Any) -> FakeEngine:
    return FakeEngine(
        scripted, sampling=CONTRACT_SAMPLING, vocab_size=VOCAB, max_context_tokens=CONTEXT, **changes
    )


def make_embedded(**changes: Any) -> EmbeddedEngine:
    model = decoder(0)
    return EmbeddedEngine(
        model.config,
        dict(model.named_parameters()),
        settings=EngineSection(**{"max_concurrency": 8, **changes}),
        max_context_tokens=CONTEXT,
        sampling=CONTRACT_SAMPLING,
    )


def case(make: Callable[[], Any]) -> EngineCase:
    return EngineCase(
        make=make,
        weights=lambda number: dict(decoder(number).named_parameters()),
        overrides=lambda engine, purpose: engine.gate.overrides[purpose],
        vocab_size=VOCAB,
        max_context_tokens=CONTEXT,
    )


@cache
def module(kind: str, seed: int = 0) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return load_policy(write_module(Path(folder), kind, seed=seed), "transformers")


def make_module_engine(kind: str, **changes: Any) -> EmbeddedEngine:
    policy = module(kind)
    return EmbeddedEngine(
        policy,
        policy.state_dict(),
        settings=EngineSection(**{"max_concurrency": 8, **changes}),
        max_context_tokens=CONTEXT,
        sampling=CONTRACT_SAMPLING,
    )


MODULE_MAKERS: dict[str, Callable[[], Any]] = {
    "gpt2": partial(make_module_engine, "gpt2"),
    "gpt2, tiny prefills": partial(make_module_engine, "gpt2", max_concurrency=5, prefill_tokens=4),
    "mistral": partial(make_module_engine, "mistral"),
}
"""With a cache, and with a window: computed again for every token."""

MAKERS: dict[str, Callable[[], Any]] = {
    "fake": make_fake,
    "fake, two tokens a step": lambda: make_fake(tokens_per_step=2, max_concurrency=3),
    "embedded": make_embedded,
    "embedded, one slot": lambda: make_embedded(max_concurrency=1),
    "embedded, tiny prefills": lambda: make_embedded(max_concurrency=5, prefill_tokens=4, admit_share=1.0),
}


@pytest.mark.parametrize("contract", ENGINE_CONTRACTS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("maker", MAKERS)
def test_contract(contract: Callable[[EngineCase], None], maker: str) -> None:
    contract(case(MAKERS[maker]))


@pytest.mark.parametrize("contract", ENGINE_CONTRACTS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("maker", MODULE_MAKERS)
def test_contract_with_modules(contract: Callable[[EngineCase], None], maker: str) -> None:
    kind = maker.partition(",")[0]
    contract(
        replace(case(MODULE_MAKERS[maker]), weights=lambda number: dict(module(kind, number).state_dict()))
    )


@pytest.mark.parametrize("kind", ["gpt2", "mistral", "bloom", "mamba"])
def test_a_module_is_sampled_from_as_it_is(kind: str) -> None:
    """Beside others and with what is kept of earlier turns: each token's log-probability is the module's own."""
    engine, the_case = make_module_engine(kind, max_concurrency=5, prefill_tokens=16), case(make_fake)
    answers: dict[str, Any] = {}
    for turn in range(2):
        requests = [
            make_request(the_case, number, request_id=f"{turn}:{number}", max_tokens=9) for number in range(5)
        ]
        if answers:
            requests = [
                replace(r, prompt=np.concatenate([r.prompt, answers[f"0:{n}"].tokens, r.prompt[:2]]))
                for n, r in enumerate(requests)
            ]
        answers = generate(engine, requests)
        for request in requests:
            answer = answers[request.request_id]
            tokens = torch.from_numpy(np.concatenate([request.prompt, answer.tokens]).astype(np.int64))[None]
            with torch.no_grad():
                own = module(kind).module(input_ids=tokens, use_cache=False).logits.log_softmax(-1)[0]
            sampled = range(len(request.prompt), tokens.shape[1])
            expected = [float(own[at - 1, tokens[0, at]]) for at in sampled]
            np.testing.assert_allclose(answer.model_logprobs, expected, atol=1e-4)
    reused = [answer.report.reused_tokens for answer in answers.values()]
    assert any(reused) == module(kind).caches


class Broken(FakeEngine):
    """Wrong in one way at a time."""

    fault = ""

    def submit(self, request: Any) -> None:
        if self.fault == "takes overrides" and request.purpose is Purpose.TRAINING:
            self.gate.sampling[Purpose.TRAINING] = request.sampling
        super().submit(request)

    def step(self) -> Any:
        finished = super().step()
        if self.fault == "answers twice":
            return finished + finished
        if self.fault == "loses" and finished:
            return finished[1:]
        return finished

    def publish(self, weights: Any, policy_version: int) -> Any:
        if self.fault == "reuses versions":
            self._version = min(self._version, policy_version - 1)
        return super().publish(weights, policy_version)


@pytest.mark.parametrize(
    "fault", ["takes overrides", "answers twice", "loses", "reuses versions", "depends on company"]
)
def test_contracts_notice_a_broken_engine(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotpot.testing.contracts_engine._MAX_IDLE_STEPS", 50)
    calls = iter(range(10_000))

    def whimsical(prompt: NDArray[np.int32]) -> Iterator[int]:
        return scripted(np.append(prompt, next(calls)).astype(np.int32))

    def make() -> Broken:
        engine = Broken(
            whimsical if fault == "depends on company" else scripted,
            sampling=CONTRACT_SAMPLING,
            vocab_size=VOCAB,
            max_context_tokens=CONTEXT,
        )
        engine.fault = fault
        return engine

    complaints = []
    for contract in ENGINE_CONTRACTS:
        try:
            contract(case(make))
        except AssertionError as complaint:
            complaints.append(str(complaint))
    assert complaints


def test_a_script_that_ends_early_is_an_error() -> None:
    engine = FakeEngine(lambda prompt: [1, 2], vocab_size=VOCAB)
    engine.submit(make_request(case(make_fake), 0, max_tokens=5))
    with pytest.raises(EngineError, match="script ended after 2 tokens"):
        engine.step()


def test_fake_splits_spans_where_a_publish_falls_in_flight() -> None:
    fake = make_fake(tokens_per_step=3)
    the_case = case(make_fake)
    fake.submit(make_request(the_case, 0, max_tokens=8))
    assert fake.step() == []
    fake.publish({}, 4)
    answer = drain(fake, 1)["r0"]
    assert [(s.policy_version, s.checksum, s.length) for s in answer.versions] == [
        (0, "fake-0", 3),
        (4, "fake-4", 5),
    ]
    assert [r.request_id for r in fake.submitted] == ["r0"]


def test_fake_by_default_serves_every_purpose() -> None:
    fake = FakeEngine(scripted, vocab_size=VOCAB)
    the_case = case(make_fake)
    for purpose in Purpose:
        request = make_request(
            the_case, 0, purpose=purpose, sampling=fake.gate.sampling[purpose], stop_tokens=()
        )
        assert len(generate(fake, [request])["r0"].tokens) == request.max_tokens
