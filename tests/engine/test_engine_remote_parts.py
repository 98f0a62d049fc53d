"""The pure parts of remote engines: admission, back-off, JSON, checks, verdicts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotpot.engine.randomness import request_seed
from hotpot.engine.remote.admission import Admission
from hotpot.engine.remote.backoff import Backoff
from hotpot.engine.remote.checking import check_answer, needs_scores
from hotpot.engine.remote.completions import CompletionsWire
from hotpot.engine.remote.generate import GenerateWire
from hotpot.engine.remote.http import Http
from hotpot.engine.remote.probes import Probed, share_of_former, verdict
from hotpot.engine.remote.wire import Answer, WireError
from hotpot.errors import EngineError
from hotpot.types import FinishReason, GenerationRequest, Purpose, SampleKey, SamplingParams

REQUEST = GenerationRequest(
    request_id="r",
    session_id="s",
    prompt=np.array([5, 6, 7], dtype=np.int32),
    stop_tokens=(2,),
    max_tokens=4,
    purpose=Purpose.TRAINING,
    sampling=SamplingParams(),
    key=SampleKey(seed=1 << 40, issue=3, sample=2, step=1),
)
ANSWER = Answer(
    model="policy",
    tokens=(9, 8, 9, 2),
    logprobs=(-1.0, -0.5, -2.0, 0.0),
    finish="stop",
    prompt_tokens=3,
    reused_tokens=0,
)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=60))
def test_admission_keeps_its_budget_and_its_order_and_loses_nothing(moves: list[tuple[int, int]]) -> None:
    admission = Admission(max_requests=4, max_tokens=50)
    sizes: dict[str, int] = {}
    waiting: list[str] = []
    out: list[str] = []
    for number, (move, tokens) in enumerate(moves):
        if move <= 1:
            sizes[str(number)] = tokens
            admission.offer(str(number), tokens)
            waiting.append(str(number))
        elif out and move == 2:
            admission.settle(out.pop(tokens % len(out)))
        elif out:
            again = out.pop(tokens % len(out))
            admission.again(again)
            waiting.insert(0, again)
        admitted = admission.admit()
        assert admitted == waiting[: len(admitted)]
        waiting = waiting[len(admitted) :]
        out += admitted
        assert admission.tokens_out == sum(sizes[one] for one in out) <= 50
        assert (admission.num_waiting, admission.num_out) == (len(waiting), len(out))
        assert len(out) <= 4
        assert not waiting or len(out) == 4 or admission.tokens_out + sizes[waiting[0]] > 50


def test_admission_can_be_held_and_refuses_what_never_fits() -> None:
    admission = Admission(max_requests=4, max_tokens=50)
    admission.hold()
    admission.offer("a", 50)
    assert admission.admit() == []
    admission.release()
    assert admission.admit() == ["a"]
    with pytest.raises(EngineError, match=r"'b' may take 51 tokens and engine.max_tokens_in_flight is 50"):
        admission.offer("b", 51)
    assert "b" not in admission


@given(st.integers(1, 20), st.floats(0, 1, exclude_max=True), st.none() | st.floats(0, 1000))
def test_pauses_grow_to_a_ceiling_then_end(tries: int, uniform: float, told: float | None) -> None:
    backoff = Backoff(retries=8, first_s=0.5, longest_s=10.0)
    pause = backoff.pause_s(tries, uniform, told)
    assert (pause is None) == (tries > 8)
    if pause is not None:
        assert 0 <= pause <= 10
        assert told is None or pause >= min(told, 10)
        assert told is not None or pause <= 0.5 * 2**tries


def test_seeds_are_fixed_by_the_key_and_differ_with_each_part_of_it() -> None:
    keys = [
        replace(REQUEST.key, **{part: value})
        for part in ("seed", "issue", "sample", "step")
        for value in range(10, 60)
    ]
    seeds = {request_seed(key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert request_seed(REQUEST.key) == request_seed(replace(REQUEST.key))


def test_both_wires_ask_for_exactly_the_sampling_of_the_request() -> None:
    request = replace(
        REQUEST, sampling=SamplingParams(temperature=0.5, top_p=0.9, top_k=7, repetition_penalty=1.1)
    )
    tokens = GenerateWire("m").call(request, max_tokens=3, salt="x").body
    texts = CompletionsWire("m", salted=False).call(request, max_tokens=3, salt="x").body
    assert (tokens["token_ids"], tokens["cache_salt"]) == ([5, 6, 7], "x")
    assert texts["prompt"] == [5, 6, 7]
    assert "cache_salt" not in texts
    for body in (tokens["sampling_params"], texts):
        told = {name: body[name] for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
        assert SamplingParams(**told) == request.sampling
        assert (body["seed"], body["stop_token_ids"], body["max_tokens"]) == (
            request_seed(REQUEST.key),
            [2],
            3,
        )
        assert body["ignore_eos"] is True
    off = CompletionsWire("m", salted=True).call(REQUEST, max_tokens=1, salt="x").body
    assert (off["top_k"], off["cache_salt"]) == (-1, "x")


def completion(**changes: Any) -> dict[str, Any]:
    logprobs = {"tokens": ["token_id:9", "token_id:2"], "token_logprobs": [-1.0, -0.25]}
    choice = {"finish_reason": "stop", "logprobs": logprobs, "token_ids": [9, 2], **changes}
    return {"model": "policy", "choices": [choice], "usage": {"prompt_tokens": 3}}


def test_completions_are_read_from_either_form_of_ids_and_never_from_text() -> None:
    wire = CompletionsWire("policy", salted=False)
    expected = wire.read(completion())
    assert (expected.tokens, expected.logprobs, expected.stretches) == ((9, 2), (-1.0, -0.25), None)
    assert wire.read(completion(token_ids=None)) == expected
    words = {"tokens": ["nine", "two"], "token_logprobs": [-1.0, -0.25]}
    assert wire.read(completion(logprobs=words)) == expected
    with pytest.raises(WireError, match="neither token_ids nor tokens"):
        wire.read(completion(logprobs=words, token_ids=None))
    with pytest.raises(WireError, match=r"\[9, 3\]"):
        wire.read(completion(token_ids=[9, 3]))


@pytest.mark.parametrize(
    "payload",
    [None, [], {}, {"choices": []}, {"choices": [{}, {}]}, {"choices": [{"token_ids": "x"}]}, "text", 3],
)
@pytest.mark.parametrize("wire", [CompletionsWire("policy", salted=False), GenerateWire("policy")])
def test_any_json_is_read_or_refused_with_words(wire: Any, payload: Any) -> None:
    with pytest.raises(WireError, match=r"\w"):
        wire.read(payload)


def test_an_answer_as_asked_passes_and_says_how_it_ended() -> None:
    def ended(answer: Answer, request: GenerationRequest = REQUEST, asked: int = 4) -> FinishReason:
        return check_answer(request, answer, model="policy", max_tokens=asked)

    assert ended(ANSWER) is FinishReason.STOP
    # The limit and a stop token in one: the token says more.
    assert ended(replace(ANSWER, finish="length")) is FinishReason.STOP
    long = replace(ANSWER, tokens=(9, 8, 9, 7), finish="length")
    assert ended(long) is FinishReason.MAX_TOKENS
    assert ended(long, replace(REQUEST, max_tokens=50)) is FinishReason.MAX_CONTEXT


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "x"}, "'x'"),
        ({"prompt_tokens": 2}, "2 prompt tokens of 3"),
        ({"tokens": ()}, "0 tokens"),
        ({"tokens": (1, 1, 1, 1, 1)}, "5 tokens"),
        ({"logprobs": (-1.0,)}, "1 log-probabilities for 4"),
        ({"logprobs": (-1.0, float("nan"), -1.0, -1.0)}, "token 1"),
        ({"logprobs": (-1.0, -1.0, -9999.0, -1.0)}, "token 2"),
        ({"logprobs": (0.5, -1.0, -1.0, -1.0)}, "token 0"),
        ({"tokens": (9, 2, 9, 2)}, "went on behind stop token 2"),
        ({"tokens": (9, 8, 9, 7)}, "'stop' does not fit"),
        ({"tokens": (9, 8, 7), "logprobs": (-1.0,) * 3, "finish": "length"}, "'length' does not fit 3 of 4"),
        ({"finish": "error"}, "'error'"),
    ],
)
def test_an_answer_that_is_not_as_asked_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(WireError, match=named):
        check_answer(REQUEST, replace(ANSWER, **changes), model="policy", max_tokens=4)


def test_the_raw_log_probability_is_another_number_only_off_temperature_1() -> None:
    assert not needs_scores(SamplingParams())
    assert not needs_scores(SamplingParams(temperature=0.0))
    assert needs_scores(SamplingParams(temperature=0.9))
    assert needs_scores(SamplingParams(top_p=0.9))
    assert needs_scores(SamplingParams(repetition_penalty=1.1))


def probed(said: Any, own: Any, former: Any = None, best: Any = None) -> list[Probed]:
    return [
        Probed(
            said=np.asarray(said, dtype=np.float64),
            own=np.asarray(own, dtype=np.float64),
            best=np.asarray(np.zeros(len(own)) if best is None else best, dtype=np.float64),
            former=None if former is None else np.asarray(former, dtype=np.float64),
        )
    ]


@given(st.integers(0, 1000), st.floats(1e-4, 1.0), st.booleans())
def test_new_and_former_weights_are_told_apart_in_noise(seed: int, change: float, stale: bool) -> None:
    rng = np.random.default_rng(seed)
    own = -rng.exponential(2.0, 64) - 0.1
    former = own + change * rng.standard_normal(64)
    said = (former if stale else own) + 0.02 * change * rng.standard_normal(64)
    assert bool(verdict(probed(said, own, former), tolerance=10.0)) == stale


def test_what_noise_hides_is_not_judged() -> None:
    rng = np.random.default_rng(0)
    own = -rng.exponential(2.0, 64)
    assert share_of_former(own, own, own) is None
    assert share_of_former(own + 0.01 * rng.standard_normal(64), own, own + 1e-5) is None


def test_verdicts_name_foreign_weights_and_greedy_servers() -> None:
    own = np.full(64, -2.0)
    assert verdict(probed(own, own), tolerance=1e-3) == ""
    assert "0.1 nats apart" in verdict(probed(own + 0.1, own), tolerance=1e-3)
    assert "nan" in verdict(probed(own * np.nan, own), tolerance=1e-3)
    assert "greedily" in verdict(probed(own, own, best=own), tolerance=1e-3)
    certain = np.full(64, -1e-3)  # a policy that is sure of itself looks the same either way
    assert verdict(probed(certain, certain, best=certain), tolerance=1e-3) == ""


@pytest.mark.parametrize("url", ["https://x:1", "localhost:8000", "http://", "http://x:1?y=2", ""])
def test_addresses_that_cannot_work_are_refused(url: str) -> None:
    with pytest.raises(EngineError, match="http://host:port"):
        Http(url)
