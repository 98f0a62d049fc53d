"""Any split of an optimiser step into passes gives the same loss terms and the same gradient."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import fork_of, make_batch, make_decoder
from torch.nn import functional

from hotpot.config.sections import LearnerSection
from hotpot.experience import TrainingSequence
from hotpot.learner import Learner, UpdateResult
from hotpot.learner.update.steps import UpdateSteps
from hotpot.models import Decoder

WHOLE = 16384
BOUND = 1e-6
"""Of the norm of a gradient, and of the size of a loss."""


def logits(decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:
    """The decoder's logits without their rounding to float32."""
    return functional.linear(hidden, decoder.embed_tokens.weight)


CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequences": {"aggregation": "sequence_mean"},
    "fixed": {"aggregation": "fixed_length", "aggregation_tokens": 9},
    "terms": {"kl_coefficient": 0.3, "entropy_coefficient": 0.2, "kl_estimator": "k2"},
    "sequence ratio": {"ratio": "sequence"},
    "decoupled": {"decoupled": "all", "aggregation": "sequence_mean"},
    "head": {"critic": "head", "advantages": "gae", "value_coefficient": 0.5, "gae_lambda": 0.9},
    "separate": {"critic": "separate", "advantages": "gae", "aggregation": "sequence_mean"},
    "traced": {"critic": "head", "advantages": "vtrace", "value_coefficient": 0.5, "gae_lambda": 0.9},
    "traced apart": {"critic": "separate", "advantages": "vtrace", "aggregation": "sequence_mean"},
    "traced pieces": {
        "critic": "head", "advantages": "vtrace", "segment_tokens": 64, "segment_overlap": 8,
        "old_logprobs": "recomputed", "vtrace_rho_bar": 2.0,
    },
    "pieces": {"segment_tokens": 64, "segment_overlap": 8, "old_logprobs": "recomputed"},
}  # fmt: skip


def step(
    sequences: list[TrainingSequence], choice: str, *, tokens: int, packing: str
) -> tuple[UpdateResult, torch.Tensor]:
    """Learn one optimiser step; return what it reports, and its gradient before anything is clipped."""
    chosen = CHOICES[choice]
    section = LearnerSection(
        learning_rate=0.0,
        minibatches=1,
        max_grad_norm=1e9,
        micro_batch_tokens=tokens,
        packing=packing,
        **chosen,
    )
    reference = make_decoder(seed=9).double() if "kl_coefficient" in chosen else None
    learner = Learner(
        make_decoder().double(), section, total_updates=1, seed=0, temperature=0.8, reference=reference
    )
    if learner.critic is not None:
        learner.critic.double()
        torch.nn.init.normal_(learner.critic.head.weight, generator=torch.Generator().manual_seed(1))
    result = learner.update(sequences, update=1, policy_version=3)
    modules = [learner.decoder] if learner.critic is None else [learner.decoder, learner.critic]
    found = [p.grad.flatten() for module in modules for p in module.parameters() if p.grad is not None]
    return result, torch.cat(found)


@st.composite
def batches(draw: st.DrawFn) -> list[TrainingSequence]:
    """Groups of unlike lengths, forks among them, some of it replayed or of another weight."""
    made = make_batch(
        groups=draw(st.integers(1, 4)), samples=draw(st.integers(2, 4)), seed=draw(st.integers(0, 99))
    )
    made += [fork_of(made[0], number) for number in range(draw(st.integers(0, 2)))]
    weights = st.sampled_from([1.0, 1.0, 0.5, 2.0])
    return [
        dataclasses.replace(one, weight=draw(weights), replayed=draw(st.booleans()) and draw(st.booleans()))
        for one in made
    ]


@pytest.mark.parametrize("choice", CHOICES)
@given(sequences=batches(), tokens=st.integers(64, 400), packing=st.sampled_from(["padded", "packed"]))
@settings(max_examples=12, deadline=None)
def test_a_split_changes_nothing(
    choice: str, sequences: list[TrainingSequence], tokens: int, packing: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "logits", logits)
        if CHOICES[choice].get("advantages") == "gae":
            sequences = [dataclasses.replace(one, replayed=False) for one in sequences]
        whole, gradient = step(sequences, choice, tokens=WHOLE, packing="padded")
        split, again = step(sequences, choice, tokens=tokens, packing=packing)
    assert split.batch_hash == whole.batch_hash
    for name in ("losses", "policy_losses", "kl_losses", "entropy_losses", "value_losses", "entropies"):
        np.testing.assert_allclose(getattr(split, name), getattr(whole, name), rtol=BOUND, atol=BOUND)
    assert float((again - gradient).norm()) <= BOUND * float(gradient.norm()) + 1e-12


def test_a_mean_by_pass_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commonest mistake: each pass is averaged over its own tokens."""
    monkeypatch.setattr(Decoder, "logits", logits)
    sequences = make_batch(groups=4, samples=4)
    _, right = step(sequences, "plain", tokens=WHOLE, packing="padded")
    real = UpdateSteps._weights

    def by_pass(self, micro, minibatch):
        weights = real(self, micro, minibatch)
        return weights / weights.sum() / len(minibatch.micros)

    monkeypatch.setattr(UpdateSteps, "_weights", by_pass)
    _, wrong = step(sequences, "plain", tokens=100, packing="padded")
    assert float((wrong - right).norm()) > 100 * BOUND * float(right.norm())
