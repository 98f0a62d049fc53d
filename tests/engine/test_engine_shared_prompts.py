"""Prompts of a group are computed once: what is copied is what would have been computed, at every turn of events."""

import numpy as np
import pytest
from numpy.typing import NDArray
from test_engine_embedded import (
    drain,
    make_decoder,
    make_engine,
    plain_logprobs,
    prompts,
    request,
    run,
    weights_of,
)

from hotpot.errors import EngineError
from hotpot.types import Generation, GenerationRequest


def group(prompt: NDArray[np.int32], count: int, *, first: int = 0) -> list[GenerationRequest]:
    return [request(number, prompt) for number in range(first, first + count)]


def reused(answers: list[Generation]) -> list[int]:
    return [answer.report.reused_tokens for answer in answers]


@pytest.mark.parametrize(
    "limits",
    [{}, {"max_concurrency": 3}, {"prefill_tokens": 8}, {"max_concurrency": 2, "prefill_tokens": 16}],
    ids=str,
)
def test_the_samples_of_a_group_share_their_prompt(limits: dict[str, int]) -> None:
    decoder = make_decoder()
    one, other, short = *prompts(2, low=20), np.array([7], dtype=np.int32)
    asked = [*group(one, 4), *group(other, 3, first=4), *group(short, 2, first=7)]
    engine = make_engine(decoder, **limits)
    answers = run(engine, *asked)
    for sent, answer in zip(asked, answers, strict=True):
        context = np.concatenate([sent.prompt, answer.tokens])
        expected = plain_logprobs(decoder, context, len(answer.tokens))
        np.testing.assert_allclose(answer.model_logprobs, expected, atol=1e-5)
        (alone,) = run(make_engine(decoder), sent)
        assert answer.tokens.tolist() == alone.tokens.tolist()
    assert sum(count == 0 for count in reused(answers[:4])) >= 1
    assert max(reused(answers[:4])) == one.size - 1
    if not limits:
        assert reused(answers) == [0, *[one.size - 1] * 3, 0, *[other.size - 1] * 2, 0, 0]


def test_a_later_sample_copies_from_one_that_generates_already_or_is_done() -> None:
    decoder = make_decoder()
    engine = make_engine(decoder, max_concurrency=8, admit_share=0.01)
    (prompt,) = prompts(1, low=20)
    leader, second, third = group(prompt, 3)
    engine.submit(leader)
    for _ in range(4):
        assert engine.step() == []
    engine.submit(second)
    found = drain(engine, 20)
    answers = [found[leader.request_id], found[second.request_id]]
    assert reused(answers) == [0, prompt.size - 1]
    # Blocks that nobody reads are kept, so the prompt is still there when all is idle.
    more = np.concatenate([prompt, answers[0].tokens])
    engine.submit(request(0, more, step=1))
    engine.submit(third)
    found = drain(engine, 20)
    assert found[third.request_id].report.reused_tokens == prompt.size - 1
    expected = plain_logprobs(decoder, np.concatenate([prompt, found[third.request_id].tokens]), 9)
    np.testing.assert_allclose(found[third.request_id].model_logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("steps", range(1, 6))
def test_a_publish_at_any_step_leaves_nothing_of_the_old_weights_in_who_has_not_sampled(steps: int) -> None:
    old, new = make_decoder(0), make_decoder(1)
    engine = make_engine(old, prefill_tokens=16)
    (prompt,) = prompts(1, low=40, high=41)
    for each in group(prompt, 4):
        engine.submit(each)
    for _ in range(steps):
        assert engine.step() == []
    engine.publish(weights_of(new), 1)
    answers = drain(engine, 40)
    assert len(answers) == 4
    for answer in answers.values():
        if answer.versions[0].policy_version == 1:
            expected = plain_logprobs(new, np.concatenate([prompt, answer.tokens]), len(answer.tokens))
            np.testing.assert_allclose(answer.model_logprobs, expected, atol=1e-5)
    late = run(
        engine,
        request(0, np.concatenate([prompt, answers["0.0"].tokens]), step=1),
        *group(prompt, 1, first=9),
    )
    expected = plain_logprobs(new, np.concatenate([prompt, late[1].tokens]), 9)
    np.testing.assert_allclose(late[1].model_logprobs, expected, atol=1e-5)


def test_who_waited_for_a_dropped_request_computes_for_itself() -> None:
    decoder = make_decoder()
    sound = weights_of(decoder)
    engine = make_engine(decoder)
    broken = {name: tensor.clone() for name, tensor in sound.items()}
    broken["norm.weight"].fill_(3e38)
    broken["embed_tokens.weight"] *= 10
    (prompt,) = prompts(1, low=20)
    engine.publish(broken, 1)
    for each in group(prompt, 3):
        engine.submit(each)
    with pytest.raises(EngineError, match="no distribution"):
        engine.step()
    engine.publish(sound, 2)
    answers = drain(engine, 40)
    assert sorted(answers) == ["1.0", "2.0"]
    for answer in answers.values():
        expected = plain_logprobs(decoder, np.concatenate([prompt, answer.tokens]), 9)
        np.testing.assert_allclose(answer.model_logprobs, expected, atol=1e-5)
