"""Each sampled token tells the number of the weights that sampled it: it is the version its span names, whatever happens."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotpot.config.sections import EngineSection
from hotpot.engine.embedded import EmbeddedEngine
from hotpot.errors import EngineError
from hotpot.models import Decoder, checksum
from hotpot.testing.contracts_engine import CONTRACT_SAMPLING
from hotpot.testing.toy_weights import NUM_NUMBERS, ROUNDING, ToyModel, number_of
from hotpot.types import Generation, GenerationRequest, Purpose, SampleKey, SamplingParams

TOY = ToyModel(vocab_size=40, max_context_tokens=96, stop_tokens=(3,), stop_share=0.1)
PRESSURE: dict[str, Any] = {"max_concurrency": 3, "prefill_tokens": 24}
"""Settings under which requests wait, prompts are cut in pieces, and sessions lose their place."""

SAMPLING = {**CONTRACT_SAMPLING, Purpose.EVALUATION: SamplingParams(temperature=0.8, top_k=30)}


def make_embedded(version: int = 0, **changes: Any) -> EmbeddedEngine:
    return EmbeddedEngine(
        TOY.config,
        TOY.weights(number_of(version)),
        settings=EngineSection(**{**PRESSURE, **changes}),
        max_context_tokens=TOY.max_context_tokens,
        sampling=SAMPLING,
        policy_version=version,
    )


# ---- the toy weights themselves ----


@pytest.mark.parametrize("stop_tokens", [(), (3, 8)])
def test_the_formula_is_the_decoder_and_every_number_is_told_from_one_token(
    stop_tokens: tuple[int, ...],
) -> None:
    toy = dataclasses.replace(TOY, stop_tokens=stop_tokens)
    model = Decoder(toy.config)
    tokens = torch.arange(30)[None] % toy.vocab_size
    for number in range(NUM_NUMBERS):
        model.load_state_dict(dict(toy.weights(number)))
        with torch.no_grad():
            own = model.logits(model(tokens, torch.arange(30)[None])).log_softmax(-1)[0]
        for position in (0, 29):
            for token, logprob in enumerate(own[position].tolist()):
                assert abs(logprob - toy.logprob(token, number)) <= ROUNDING / 4
                assert toy.number(token, logprob) == number


def test_one_stale_position_in_fifty_shows_and_never_looks_like_another_number() -> None:
    for number in range(1, NUM_NUMBERS):
        for token in (0, 1, 3):
            old, new = (TOY.logprob(token, n) and n * (5**0.5 - 1) / 2 % 1.0 for n in (number - 1, number))
            mixed = TOY.logprob(token, number, stamp=(49 * new + old) / 50)
            assert abs(mixed - TOY.logprob(token, number)) > ROUNDING
            for toy in (
                TOY,
                ToyModel(vocab_size=287, max_context_tokens=9, stop_tokens=(6,), stop_share=0.3),
            ):
                for stamp in (0.0, old, 0.5, new, 1.0):
                    assert toy.number(token, toy.logprob(token, number, stamp=stamp)) == number
    with pytest.raises(ValueError, match="no number"):
        TOY.number(0, -50.0)


def answer(logprobs: list[float], version: int = 5) -> Generation:
    engine = make_embedded(version)
    engine.submit(request(0, np.ones(4, np.int32), max_tokens=len(logprobs)))
    while not (found := engine.step()):
        pass
    tokens = np.zeros(len(logprobs), np.int32)
    span = dataclasses.replace(found[0].versions[0], length=len(logprobs))
    return dataclasses.replace(
        found[0], tokens=tokens, versions=(span,), model_logprobs=np.array(logprobs, np.float32)
    )


def test_the_check_notices_another_version_another_checksum_and_a_stale_cache() -> None:
    known = {5: checksum(TOY.weights(5))}
    right, other = TOY.logprob(0, 5), TOY.logprob(0, 6)
    TOY.check(answer([right, right]), known)
    with pytest.raises(AssertionError, match="token 1 is of number 6"):
        TOY.check(answer([right, other]), known)
    with pytest.raises(AssertionError, match="published as"):
        TOY.check(answer([right]), {5: "x"})
    with pytest.raises(AssertionError, match="rests on keys and values of other weights"):
        TOY.check(answer([TOY.logprob(0, 5, stamp=0.5)]), known)


# ---- under random operations ----


def request(number: int, prompt: Any, **changes: Any) -> GenerationRequest:
    made = GenerationRequest(
        request_id=f"r{number}",
        session_id=f"s{number}",
        prompt=np.asarray(prompt, np.int32),
        stop_tokens=TOY.stop_tokens,
        max_tokens=8,
        purpose=Purpose.TRAINING,
        sampling=SAMPLING[Purpose.TRAINING],
        key=SampleKey(seed=1, issue=number, sample=0, step=0),
    )
    return dataclasses.replace(made, **changes)


class Torn(dict[str, torch.Tensor]):
    """Weights of which one changes with every look, as under an optimiser step."""

    def __getitem__(self, name: str) -> torch.Tensor:
        found = super().__getitem__(name)
        if name == "norm.weight":
            found += 1e-3
        return found.clone()

    def items(self) -> Any:
        return [(name, self[name]) for name in self]


def misfits(weights: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield what must be refused: a tensor less, one of another shape, NaN, another type."""
    yield {name: tensor for name, tensor in weights.items() if name != "norm.weight"}
    yield {**weights, "norm.weight": torch.ones(9)}
    yield {**weights, "norm.weight": torch.full_like(weights["norm.weight"], torch.nan)}
    yield {**weights, "norm.weight": weights["norm.weight"].double()}


