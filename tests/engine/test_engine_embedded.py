"""The embedded engine against the plain decoder, over sessions, publishes and filters."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hotpot.config.sections import EngineSection
from hotpot.engine.embedded import EmbeddedEngine
from hotpot.engine.embedded.sampler import Sampled, sample
from hotpot.engine.embedded.stream import plan_stream
from hotpot.errors import EngineError
from hotpot.models import Decoder, DecoderConfig, checksum
from hotpot.types import (
    FinishReason,
    Generation,
    GenerationRequest,
    Purpose,
    SampleKey,
    SamplingParams,
)

VOCAB, CONTEXT = 60, 400
FILTERED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.2)
SAMPLING = {
    Purpose.TRAINING: SamplingParams(),
    Purpose.EVALUATION: FILTERED,
    Purpose.EVALUATION_GREEDY: SamplingParams(temperature=0.0),
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "grouped, untied": {"num_kv_heads": 2, "tie_embeddings": False},
    "one kv head, odd width": {"num_kv_heads": 1, "intermediate_size": 51},
    "qwen2": {"num_kv_heads": 2, "attention_bias": True},
    "qwen3": {"num_kv_heads": 2, "qk_norm": True, "head_dim": 12},
}


def make_decoder(seed: int = 0, **changes: Any) -> Decoder:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
        "max_context_tokens": CONTEXT,
    }
    decoder = Decoder(DecoderConfig(**{**values, **changes}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.15, generator=generator)
    return decoder


def weights_of(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()}


def make_engine(decoder: Decoder, **settings: Any) -> EmbeddedEngine:
    return EmbeddedEngine(
        decoder.config,
        weights_of(decoder),
        settings=EngineSection(**{"max_concurrency": 8, **settings}),
        max_context_tokens=CONTEXT,
        sampling=SAMPLING,
    )


def request(
    number: int,
    prompt: NDArray[np.int32],
    *,
    step: int = 0,
    purpose: Purpose = Purpose.TRAINING,
    **changes: Any,
) -> GenerationRequest:
    made = GenerationRequest(
        request_id=f"{number}.{step}",
        session_id=f"s{number}",
        prompt=prompt,
        stop_tokens=(),
        max_tokens=9,
        purpose=purpose,
        sampling=SAMPLING[purpose],
        key=SampleKey(seed=5, issue=number, sample=1, step=step),
    )
    return replace(made, **changes)


def drain(engine: EmbeddedEngine, steps: int = 2000) -> dict[str, Generation]:
    answers = {}
    for _ in range(steps):
        for generation in engine.step():
            answers[generation.request_id] = generation
    return answers


def run(engine: EmbeddedEngine, *requests: GenerationRequest) -> list[Generation]:
    for each in requests:
        engine.submit(each)
    answers: dict[str, Generation] = {}
    while len(answers) < len(requests):
        answers.update({g.request_id: g for g in engine.step()})
    return [answers[each.request_id] for each in requests]


def plain_logprobs(decoder: Decoder, context: NDArray[np.int32], count: int) -> NDArray[np.float32]:
    """Log-probability of the last ``count`` tokens of a context, by the decoder, in one pass."""
    tokens = torch.from_numpy(context.astype(np.int64))[None]
    with torch.no_grad():
        logits = decoder.logits(decoder(tokens, torch.arange(tokens.shape[1])[None]))[0]
    logprobs = torch.log_softmax(logits, -1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    return logprobs[-count:].numpy()


def prompts(count: int, *, seed: int = 0, low: int = 3, high: int = 60) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(low, high)).astype(np.int32) for _ in range(count)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "settings", [{}, {"max_concurrency": 3, "prefill_tokens": 16}], ids=["roomy", "tight"]
)
def test_sessions_agree_with_the_plain_decoder(shape: str, settings: Mapping[str, Any]) -> None:
    decoder = make_decoder(**SHAPES[shape])
    engine = make_engine(decoder, **settings)
    rng = np.random.default_rng(3)
    contexts = prompts(6)
    reused = 0
    for step in range(4):
        lengths = rng.integers(1, 14, len(contexts))
        answers = run(
            engine,
            *(request(n, c, step=step, max_tokens=int(lengths[n])) for n, c in enumerate(contexts)),
        )
        for number, answer in enumerate(answers):
            contexts[number] = np.concatenate([contexts[number], answer.tokens])
            expected = plain_logprobs(decoder, contexts[number], len(answer.tokens))
            np.testing.assert_allclose(answer.model_logprobs, expected, atol=1e-5, rtol=0)
            np.testing.assert_array_equal(answer.behaviour_logprobs, answer.model_logprobs)
            reused += answer.report.reused_tokens
            observation = rng.integers(0, VOCAB, rng.integers(1, 9)).astype(np.int32)
            contexts[number] = np.concatenate([contexts[number], observation])
    if not settings:
        # All six sessions kept their blocks: of three observations each, only the new tokens were computed.
        assert reused > 0.6 * sum(c.size for c in contexts)


def test_a_returning_session_reuses_all_but_what_is_new() -> None:
    engine = make_engine(make_decoder())
    (prompt,) = prompts(1)
    (first,) = run(engine, request(0, prompt))
    assert first.report.reused_tokens == 0
    longer = np.concatenate([prompt, first.tokens, prompt[:4]])
    (second,) = run(engine, request(0, longer, step=1))
    # The last sampled token was never fed, so its keys and values are not there.
    assert second.report.reused_tokens == len(prompt) + len(first.tokens) - 1


def test_a_changed_history_is_reused_only_up_to_the_change() -> None:
    decoder = make_decoder()
    engine = make_engine(decoder)
    prompt = prompts(1, low=30)[0]
    (first,) = run(engine, request(0, prompt))
    changed = np.concatenate([prompt, first.tokens, prompt])
    changed[11] = (changed[11] + 1) % VOCAB
    (second,) = run(engine, request(0, changed, step=1))
    assert second.report.reused_tokens == 11
    expected = plain_logprobs(decoder, np.concatenate([changed, second.tokens]), len(second.tokens))
    np.testing.assert_allclose(second.model_logprobs, expected, atol=1e-5)
    (third,) = run(engine, request(0, prompt[:5], step=2))
    assert third.report.reused_tokens == 4


def test_a_publish_ends_reuse_and_new_tokens_come_from_the_new_weights() -> None:
    old, new = make_decoder(0), make_decoder(1)
    engine = make_engine(old)
    (prompt,) = prompts(1)
    (first,) = run(engine, request(0, prompt))
    report = engine.publish(weights_of(new), 1)
    assert report.checksum == checksum(weights_of(new)) == engine.info().checksum
    context = np.concatenate([prompt, first.tokens])
    (second,) = run(engine, request(0, context, step=1))
    assert second.report.reused_tokens == 0
    expected = plain_logprobs(new, np.concatenate([context, second.tokens]), len(second.tokens))
    np.testing.assert_allclose(second.model_logprobs, expected, atol=1e-5)
    assert [(s.policy_version, s.checksum) for s in second.versions] == [(1, report.checksum)]


def test_a_publish_in_flight_is_seen_in_the_spans_and_its_blocks_are_not_reused() -> None:
    old, new = make_decoder(0), make_decoder(1)
    engine = make_engine(old)
    (prompt,) = prompts(1)
    engine.submit(request(0, prompt, max_tokens=12))
    for _ in range(5):
        assert engine.step() == []
    engine.publish(weights_of(new), 3)
    engine.step()
    # Back to the very weights the slot began with: part of it was still computed by others.
    engine.publish(weights_of(old), 7)
    answer = drain(engine, 20)["0.0"]
    assert [(s.policy_version, s.length) for s in answer.versions] == [(0, 5), (3, 1), (7, 6)]
    assert [s.checksum for s in answer.versions] == [checksum(weights_of(d)) for d in (old, new, old)]
    np.testing.assert_allclose(
        answer.model_logprobs[:5],
        plain_logprobs(old, np.concatenate([prompt, answer.tokens[:5]]), 5),
        atol=1e-5,
    )
    (later,) = run(engine, request(0, np.concatenate([prompt, answer.tokens]), step=1))
    assert later.report.reused_tokens == 0


def test_a_publish_in_the_middle_of_a_prompt_begins_it_again() -> None:
    old, new = make_decoder(0), make_decoder(1)
    engine = make_engine(old, prefill_tokens=8)
    prompt = prompts(1, low=30)[0]
    engine.submit(request(0, prompt))
    engine.step()
    engine.publish(weights_of(new), 1)
    answer = drain(engine, 40)["0.0"]
    expected = plain_logprobs(new, np.concatenate([prompt, answer.tokens]), len(answer.tokens))
    np.testing.assert_allclose(answer.model_logprobs, expected, atol=1e-5)
    assert [s.policy_version for s in answer.versions] == [1]


def test_the_engine_keeps_its_own_copy_of_the_weights() -> None:
    decoder = make_decoder()
    engine = make_engine(decoder)
    (prompt,) = prompts(1)
    (before,) = run(engine, request(0, prompt))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.zero_()
    (after,) = run(engine, request(0, prompt, request_id="again", session_id="other"))
    assert before.tokens.tolist() == after.tokens.tolist()
    np.testing.assert_allclose(before.model_logprobs, after.model_logprobs, atol=1e-6)


def _missing(weights: dict[str, torch.Tensor]) -> None:
    del weights["norm.weight"]


def _reshaped(weights: dict[str, torch.Tensor]) -> None:
    weights["norm.weight"] = torch.ones(7)


def _foreign(weights: dict[str, torch.Tensor]) -> None:
    weights["value_head.weight"] = torch.ones(7)


def _not_finite(weights: dict[str, torch.Tensor]) -> None:
    weights["norm.weight"] = weights["norm.weight"].clone()
    weights["norm.weight"][3] = float("nan")


def _half(weights: dict[str, torch.Tensor]) -> None:
    weights["norm.weight"] = weights["norm.weight"].half()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_missing, "norm.weight"),
        (_reshaped, "norm.weight has shape torch.Size\\(\\[7\\]\\)"),
        (_foreign, "value_head.weight"),
        (_not_finite, "norm.weight .* holds NaN"),
        (_half, "float16"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve(damage: Any, named: str) -> None:
    engine = make_engine(make_decoder())
    before = engine.info()
    bad = weights_of(make_decoder(1))
    damage(bad)
    with pytest.raises(EngineError, match=named):
        engine.publish(bad, 1)
    assert engine.info() == before
    (prompt,) = prompts(1)
    (answer,) = run(engine, request(0, prompt))
    assert {s.checksum for s in answer.versions} == {before.checksum}


def test_weights_that_change_while_being_copied_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(make_decoder())
    moving = weights_of(make_decoder(1))
    fill = engine._passes._standby.fill

    def fill_late(weights: Any) -> None:
        weights["norm.weight"][0] += 1
        fill(weights)

    monkeypatch.setattr(engine._passes._standby, "fill", fill_late)
    before = engine.info()
    with pytest.raises(EngineError, match="changed while being copied"):
        engine.publish(moving, 1)
    assert engine.info() == before


def test_logits_without_a_distribution_drop_their_requests_by_name_only() -> None:
    decoder = make_decoder()
    engine = make_engine(decoder)
    huge = make_decoder(1)
    with torch.no_grad():
        huge.norm.weight.fill_(3e38)
        huge.embed_tokens.weight.mul_(100)
    engine.publish(weights_of(huge), 1)
    contexts = prompts(2)
    for number, prompt in enumerate(contexts):
        engine.submit(request(number, prompt))
    with pytest.raises(EngineError, match=r"policy version 1 .* 2 requests"):
        drain(engine)
    engine.publish(weights_of(decoder), 2)
    for number, answer in enumerate(run(engine, *(request(n, c) for n, c in enumerate(contexts)))):
        context = np.concatenate([contexts[number], answer.tokens])
        expected = plain_logprobs(decoder, context, len(answer.tokens))
        np.testing.assert_allclose(answer.model_logprobs, expected, atol=1e-5)


def test_one_broken_request_does_not_change_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    import hotpot.engine.embedded.engine as module

    decoder = make_decoder()
    contexts = prompts(3)
    expected = run(make_engine(decoder), *(request(n, c) for n, c in enumerate(contexts)))
    calls = iter(range(10_000))

    def sample_with_a_fault(*arguments: Any) -> Sampled:
        drawn = sample(*arguments)
        # The prompts' own pass, and one in the middle.
        if next(calls) in (0, 4):
            drawn.model_logprobs[0] = np.nan
        return drawn

    monkeypatch.setattr(module, "sample", sample_with_a_fault)
    engine = make_engine(decoder)
    for number, context in enumerate(contexts):
        engine.submit(request(number, context))
    answers: dict[str, Generation] = {}
    errors = []
    for _ in range(60):
        try:
            answers.update({g.request_id: g for g in engine.step()})
        except EngineError as error:
            errors.append(str(error))
    assert len(errors) == 2
    (survivor,) = answers
    answer, wanted = answers[survivor], expected[int(survivor[0])]
    assert answer.tokens.tolist() == wanted.tokens.tolist()
    np.testing.assert_allclose(answer.model_logprobs, wanted.model_logprobs, atol=1e-5)
    # The ids of the dropped ones can be used again.
    dropped = [n for n in range(3) if f"{n}.0" != survivor]
    for number, again in zip(dropped, run(engine, *(request(n, contexts[n]) for n in dropped)), strict=True):
        assert again.tokens.tolist() == expected[number].tokens.tolist()


def test_a_row_forgets_the_stop_tokens_of_the_request_before() -> None:
    engine = make_engine(make_decoder(), max_concurrency=1)
    (prompt,) = prompts(1)
    (free,) = run(engine, request(0, prompt))
    run(engine, request(1, prompt, stop_tokens=(0, 1, *free.tokens.tolist())))
    (again,) = run(engine, request(0, prompt, request_id="again"))
    assert again.tokens.tolist() == free.tokens.tolist()
    assert again.finish is FinishReason.MAX_TOKENS


def test_purposes_run_side_by_side_each_with_its_own_sampling() -> None:
    decoder = make_decoder()
    engine = make_engine(decoder)
    (prompt,) = prompts(1)
    purposes = [Purpose.EVALUATION, Purpose.TRAINING, Purpose.EVALUATION_GREEDY]
    mixed = run(engine, *(request(n, prompt, purpose=p) for n, p in enumerate(purposes)))
    for number, purpose in enumerate(purposes):
        (alone,) = run(make_engine(decoder), request(number, prompt, purpose=purpose))
        assert mixed[number].tokens.tolist() == alone.tokens.tolist()
        np.testing.assert_allclose(mixed[number].behaviour_logprobs, alone.behaviour_logprobs, atol=1e-5)
        expected = plain_logprobs(decoder, np.concatenate([prompt, alone.tokens]), len(alone.tokens))
        np.testing.assert_allclose(mixed[number].model_logprobs, expected, atol=1e-5)
        assert mixed[number].report.sampling == SAMPLING[purpose]
    assert (mixed[0].behaviour_logprobs != mixed[0].model_logprobs).all()
    assert (mixed[2].behaviour_logprobs == 0).all()


def test_the_repetition_penalty_sees_prompt_and_sampled_tokens() -> None:
    decoder = make_decoder()
    sampling = {Purpose.TRAINING: SamplingParams(temperature=0.0, repetition_penalty=1e6)}
    engine = EmbeddedEngine(
        decoder.config,
        weights_of(decoder),
        settings=EngineSection(max_concurrency=2),
        max_context_tokens=CONTEXT,
        sampling=sampling,
    )
    prompt = np.arange(10, dtype=np.int32)
    (answer,) = run(engine, request(0, prompt, sampling=sampling[Purpose.TRAINING], max_tokens=VOCAB - 20))
    whole = np.concatenate([prompt, answer.tokens])
    assert len(set(whole.tolist())) == len(whole)


def test_contexts_grow_past_the_first_capacity() -> None:
    decoder = make_decoder()
    engine = make_engine(decoder)
    contexts = prompts(3, low=200, high=250)
    answers = run(engine, *(request(n, c, max_tokens=300) for n, c in enumerate(contexts)))
    for context, answer in zip(contexts, answers, strict=True):
        assert answer.finish is FinishReason.MAX_CONTEXT
        assert len(context) + len(answer.tokens) == CONTEXT
        expected = plain_logprobs(decoder, np.concatenate([context, answer.tokens]), len(answer.tokens))
        np.testing.assert_allclose(answer.model_logprobs, expected, atol=1e-5)


def test_random_numbers_go_on_past_a_chunk() -> None:
    engine = make_engine(make_decoder())
    (prompt,) = prompts(1)
    (long,) = run(engine, request(0, prompt, max_tokens=150))
    # Cut at any place and asked again with the same key, the beginning is the same.
    for count in (1, 63, 64, 65, 128, 149):
        (short,) = run(
            engine, request(0, prompt, max_tokens=count, request_id=f"c{count}", session_id="other")
        )
        assert short.tokens.tolist() == long.tokens[:count].tolist()


def test_no_prefill_pass_is_larger_than_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    import hotpot.engine.embedded.engine as module

    sizes = []

    def watched(*arguments: Any) -> Any:
        stream = plan_stream(*arguments)
        if stream.piece_rows.size:
            sizes.append(len(stream.piece_rows) * int(stream.piece_lengths.max()))
        return stream

    monkeypatch.setattr(module, "plan_stream", watched)
    engine = make_engine(make_decoder(), prefill_tokens=64)
    run(engine, *(request(n, c) for n, c in enumerate(prompts(8, low=3, high=150))))
    assert max(sizes) <= 64
    assert len(sizes) > 3


def test_more_requests_than_rows_are_all_answered() -> None:
    engine = make_engine(make_decoder(), max_concurrency=3)
    answers = run(engine, *(request(n, c) for n, c in enumerate(prompts(20))))
    assert [len(a.tokens) for a in answers] == [9] * 20
    assert engine.info().max_concurrency == 3


def test_a_forgetful_engine_gives_the_same_bits_whatever_ran_before() -> None:
    decoder = make_decoder()
    one, two = prompts(2, low=40)

    def episodes(engine: EmbeddedEngine, first: int) -> list[Generation]:
        begun = run(engine, request(first, one), request(first + 1, one), request(first + 2, two))
        more = np.concatenate([one, begun[0].tokens])
        (gone_on,) = run(engine, request(first, more, step=1))
        assert gone_on.report.reused_tokens > 40
        return [*begun, gone_on]

    def make() -> EmbeddedEngine:
        return EmbeddedEngine(
            decoder.config,
            weights_of(decoder),
            settings=EngineSection(max_concurrency=8),
            max_context_tokens=CONTEXT,
            sampling=SAMPLING,
            forgetful=True,
        )

    expected = episodes(make(), 0)
    used = make()
    run(used, request(7, two), request(8, np.concatenate([two, one])), request(9, one, max_tokens=50))
    for answer, wanted in zip(episodes(used, 0), expected, strict=True):
        assert answer.report.reused_tokens == wanted.report.reused_tokens
        assert answer.tokens.tolist() == wanted.tokens.tolist()
        assert answer.model_logprobs.tobytes() == wanted.model_logprobs.tobytes()


def test_a_context_beyond_the_model_is_refused() -> None:
    decoder = make_decoder()
    with pytest.raises(EngineError, match=r"max_context_tokens is 401 .* built for 400"):
        EmbeddedEngine(
            decoder.config,
            weights_of(decoder),
            settings=EngineSection(),
            max_context_tokens=401,
            sampling=SAMPLING,
        )
