"""Log-probabilities: against transformers, against a plain pass, and only where they belong."""

import dataclasses

import numpy as np
import pytest
import torch
from learner_cases import VOCAB, batch_of, make_batch, make_decoder, make_sequence
from transformers import AutoModelForCausalLM

from hotpot.errors import LearnerError
from hotpot.learner.batches.passes import cut, lay_out
from hotpot.learner.losses.policy_loss import entropy
from hotpot.learner.scores.forward import score
from hotpot.learner.scores.picked import picked
from hotpot.models import save_model


def scores_of(decoder, batch, *, max_tokens: int = 10_000, temperature: float = 1.0) -> np.ndarray:
    out = np.full(batch.num_loss_tokens, np.nan)
    with torch.no_grad():
        for micro in cut(batch.sequences, max_tokens=max_tokens):
            out[micro.flat] = score(decoder, micro, temperature=temperature).logprobs.numpy()
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shape", [{}, {"qk_norm": True}, {"tie_embeddings": False, "num_kv_heads": 4}])
def test_agrees_with_transformers(tmp_path, temperature: float, shape) -> None:
    decoder = make_decoder(**shape)
    save_model(tmp_path, decoder, {})
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    batch = batch_of(make_batch())
    found = scores_of(decoder, batch, temperature=temperature)
    assert len(lay_out([[m] for m in batch.sequences]).prefix) > 0
    for member in batch.sequences:
        tokens = torch.from_numpy(member.sequence.tokens.astype(np.int64))[None]
        with torch.no_grad():
            expected = (oracle(tokens).logits[0] / temperature).log_softmax(-1).numpy()
        for offset, position in enumerate(member.loss_positions):
            value = expected[position - 1, member.sequence.tokens[position]]
            assert found[member.start + offset] == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("spread", [True, False])
def test_a_picked_logprob_and_its_entropy_are_those_of_the_whole_distribution(spread) -> None:
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(1)) * 20
    logits[2, 3] = -torch.inf  # a token that can't come
    targets, into = torch.arange(7) + 5, torch.linspace(-1, 1, 7)
    ours, plain = (logits.clone().requires_grad_() for _ in range(2))
    found, entropies = picked(ours, targets, spread=spread)
    distribution = plain.log_softmax(-1)
    expected = distribution.gather(-1, targets[:, None])[:, 0]
    assert torch.equal(found, expected)
    assert torch.equal(entropies, entropy(distribution) if spread else torch.zeros(7))
    assert not entropies.requires_grad
    for one, other in ((found, ours), (expected, plain)):
        one.backward(into, retain_graph=True)
        first = other.grad.clone()
        one.backward(into)
        assert torch.equal(other.grad, 2 * first), "what is saved stays as it is"
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        assert torch.equal(picked(logits, targets, spread=spread)[0], found)


def test_any_cut_and_any_company_gives_the_same() -> None:
    decoder, batch = make_decoder(), batch_of(make_batch())
    alone = np.concatenate(
        [score(decoder, lay_out([[m]]), temperature=1.0).logprobs.detach().numpy() for m in batch.sequences]
    )
    for max_tokens in (40, 100, 10_000):
        assert np.allclose(scores_of(decoder, batch, max_tokens=max_tokens), alone, atol=1e-5)


def test_a_loss_token_depends_on_everything_before_it_and_nothing_after() -> None:
    decoder = make_decoder()
    base = make_sequence(0, 0, reward=0.0, turns=3)
    other = make_sequence(0, 1, reward=1.0)
    before = scores_of(decoder, batch_of([base, other]))
    positions = np.flatnonzero(base.loss_mask)
    for changed in range(len(base.tokens)):
        tokens = base.tokens.copy()
        tokens[changed] = (tokens[changed] + 1) % VOCAB
        after = scores_of(decoder, batch_of([dataclasses.replace(base, tokens=tokens), other]))
        moved = np.abs(after - before)[: len(positions)] > 1e-6
        # A token counts for its own log-probability and for that of all later loss tokens, tool results too.
        assert moved.tolist() == (positions >= changed).tolist()


def test_gradients_reach_the_shared_prefix() -> None:
    batch = batch_of(make_batch())
    gradients = []
    for micros in ([lay_out([[m] for m in batch.sequences])], [lay_out([[m]]) for m in batch.sequences]):
        decoder = make_decoder()
        for micro in micros:
            score(decoder, micro, temperature=1.0).logprobs.sum().backward()
        gradients.append([p.grad for p in decoder.parameters()])
    for together, apart in zip(*gradients, strict=True):
        assert torch.allclose(together, apart, atol=1e-4, rtol=1e-4)


def test_raw_log_probabilities_and_entropy() -> None:
    decoder, micro = make_decoder(), lay_out([[m] for m in batch_of(make_batch()).sequences])
    hot, plain = (score(decoder, micro, temperature=t) for t in (2.0, 1.0))
    assert torch.allclose(hot.model_logprobs, plain.logprobs.detach(), atol=1e-6)
    assert not torch.allclose(hot.logprobs, plain.logprobs, atol=1e-2)
    assert (hot.entropy > plain.entropy).float().mean() > 0.9
    assert hot.entropy.max() <= np.log(VOCAB) + 1e-6


def test_positions_beyond_the_context_are_refused_and_padding_there_is_not() -> None:
    batch = batch_of(make_batch())
    longest = max(m.num_inputs for m in batch.sequences)
    alone = lay_out([[m for m in batch.sequences if m.num_inputs == longest][:1]])
    assert alone.tokens.shape[1] > longest, "the padding must run past the context"
    found = [
        score(make_decoder(max_context_tokens=context), alone, temperature=1.0).logprobs
        for context in (longest, 96)
    ]
    assert torch.equal(*found)
    together = lay_out([[m] for m in batch.sequences])
    assert len(together.prefix) > 0
    for micro in (alone, together):
        with pytest.raises(LearnerError, match=f"{longest} tokens .* context of {longest - 1}"):
            score(make_decoder(max_context_tokens=longest - 1), micro, temperature=1.0)