class Versions(RuleBasedStateMachine):
    """Requests, steps and publishes in any order; the answers tell the truth about themselves."""

    make: Callable[[], Any] = staticmethod(make_embedded)

    @initialize()
    def start(self) -> None:
        self.engine = self.make()
        self.checksums = {0: checksum(TOY.weights(0))}
        self.version = self.next_request = 0
        self.out: set[str] = set()
        self.contexts: dict[str, Any] = {}
        self.ended: dict[str, Any] = {}

    @rule(
        count=st.integers(1, 8),
        size=st.integers(1, 70),
        shared=st.booleans(),
        purpose=st.sampled_from([Purpose.TRAINING, Purpose.EVALUATION]),
        max_tokens=st.integers(1, 30),
    )
    def submit(self, count: int, size: int, shared: bool, purpose: Purpose, max_tokens: int) -> None:
        """Send prompts, some alike from the start, many more than there is room for."""
        for _ in range(count):
            own = [] if shared else [self.next_request % TOY.vocab_size]
            self._send(f"s{self.next_request}", [1] * size + own, purpose, max_tokens)

    @precondition(lambda self: self.ended)
    @rule(which=st.integers(0, 10**6), more=st.integers(1, 10), changed=st.booleans())
    def go_on(self, which: int, more: int, changed: bool) -> None:
        """Send the next step of a session that was answered, its history rewritten or not."""
        session = sorted(self.ended)[which % len(self.ended)]
        context = self.ended.pop(session)
        if changed:
            context = np.append(context[: len(context) // 2], [7])
        prompt = np.append(context, np.full(more, 2))[: TOY.max_context_tokens - 1]
        self._send(session, prompt, Purpose.TRAINING, 8)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        """Step, and check what comes out."""
        for _ in range(count):
            for generation in self.engine.step():
                self.out.remove(generation.request_id)
                TOY.check(generation, self.checksums)
                session, prompt = self.contexts.pop(generation.request_id)
                self.ended[session] = np.concatenate([prompt, generation.tokens])

    @rule(ahead=st.integers(1, 3))
    def publish(self, ahead: int) -> None:
        """Serve the next version."""
        version = self.version + ahead
        weights = TOY.weights(number_of(version))
        report = self.engine.publish(weights, version)
        self.version, self.checksums[version] = version, checksum(weights)
        assert report.checksum == self.checksums[version]
        for tensor in weights.values():  # the engine has a copy
            tensor.fill_(9.0)

    @rule(which=st.integers(0, 3))
    def publish_what_does_not_fit(self, which: int) -> None:
        """Nothing changes."""
        bad = list(misfits(dict(TOY.weights(number_of(self.version + 1)))))[which]
        with pytest.raises(EngineError):
            self.engine.publish(bad, self.version + 1)

    @rule()
    def publish_while_an_optimiser_writes(self) -> None:
        """Nothing changes."""
        torn = Torn(TOY.weights(number_of(self.version + 1)))
        with pytest.raises(EngineError):
            self.engine.publish(torn, self.version + 1)

    @rule(back=st.integers(0, 3))
    def publish_an_old_version(self, back: int) -> None:
        """Nothing changes."""
        with pytest.raises(EngineError):
            self.engine.publish(TOY.weights(number_of(self.version + 1)), self.version - back)

    @invariant()
    def what_is_served_is_what_was_published(self) -> None:
        """Also after a publish that failed."""
        if hasattr(self, "engine"):
            info = self.engine.info()
            assert (info.policy_version, info.checksum) == (self.version, self.checksums[self.version])

    def teardown(self) -> None:
        """Everything that was taken is answered."""
        if hasattr(self, "engine"):
            for _ in range(2000):
                if not self.out:
                    break
                self.step(1)
            assert not self.out
            self.engine.close()

    def _send(self, session: str, prompt: Any, purpose: Purpose, max_tokens: int) -> None:
        number = self.next_request
        self.next_request += 1
        made = request(
            number,
            prompt,
            session_id=session,
            purpose=purpose,
            sampling=SAMPLING[purpose],
            max_tokens=max_tokens,
        )
        self.engine.submit(made)
        self.out.add(made.request_id)
        self.contexts[made.request_id] = (session, made.prompt)


QUICK = settings(
    max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


class TestVersions(Versions.TestCase):  # type: ignore[name-defined,misc]
    """A few histories in every run of the tests."""

    settings = QUICK


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_versions_hold_over_a_long_history(seed: int) -> None:
    """Thousands of operations on one engine: what shows only once every place was used many times."""
    chance = np.random.default_rng(seed)
    machine = Versions()
    machine.start()
    for _ in range(1500):
        kind = chance.choice(6, p=[0.25, 0.2, 0.4, 0.07, 0.04, 0.04])
        if kind == 0 and len(machine.out) < 40:
            machine.submit(
                count=int(chance.integers(1, 9)), size=int(chance.integers(1, 71)), shared=bool(chance.integers(2)),
                purpose=Purpose.TRAINING if chance.integers(2) else Purpose.EVALUATION,
                max_tokens=int(chance.integers(1, 31)),
            )  # fmt: skip
        elif kind == 1 and machine.ended:
            machine.go_on(
                which=int(chance.integers(10**6)),
                more=int(chance.integers(1, 11)),
                changed=chance.random() < 0.2,
            )
        elif kind == 3:
            machine.publish(ahead=1)
        elif kind == 4:
            machine.publish_what_does_not_fit(which=int(chance.integers(4)))
        elif kind == 5:
            machine.publish_while_an_optimiser_writes()
        else:
            machine.step(count=int(chance.integers(1, 6)))
        machine.what_is_served_is_what_was_published()
    machine.teardown()
    assert machine.version > 50
