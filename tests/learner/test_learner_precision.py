"""Products of bfloat16: close to float32, the same bits each time, nothing masked leaks in, and a policy learns with them."""

import dataclasses

import numpy as np
import pytest
import torch
from learner_cases import VOCAB, batch_of, make_batch, make_decoder

from hotpot.config.load import build_recipe
from hotpot.config.sections import LearnerSection
from hotpot.errors import RecipeError
from hotpot.experience import TrainingSequence
from hotpot.learner import Learner, precision
from hotpot.learner.batches.passes import lay_out
from hotpot.learner.scores.forward import score
from hotpot.learner.scoring import score_sequences
from hotpot.models import checksum
from hotpot.models.decoder import Attention, FeedForward

BF16 = {"precision": "bfloat16", "old_logprobs": "recomputed"}


def gradient(of: torch.dtype, **shape: object) -> tuple[torch.Tensor, torch.Tensor]:
    decoder, batch = make_decoder(**shape), batch_of(make_batch())
    decoder.precision = of
    scores = score(decoder, lay_out([[member] for member in batch.sequences]), temperature=1.0)
    assert scores.hidden.dtype == scores.logprobs.dtype == torch.float32
    (-scores.logprobs.mean()).backward()
    grads = [parameter.grad for parameter in decoder.parameters()]
    assert {g.dtype for g in grads} == {torch.float32}
    return scores.logprobs.detach(), torch.cat([g.flatten() for g in grads])


@pytest.mark.parametrize("shape", [{}, {"qk_norm": True, "tie_embeddings": False}, {"attention_bias": True}])
def test_close_to_float32_and_not_the_same(shape) -> None:
    (exact, wanted), (found, gradients) = gradient(torch.float32, **shape), gradient(torch.bfloat16, **shape)
    apart = (found - exact).abs()
    assert 1e-4 < apart.max() < 0.2
    assert torch.cosine_similarity(wanted, gradients, dim=0) > 0.999
    assert gradients.norm() == pytest.approx(float(wanted.norm()), rel=0.02)


def test_the_products_of_the_layers_are_of_bfloat16_and_weights_are_not(monkeypatch) -> None:
    seen = set()
    for kind in (Attention, FeedForward):
        real = kind.forward

        def watched(self, *given, real=real):
            out = real(self, *given)
            seen.add(out.dtype)
            return out

        monkeypatch.setattr(kind, "forward", watched)
    gradient(torch.bfloat16)
    assert seen == {torch.bfloat16}


def learner_of(seed: int = 0, **settings: object) -> Learner:
    section = LearnerSection(**{"learning_rate": 1e-2, "minibatches": 2, **settings})  # type: ignore[arg-type]
    return Learner(make_decoder(seed), section, total_updates=10, seed=0, temperature=1.0)


def learned(sequences: list[TrainingSequence], **settings: object) -> tuple[bytes, str]:
    learner = learner_of(**{**BF16, **settings})
    result = learner.update(sequences, update=1, policy_version=3)
    assert {tensor.dtype for tensor in learner.weights().values()} == {torch.float32}
    return result.losses.tobytes(), checksum(learner.weights())


def test_repeats_have_the_same_bits_with_checkpointed_layers_too() -> None:
    once = learned(make_batch())
    assert learned(make_batch()) == once != learned(make_batch(), precision="float32")
    assert learned(make_batch(), gradient_checkpointing=True) == once


@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_nothing_masked_changes_a_bit(packing: str) -> None:
    sequences = make_batch()
    changed = [
        dataclasses.replace(
            s,
            tokens=np.append(s.tokens, (s.tokens[:3] + 1) % VOCAB).astype(np.int32),
            loss_mask=np.append(s.loss_mask, [False] * 3),
            behaviour_logprobs=np.append(s.behaviour_logprobs, [np.float32(-50)] * 3),
            model_logprobs=np.append(s.model_logprobs, [np.float32(np.nan)] * 3),
            token_policy_version=np.append(s.token_policy_version, [-1] * 3).astype(np.int32),
        )
        for s in sequences
    ]
    for one, other in zip(sequences, changed, strict=True):
        one.behaviour_logprobs[~one.loss_mask] = 0
        other.behaviour_logprobs[: len(one.tokens)][~one.loss_mask] = 99
    assert learned(changed, packing=packing) == learned(sequences, packing=packing)


@pytest.mark.parametrize("more", [{}, {"old_logprobs": "recorded", "decoupled": "all"}])
def test_a_tiny_policy_learns_what_is_rewarded(more) -> None:
    learner = learner_of(**{**BF16, "minibatches": 1, **more})
    first = last = 0.0
    for update in range(1, 11):
        sequences = [recorded(learner, s) for s in make_batch()]
        result = learner.update(sequences, update=update, policy_version=3)
        liked = np.mean([s.behaviour_logprobs[s.loss_mask].mean() for s in sequences if s.reward > 0])
        disliked = np.mean([s.behaviour_logprobs[s.loss_mask].mean() for s in sequences if s.reward == 0])
        first, last = (first or liked - disliked), liked - disliked
        assert np.isfinite(result.losses).all()
    assert last > first + 1


def recorded(learner: Learner, sequence: TrainingSequence) -> TrainingSequence:
    """``sequence`` as an exact sampler with the learner's weights would have recorded it."""
    exact = make_decoder()
    exact.load_state_dict(learner.weights())
    (said,) = score_sequences(exact, [sequence], temperature=1.0)
    logprobs = np.zeros(len(sequence.tokens), np.float32)
    logprobs[said.positions] = said.logprobs
    return dataclasses.replace(sequence, behaviour_logprobs=logprobs, model_logprobs=logprobs)


def test_auto_is_what_the_device_has_instructions_for(monkeypatch) -> None:
    for name, wanted in (("avx512_bf16", "bfloat16"), ("avx2", "float32")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda name=name: {name: True})
        learner = learner_of(precision="auto", old_logprobs="recomputed")
        assert learner.precision == wanted
        terms = learner.update(make_batch(), update=1, policy_version=3).terms
        assert LearnerSection.model_validate_json(terms.settings).precision == wanted
        assert terms.kernels.cpu_capability.endswith("bfloat16") == (wanted == "bfloat16")
    assert precision.spelled("bfloat16") == "bfloat16, emulated"
    assert learner_of(**BF16).update(make_batch(), update=1, policy_version=3).terms.kernels.cpu_capability.endswith(
        "bfloat16, emulated"
    )  # fmt: skip


@pytest.mark.parametrize("asked", ["bfloat16", "auto"])
def test_recorded_log_probabilities_are_no_denominator_for_it(asked: str) -> None:
    with pytest.raises(RecipeError, match=r"more exact than the learner's.*old_logprobs = 'recomputed'"):
        build_recipe({}, [f"learner.precision={asked}"], origin="test")
