"""In the exact arithmetic the learner's log-probabilities are the sampler's, bit for bit, however its passes are laid out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import make_sequence
from numpy.typing import NDArray

from hotpot.config.sections import EngineSection, LearnerSection
from hotpot.engine.embedded import EmbeddedEngine
from hotpot.experience.sequences.segments import TrainingSequence
from hotpot.learner import Learner
from hotpot.learner.scoring import score_sequences
from hotpot.models import Decoder, DecoderConfig, use_threads
from hotpot.types import Generation, GenerationRequest, Purpose, SampleKey, SamplingParams

VOCAB, CONTEXT, TEMPERATURE = 120, 360, 0.7
SAMPLING = {Purpose.TRAINING: SamplingParams(temperature=TEMPERATURE)}
SHAPES: dict[str, dict[str, Any]] = {
    "one kv head": {"num_heads": 4, "num_kv_heads": 1, "intermediate_size": 96},
    "qwen3, untied": {"num_heads": 2, "num_kv_heads": 2, "qk_norm": True, "tie_embeddings": False, "intermediate_size": 51},
}  # fmt: skip


@dataclass
class Episode:
    """What one session has seen and sampled so far."""

    issue: int
    sample: int
    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    raw: NDArray[np.float32]

    def extend(self, tokens: Sequence[int] | NDArray[np.int32], answer: Generation | None = None) -> None:
        count = len(tokens)
        zeros = np.zeros(count, dtype=np.float32)
        self.tokens = np.concatenate([self.tokens, np.asarray(tokens, dtype=np.int32)])
        self.mask = np.concatenate([self.mask, np.full(count, answer is not None)])
        self.logprobs = np.concatenate([self.logprobs, answer.behaviour_logprobs if answer else zeros])
        self.raw = np.concatenate([self.raw, answer.model_logprobs if answer else zeros])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    use_threads(1)
    yield
    use_threads(before)


@pytest.fixture(scope="module", params=list(SHAPES))
def sampled(request: pytest.FixtureRequest) -> tuple[Decoder, list[TrainingSequence]]:
    """A decoder and 20 two-step episodes of very different lengths that an exact engine sampled from it, some prompts long
    and shared, prompts computed in pieces."""
    use_threads(1)
    config = DecoderConfig(
        vocab_size=VOCAB, hidden_size=64, num_layers=2, max_context_tokens=CONTEXT, initializer_range=0.3,
        **SHAPES[request.param],
    )  # fmt: skip
    decoder = Decoder(config)
    decoder.initialize(1)
    settings = EngineSection(max_concurrency=7, prefill_tokens=100, admit_share=0.01)
    engine = EmbeddedEngine(
        config, decoder.state_dict(), settings=settings, max_context_tokens=CONTEXT, sampling=SAMPLING, exact=True
    )  # fmt: skip
    empty = {"mask": np.zeros(0, bool), "logprobs": np.zeros(0, np.float32), "raw": np.zeros(0, np.float32)}
    episodes = []
    for issue in range(5):
        prompt = np.random.default_rng(issue % 3).integers(0, VOCAB, [230, 3, 140][issue % 3])
        for sample in range(4):
            one = Episode(issue=issue, sample=sample, tokens=np.zeros(0, np.int32), **empty)  # type: ignore[arg-type]
            one.extend([*prompt, *range(issue, issue + sample)])
            episodes.append(one)
    for step in range(2):
        for one in episodes:
            engine.submit(_request(one, step))
        found: dict[str, Generation] = {}
        while not engine.idle:
            found |= {answer.request_id: answer for answer in engine.step()}
        for one in episodes:
            answer = found[_request(one, step).request_id]
            one.extend(answer.tokens, answer)
            one.extend([5, 6, 7] if step == 0 else [])
    return decoder, [_sequence(one) for one in episodes]


def _request(one: Episode, step: int) -> GenerationRequest:
    name = f"{one.issue}.{one.sample}"
    return GenerationRequest(
        request_id=f"{name}/{step}",
        session_id=name,
        prompt=one.tokens,
        stop_tokens=(2,),
        max_tokens=4 + 7 * one.sample,
        purpose=Purpose.TRAINING,
        sampling=SAMPLING[Purpose.TRAINING],
        key=SampleKey(seed=1, issue=one.issue, sample=one.sample, step=step),
    )


def _sequence(one: Episode) -> TrainingSequence:
    return replace(
        make_sequence(one.issue, one.sample, reward=float(one.sample % 2)),
        tokens=one.tokens,
        loss_mask=one.mask,
        behaviour_logprobs=one.logprobs,
        model_logprobs=one.raw,
        token_policy_version=np.where(one.mask, 3, -1).astype(np.int32),
    )


def make_learner(decoder: Decoder, *, exact: bool = True, **settings: Any) -> Learner:
    made = LearnerSection(**{"learning_rate": 1e-3, "minibatches": 3, **settings})
    twin = decoder.duplicate()
    return Learner(twin, made, total_updates=4, seed=0, temperature=TEMPERATURE, exact=exact)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"minibatches": 1, "micro_batch_tokens": 400},
        {"micro_batch_tokens": 8192, "gradient_checkpointing": True},
        {"old_logprobs": "recomputed", "epochs": 2},
    ],
    ids=lambda settings: " ".join(settings) or "default",
)
def test_an_update_agrees_with_the_sampler_bit_for_bit(sampled, settings: dict[str, Any]) -> None:
    decoder, sequences = sampled
    learner = make_learner(decoder, **settings)
    assert learner.exact
    result = learner.update(sequences, update=1, policy_version=3)
    assert result.agreement.num_tokens == sum(int(one.loss_mask.sum()) for one in sequences)
    assert result.num_shared_tokens > 0
    assert result.agreement.maximum == 0.0
    assert result.terms.kernels.cpu_capability.endswith(", exact")


def test_so_do_scores_outside_of_an_update(sampled) -> None:
    decoder, sequences = sampled
    learner = make_learner(decoder)
    for part in (sequences, sequences[:1], sequences[7:9]):
        for one, scored in zip(
            part, score_sequences(learner.decoder, part, temperature=TEMPERATURE), strict=True
        ):
            assert np.array_equal(scored.logprobs, one.behaviour_logprobs[one.loss_mask])
            assert np.array_equal(scored.model_logprobs, one.model_logprobs[one.loss_mask])


def test_without_it_they_agree_up_to_rounding_only(sampled) -> None:
    """What the tests above would not notice if the exact arithmetic were not on."""
    decoder, sequences = sampled
    result = make_learner(decoder, exact=False).update(sequences, update=1, policy_version=3)
    assert 0 < result.agreement.maximum < 1e-3


@pytest.mark.parametrize(
    "settings",
    [{"packing": "packed"}, {"lora_rank": 2}, {"precision": "bfloat16", "old_logprobs": "recomputed"}],
)
def test_where_it_cannot_be_it_is_not_promised(sampled, settings: dict[str, Any]) -> None:
    decoder, sequences = sampled
    learner = make_learner(decoder, **settings)
    assert not learner.exact
    result = learner.update(sequences, update=1, policy_version=3)
    assert not result.terms.kernels.cpu_capability.endswith(", exact")
