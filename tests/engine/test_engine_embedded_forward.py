"""The engine's forward pass against the decoder's, for every setting of a model; and settings it does not know."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hotpot.config.sections import EngineSection
from hotpot.engine.embedded import EmbeddedEngine
from hotpot.engine.embedded.weights import PackedWeights
from hotpot.errors import EngineError
from hotpot.models import Decoder, DecoderConfig
from hotpot.types import GenerationRequest, Purpose, SampleKey, SamplingParams

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_layers": 2,
    "num_heads": 4,
    "max_context_tokens": 64,
}


@pytest.mark.parametrize("tie_embeddings", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("qk_norm", [True, False], ids=["qk_norm", "no_qk_norm"])
@pytest.mark.parametrize("attention_bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "others", [{}, {"head_dim": 12, "rope_theta": 500.0, "rms_norm_eps": 1e-3}], ids=["default", "other"]
)
def test_prefill_and_decoding_are_those_of_the_decoder(
    tie_embeddings: bool, qk_norm: bool, attention_bias: bool, num_kv_heads: int, others: dict[str, float]
) -> None:
    config = DecoderConfig(
        **SIZES,
        tie_embeddings=tie_embeddings,
        qk_norm=qk_norm,
        attention_bias=attention_bias,
        num_kv_heads=num_kv_heads,
        **others,  # type: ignore[arg-type]
    )
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            # Norms and biases too, so that none of them can be left out unnoticed.
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2, generator=generator)
    engine = EmbeddedEngine(
        config,
        dict(decoder.named_parameters()),
        settings=EngineSection(max_concurrency=4),
        max_context_tokens=64,
        sampling={Purpose.TRAINING: SamplingParams()},
    )
    rng = np.random.default_rng(0)
    prompts = {
        f"r{number}": rng.integers(0, 50, size).astype(np.int32) for number, size in enumerate((1, 5, 17))
    }
    for number, (name, prompt) in enumerate(prompts.items()):
        engine.submit(
            GenerationRequest(
                request_id=name,
                session_id=name,
                prompt=prompt,
                stop_tokens=(),
                max_tokens=6 + number,
                purpose=Purpose.TRAINING,
                sampling=SamplingParams(),
                key=SampleKey(seed=0, issue=number, sample=0, step=0),
            )
        )
    answers = [answer for _ in range(20) for answer in engine.step()]
    assert sorted(answer.request_id for answer in answers) == sorted(prompts)
    for answer in answers:
        context = torch.from_numpy(np.concatenate([prompts[answer.request_id], answer.tokens])).long()[None]
        with torch.no_grad():
            logits = decoder.logits(decoder(context, torch.arange(context.shape[1])[None]))[0]
        logprobs = torch.log_softmax(logits, -1)[:-1].gather(1, context[0, 1:, None])[:, 0]
        np.testing.assert_allclose(
            answer.model_logprobs, logprobs[-len(answer.tokens) :].numpy(), atol=1e-5, rtol=0
        )


def test_a_setting_the_engine_does_not_know_is_refused() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Newer(DecoderConfig):
        sliding_window: int = 0

    with pytest.raises(
        EngineError, match="configuration has sliding_window, which the engine does not compute"
    ):
        PackedWeights(Newer(**SIZES, num_kv_heads=4))
