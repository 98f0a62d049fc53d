"""The embedded engine in deterministic mode: a request's tokens and log-probabilities hang on nothing but the request."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.config.sections import EngineSection
from hotpot.engine.embedded import EmbeddedEngine, exact_passes
from hotpot.engine.embedded import budget as budget_module
from hotpot.errors import EngineError, HotpotError
from hotpot.models import Decoder, DecoderConfig, use_threads
from hotpot.types import Generation, GenerationRequest, Purpose, SampleKey, SamplingParams

VOCAB, CONTEXT = 101, 300
SAMPLING = {
    Purpose.TRAINING: SamplingParams(temperature=0.7),
    Purpose.EVALUATION: SamplingParams(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.2),
    Purpose.EVALUATION_GREEDY: SamplingParams(temperature=0.0),
}
NUM_REQUESTS = 64


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    use_threads(1)
    yield
    use_threads(before)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    made = Decoder(
        DecoderConfig(
            vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_layers=2, num_heads=6, num_kv_heads=2,
            max_context_tokens=CONTEXT, initializer_range=0.3,
        )
    )  # fmt: skip
    made.initialize(2)
    return made


def make_engine(
    decoder: Decoder, *, rows: int = 8, piece: int = 2048, budget: int = 1 << 28
) -> EmbeddedEngine:
    return EmbeddedEngine(
        decoder.config,
        decoder.state_dict(),
        settings=EngineSection(
            max_concurrency=rows, prefill_tokens=piece, admit_share=0.01, kv_cache_bytes=budget
        ),
        max_context_tokens=CONTEXT,
        sampling=SAMPLING,
        exact=True,
    )


def make_request(number: int) -> GenerationRequest:
    rng = np.random.default_rng(number)
    purpose = list(SAMPLING)[number % 3]
    # A third of the prompts are another's, and a third begin as another does.
    of = np.random.default_rng(number if number % 4 else 4 * (number // 12))
    prompt = of.integers(0, VOCAB, int(of.integers(1, 250))).astype(np.int32)
    if number % 4 == 1:
        prompt = np.concatenate([prompt[:40], rng.integers(0, VOCAB, 9).astype(np.int32)])
    return GenerationRequest(
        request_id=f"r{number}",
        session_id=f"s{number}",
        prompt=prompt,
        stop_tokens=(3,),
        max_tokens=int(rng.integers(1, 30)),
        purpose=purpose,
        sampling=SAMPLING[purpose],
        key=SampleKey(seed=1, issue=number, sample=0, step=0),
    )


def drain(engine: EmbeddedEngine) -> dict[str, Generation]:
    found = {}
    while not engine.idle:
        found.update({one.request_id: one for one in engine.step()})
    return found


def bits(answer: Generation, begin: int = 0) -> tuple[bytes, ...]:
    arrays = (answer.tokens, answer.behaviour_logprobs, answer.model_logprobs)
    return tuple(array[begin:].tobytes() for array in arrays)


@pytest.fixture(scope="module")
def alone(decoder: Decoder) -> dict[str, Generation]:
    """Every request, each answered by an engine that has nothing else to do and remembers nothing."""
    use_threads(1)
    found: dict[str, Generation] = {}
    for number in range(NUM_REQUESTS):
        engine = make_engine(decoder, rows=1)
        engine.submit(make_request(number))
        found |= drain(engine)
    return found


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    numbers=st.lists(st.integers(0, NUM_REQUESTS - 1), min_size=1, max_size=12, unique=True),
    rows=st.integers(1, 9),
    piece=st.sampled_from([1, 2, 7, 31, 64, 300, 2048]),
    pauses=st.lists(st.integers(0, 9), min_size=12, max_size=12),
)
def test_company_order_and_pieces_change_no_bit(decoder, alone, numbers, rows, piece, pauses) -> None:
    engine, found = make_engine(decoder, rows=rows, piece=piece), {}
    for number, pause in zip(numbers, pauses, strict=False):
        engine.submit(make_request(number))
        for _ in range(pause):
            found |= {one.request_id: one for one in engine.step()}
    found |= drain(engine)
    assert {name: bits(answer) for name, answer in found.items()} == {
        f"r{number}": bits(alone[f"r{number}"]) for number in numbers
    }


def test_among_64_and_then_again_on_a_warm_cache(decoder, alone) -> None:
    engine = make_engine(decoder, rows=64)
    for attempt in range(2):
        for number in range(NUM_REQUESTS):
            engine.submit(make_request(number))
        for name, answer in drain(engine).items():
            assert bits(answer) == bits(alone[name]), (attempt, name)
    assert answer.report.reused_tokens > 0


def test_a_next_step_on_kept_keys_is_what_a_cold_engine_says(decoder, alone) -> None:
    warm = make_engine(decoder, rows=12)
    firsts = [make_request(number) for number in range(12)]
    for first in firsts:
        warm.submit(first)
    drain(warm)
    nexts = [
        replace(first, request_id=f"{first.request_id}+", prompt=np.concatenate([first.prompt, alone[first.request_id].tokens, first.prompt[:5]]))
        for first in firsts
        if first.prompt.size < 240
    ]  # fmt: skip
    for later in nexts:
        warm.submit(later)
    found = drain(warm)
    assert any(answer.report.reused_tokens > 5 for answer in found.values())
    for later in nexts:
        cold = make_engine(decoder, rows=1, piece=17)
        cold.submit(later)
        assert bits(drain(cold)[later.request_id]) == bits(found[later.request_id])


@pytest.mark.parametrize("piece", [50, 2048])
def test_a_beginning_that_all_share_is_read_once_and_changes_no_bit(decoder, piece: int, monkeypatch) -> None:
    find, found_common = exact_passes._common, []
    monkeypatch.setattr(budget_module, "_SHARED_BYTES", 1)
    monkeypatch.setattr(
        exact_passes, "_common", lambda blocks: found_common.append(find(blocks)) or found_common[-1]
    )
    beginning = np.random.default_rng(0).integers(0, VOCAB, 270 - 64).astype(np.int32)
    asked = [
        replace(one, prompt=np.concatenate([beginning, one.prompt[: 5 * index]]), session_id=f"t{index}")
        for index, one in enumerate(make_request(number) for number in range(6))
    ]
    together = make_engine(decoder, piece=piece)
    for one in asked:
        together.submit(one)
    found = drain(together)
    assert max(found_common) == 4
    for one in asked:
        engine = make_engine(decoder, rows=1)
        engine.submit(one)
        assert bits(drain(engine)[one.request_id]) == bits(found[one.request_id])


@pytest.mark.parametrize("sampled", [1, 2, 5])
def test_a_prompt_with_what_was_sampled_goes_on_as_if_nothing_had_been(decoder, alone, sampled: int) -> None:
    """What a preempted request does: prompt and sampled tokens are computed again, in one pass."""
    engine, expected = make_engine(decoder), {}
    for number in range(2, NUM_REQUESTS, 3):
        request = make_request(number)
        before = alone[request.request_id]
        if len(before.tokens) <= sampled:
            continue
        prompt = np.concatenate([request.prompt, before.tokens[:sampled]])
        engine.submit(replace(request, prompt=prompt, max_tokens=request.max_tokens - sampled))
        expected[request.request_id] = bits(before, sampled)
    assert len(expected) > 5
    assert {name: bits(answer) for name, answer in drain(engine).items()} == expected


def test_preempted_requests_end_as_if_they_had_not_been(decoder) -> None:
    block = 2 * 2 * 4 * 32 * 2 * 8  # keys and values, layers, bytes, tokens, heads, head_dim
    asked = [
        replace(one, prompt=one.prompt[:20], max_tokens=130, stop_tokens=())
        for one in map(make_request, range(8))
    ]
    tight = make_engine(decoder, budget=14 * block)
    for one in asked:
        tight.submit(one)
    found = drain(tight)
    assert sum(answer.report.num_preemptions for answer in found.values()) > 2
    for one in asked:
        engine = make_engine(decoder, rows=1)
        engine.submit(one)
        assert bits(drain(engine)[one.request_id]) == bits(found[one.request_id])


def test_two_threads_are_refused(decoder) -> None:
    engine = make_engine(decoder)
    engine.submit(make_request(1))
    use_threads(2)
    with pytest.raises(HotpotError, match="on one thread"):
        engine.step()


def test_a_model_that_cannot_promise_is_refused() -> None:
    odd = Decoder(
        DecoderConfig(
            vocab_size=9, hidden_size=20, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1
        )
    )
    with pytest.raises(EngineError, match="multiple of 4; serve this model without exact"):
        EmbeddedEngine(
            odd.config, odd.state_dict(), settings=EngineSection(), max_context_tokens=8, sampling=SAMPLING, exact=True
        )  # fmt: skip
