"""A budget far too small for what is asked: everything ends with a reason, nothing is over budget, nothing else changes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_engine_embedded import (
    CONTEXT,
    SAMPLING,
    drain,
    make_decoder,
    make_engine,
    plain_logprobs,
    prompts,
    request,
    run,
    weights_of,
)

from hotpot.config.sections import EngineSection
from hotpot.engine.embedded import EmbeddedEngine
from hotpot.engine.embedded.blocks import BLOCK_TOKENS
from hotpot.engine.embedded.store import block_bytes
from hotpot.errors import EngineError
from hotpot.models import Decoder
from hotpot.types import FinishReason, Generation


def budget(decoder: Decoder, blocks: int) -> int:
    config = decoder.config
    return blocks * block_bytes([(config.num_kv_heads, config.head_dim)] * config.num_layers)


def narrow(decoder: Decoder, blocks: int, **settings: Any) -> EmbeddedEngine:
    return make_engine(decoder, kv_cache_bytes=budget(decoder, blocks), **settings)


LONGEST = -(-CONTEXT // BLOCK_TOKENS)


def test_a_budget_that_holds_no_whole_context_is_refused() -> None:
    decoder = make_decoder()
    with pytest.raises(
        EngineError, match=rf"kv_cache_bytes = \d+ holds {(LONGEST - 1) * 32} tokens .* {CONTEXT}"
    ):
        narrow(decoder, LONGEST - 1)
    assert narrow(decoder, LONGEST).usage.num_blocks == LONGEST


def test_preempted_requests_go_on_with_identical_output() -> None:
    decoder = make_decoder()
    asked = [request(n, c, max_tokens=150) for n, c in enumerate(prompts(8, low=60, high=90))]
    expected = run(make_engine(decoder), *asked)
    engine = narrow(decoder, LONGEST + 2)
    answers = run(engine, *asked)
    assert sum(answer.report.num_preemptions for answer in answers) > 5
    assert all(answer.report.num_preemptions == 0 for answer in expected)
    for wanted, answer in zip(expected, answers, strict=True):
        assert answer.tokens.tolist() == wanted.tokens.tolist()
        np.testing.assert_allclose(answer.model_logprobs, wanted.model_logprobs, atol=1e-5)
    assert engine.usage.read_blocks == 0


def test_in_deterministic_mode_no_bit_hangs_on_memory_or_company() -> None:
    """Roomy, tight (preempted and recomputed) and one by one: the same bytes."""
    decoder = make_decoder()
    shared = np.arange(45, dtype=np.int32)
    asked = [
        request(n, np.concatenate([shared, c]), max_tokens=150)
        for n, c in enumerate(prompts(5, low=10, high=60))
    ]

    def make(blocks: int) -> EmbeddedEngine:
        return EmbeddedEngine(
            decoder.config,
            weights_of(decoder),
            settings=EngineSection(
                max_concurrency=8, kv_cache_bytes=budget(decoder, blocks), prefill_tokens=50
            ),
            max_context_tokens=CONTEXT,
            sampling=SAMPLING,
            exact=True,
        )

    expected = run(make(200), *asked)
    tight = run(make(LONGEST + 2), *asked)
    assert sum(answer.report.num_preemptions for answer in tight) > 1
    alone = [run(make(200), each)[0] for each in asked]
    for wanted, *others in zip(expected, tight, alone, strict=True):
        for other in others:
            assert other.tokens.tolist() == wanted.tokens.tolist()
            assert other.model_logprobs.tobytes() == wanted.model_logprobs.tobytes()
            assert other.behaviour_logprobs.tobytes() == wanted.behaviour_logprobs.tobytes()


def tokens(seed: int, count: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 50, count).astype(np.int32)


def test_a_kept_part_of_a_block_does_not_take_the_last_block_there_is() -> None:
    decoder = make_decoder()
    engine = narrow(decoder, LONGEST)
    run(engine, request(0, tokens(0, 10), max_tokens=3))
    # Begins like what is kept, and needs every block.
    prompt = tokens(1, CONTEXT - 3)
    prompt[:5] = tokens(0, 10)[:5]
    engine.submit(request(1, prompt, max_tokens=3))
    assert len(drain(engine, 40)["1.0"].tokens) == 3


def test_two_that_compute_the_same_unknown_to_each_other_both_end() -> None:
    """One copied its beginning, which is evicted while it is computed; the other begins it anew."""
    decoder = make_decoder()
    engine = narrow(decoder, 37, prefill_tokens=1, admit_share=0.01)
    start = tokens(0, 96)
    engine.submit(request(0, np.concatenate([start, tokens(1, 2)]), max_tokens=3))
    while not engine._generates.any():
        engine.step()
    whole = np.concatenate([start, tokens(2, 290)])
    engine.submit(request(1, whole, max_tokens=5))
    engine.step()
    for number in range(10, 14):
        engine.submit(request(number, tokens(number, 1), max_tokens=180))
    while any(name.startswith("1") and name != "1.0" for name in engine._flights):
        engine.step()
    assert engine._memory.index.find(whole, 96).num_tokens == 0
    engine.submit(request(3, whole, max_tokens=5))
    engine.submit(request(4, tokens(77, 5), max_tokens=3))
    answers = drain(engine, 600)
    assert {name: len(answer.tokens) for name, answer in answers.items()} == {"1.0": 5, "3.0": 5, "4.0": 3}


def test_who_waited_for_a_beginning_does_not_wait_for_the_room_of_another() -> None:
    engine = narrow(make_decoder(), 13, admit_share=0.01)
    engine.submit(request(0, tokens(9, 3), max_tokens=150))
    engine.step()
    shared = tokens(1, 40)
    engine.submit(request(1, shared, max_tokens=150))
    engine.submit(request(2, shared, max_tokens=3))
    engine.submit(request(3, tokens(3, 380), max_tokens=2))
    assert [answer.request_id for _ in range(6) for answer in engine.step()] == ["2.0"]
    assert len(drain(engine, 400)) == 3


def make_broken_by_token_59() -> Decoder:
    """Token 59 alone has values that are not finite."""
    decoder = make_decoder(tie_embeddings=False)
    with torch.no_grad():
        decoder.embed_tokens.weight[:, 0] = 0.0
        decoder.embed_tokens.weight[59] = 0.0
        decoder.embed_tokens.weight[59, 0] = 10.0
        decoder.get_parameter("layers.0.self_attn.v_proj.weight")[:, 0] = 3e38
    return decoder


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_values_that_are_not_finite_reach_nobody_else(order: tuple[int, ...]) -> None:
    engine = make_engine(make_broken_by_token_59())
    contexts = [np.append(tokens(0, 3), np.int32(59)), tokens(1, 5), tokens(2, 70)]
    for number in order:
        engine.submit(request(number, contexts[number], max_tokens=1))
    with pytest.raises(EngineError, match=r"for 1 requests, \['0\.0'\] among them"):
        engine.step()
    assert sorted(drain(engine, 10)) == ["1.0", "2.0"]


@pytest.mark.parametrize("size", [20, 40, 70])
def test_what_broken_weights_began_is_gone_when_sound_ones_are_published(size: int) -> None:
    engine = make_engine(make_broken_by_token_59(), prefill_tokens=16)
    engine.submit(request(0, np.full(size, 59, np.int32)))
    engine.step()
    sound = make_decoder(1, tie_embeddings=False)
    engine.publish(weights_of(sound), 1)
    prompt = tokens(5, 33)
    answers = drain(engine, 20) | {a.request_id: a for a in run(engine, request(1, prompt))}
    assert sorted(answers) == ["0.0", "1.0"]
    expected = plain_logprobs(sound, np.concatenate([prompt, answers["1.0"].tokens]), 9)
    np.testing.assert_allclose(answers["1.0"].model_logprobs, expected, atol=1e-5)
    store = engine._passes.store
    assert all(bool(torch.isfinite(tensor).all()) for tensor in (*store.keys, *store.values))


@pytest.mark.slow
def test_ten_times_too_much_all_ends_with_a_reason_within_the_budget() -> None:
    """2,000 requests of up to four times the limit, 64 at once, with memory for two of the longest contexts."""
    decoder = make_decoder(num_layers=1)
    engine = narrow(decoder, 2 * LONGEST, max_concurrency=64, prefill_tokens=512)
    rng = np.random.default_rng(0)
    wanted: dict[str, int] = {}
    refused: list[tuple[int, str]] = []
    answers: dict[str, Generation] = {}
    waiting = list(range(2000))
    while waiting or not engine.idle:
        for number in waiting[:40]:
            size = int(np.exp(rng.uniform(0, np.log(4 * CONTEXT))))
            prompt = rng.integers(0, 60, size).astype(np.int32)
            try:
                engine.submit(request(number, prompt, max_tokens=int(rng.integers(1, 120))))
            except EngineError as error:
                refused.append((size, str(error)))
            else:
                wanted[f"{number}.0"] = size
        del waiting[:40]
        for answer in engine.step():
            answers[answer.request_id] = answer
        usage = engine.usage
        assert usage.read_blocks + usage.kept_blocks <= usage.num_blocks
        assert usage.reserved_bytes <= usage.budget_bytes
    assert answers.keys() == wanted.keys()
    assert len(refused) > 100
    assert all(size >= CONTEXT and f"{size} tokens" in text for size, text in refused)
    assert {answer.finish for answer in answers.values()} == {
        FinishReason.MAX_TOKENS,
        FinishReason.MAX_CONTEXT,
    }
    assert sum(answer.report.num_preemptions for answer in answers.values()) > 20
    assert engine.usage.read_blocks == 0
    assert engine.usage.evictions > 100


def test_the_largest_batch_shrinks_as_contexts_grow() -> None:
    decoder = make_decoder()
    engine = narrow(decoder, LONGEST + 8, max_concurrency=16)
    for number, prompt in enumerate(prompts(16, low=20, high=30)):
        engine.submit(request(number, prompt, max_tokens=200))
    sizes = []
    while not engine.idle:
        engine.step()
        sizes.append(len(engine._by_row))
    assert sizes[0] > 10
    assert min(sizes[60:160]) < 5


WORDS = [np.full(32, 1, np.int32), np.arange(20, dtype=np.int32), np.full(45, 7, np.int32)]


@pytest.mark.slow
@given(
    rounds=st.lists(
        st.lists(
            st.tuples(st.lists(st.sampled_from(range(3)), min_size=1, max_size=4), st.integers(0, 2)),
            min_size=1,
            max_size=6,
        ),
        min_size=1,
        max_size=5,
    ),
    blocks=st.integers(LONGEST, LONGEST + 12),
    publish=st.sets(st.integers(0, 4)),
)
@settings(max_examples=40, deadline=None)
def test_no_stale_or_wrong_block_is_ever_used(
    rounds: list[list[tuple[list[int], int]]], blocks: int, publish: set[int]
) -> None:
    """Shared, diverging and nearly equal prefixes, under pressure and publishes, against computing everything anew."""
    decoders = [make_decoder(seed) for seed in range(6)]
    engine = narrow(decoders[0], blocks, prefill_tokens=64, max_concurrency=5)
    serving = 0
    for place, asked in enumerate(rounds):
        contexts: list[NDArray[np.int32]] = []
        for number, (words, token) in enumerate(asked):
            context = np.concatenate([WORDS[word] for word in words])
            context[-1] = token
            contexts.append(context)
            engine.submit(request(number, context, max_tokens=6, request_id=f"{place}.{number}"))
        if place in publish:
            # In the middle of things: what has sampled goes on, the rest begins again.
            early = {a.request_id: a for _ in range(2) for a in engine.step()}
            serving += 1
            engine.publish(weights_of(decoders[serving]), serving)
        else:
            early = {}
        answers = early | drain(engine)
        for number, context in enumerate(contexts):
            answer = answers[f"{place}.{number}"]
            if len(answer.versions) > 1:
                continue
            decoder = decoders[answer.versions[0].policy_version]
            whole = np.concatenate([context, answer.tokens])
            expected = plain_logprobs(decoder, whole, len(answer.tokens))
            np.testing.assert_allclose(answer.model_logprobs, expected, atol=1e-5)


@pytest.mark.slow
def test_the_process_takes_no_more_memory_than_the_budget() -> None:
    """By the kernel's count: three times more keys and values than a process may keep, and one that may keep all."""
    mib = 1 << 20

    def taken(budget: int) -> dict[str, int]:
        worker = Path(__file__).with_name("engine_memory_worker.py")
        done = subprocess.run(
            [sys.executable, str(worker), str(budget)],
            check=True,
            capture_output=True,
            text=True,
            timeout=250,
        )
        found: dict[str, int] = json.loads(done.stdout)
        return found

    tight, roomy = taken(300), taken(2000)
    assert tight["answered"] == roomy["answered"] == 120
    assert tight["needed"] > 900 * mib
    assert tight["evictions"] > 0 == roomy["evictions"]
    # Beside keys and values a pass has its own tensors: the same in both.
    beside = roomy["grown"] - roomy["needed"]
    assert tight["grown"] < 300 * mib + max(beside, 0) + 150 * mib
    assert roomy["grown"] > tight["grown"] + 400 * mib
