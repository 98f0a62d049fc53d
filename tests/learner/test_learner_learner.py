"""The learner as a whole: one update against an independent one, skips, agreement, determinism."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from learner_cases import batch_of, make_batch, make_decoder, make_sequence

from hotpot.config.sections import LearnerSection
from hotpot.errors import LearnerError
from hotpot.learner import Learner, NonFiniteError
from hotpot.learner.batches.batches import deal
from hotpot.learner.update.replayed import importance
from hotpot.models import checksum


def make_learner(
    decoder=None, *, temperature: float = 1.0, seed: int = 0, reference=None, **settings
) -> Learner:
    section = LearnerSection(**{"learning_rate": 1e-2, "minibatches": 2, **settings})
    return Learner(
        decoder or make_decoder(),
        section,
        total_updates=10,
        seed=seed,
        temperature=temperature,
        reference=reference,
    )


def plain_logprobs(decoder, sequence, temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of every token after the first, by one unpadded pass over the sequence alone. float32 [n - 1]."""
    tokens = torch.from_numpy(sequence.tokens.astype(np.int64))[None]
    logits = decoder.logits(decoder(tokens, torch.arange(tokens.shape[1])[None]))[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


def recorded_by(decoder, sequences, *, temperature: float = 1.0):
    """The sequences with the log-probabilities that ``decoder`` would have recorded."""
    out = []
    for s in sequences:
        with torch.no_grad():
            arrays = [
                np.where(s.loss_mask, np.concatenate([[0], plain_logprobs(decoder, s, t).numpy()]), 0)
                for t in (temperature, 1.0)
            ]
        behaviour, model = (array.astype(np.float32) for array in arrays)
        out.append(dataclasses.replace(s, behaviour_logprobs=behaviour, model_logprobs=model))
    return out


def independent_losses(
    decoder, reference, sequences, settings: LearnerSection, temperature: float
) -> list[float]:
    """An update written down anew: loops over sequences, autograd for the gradient, AdamW by its formula."""
    parameters = list(decoder.parameters())
    first = [torch.zeros_like(p) for p in parameters]
    second = [torch.zeros_like(p) for p in parameters]
    batch, losses, step = batch_of(sequences), [], 0
    old, factor = {}, {}
    for m in batch.sequences:
        recorded = torch.from_numpy(m.sequence.behaviour_logprobs[1:])
        recomputed = plain_logprobs(decoder, m.sequence, temperature).detach()
        again = m.sequence.replayed
        old[m.start] = recorded if settings.old_logprobs == "recorded" and not again else recomputed
        importance = (recomputed - recorded).exp().clamp(max=settings.replayed_ratio_cap)
        factor[m.start] = m.sequence.weight * (importance if again else torch.ones_like(recorded))
    for epoch in range(settings.epochs):
        for hand in deal(batch, minibatches=settings.minibatches, seed=0, update=1, epoch=epoch):
            terms = []
            for m in hand:
                mask = torch.from_numpy(m.sequence.loss_mask[1:])
                new = plain_logprobs(decoder, m.sequence, temperature)
                ratio = torch.exp(new - old[m.start])
                bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
                loss = -torch.minimum(ratio * m.advantage, bounded * m.advantage)
                if settings.kl_coefficient:
                    r = plain_logprobs(reference, m.sequence, temperature).detach() - new
                    loss = loss + settings.kl_coefficient * (r.exp() - 1 - r)
                terms.append((loss * factor[m.start])[mask])
            if settings.aggregation == "token_mean":
                total = torch.cat(terms).mean()
            else:
                total = torch.stack([term.mean() for term in terms]).mean()
            losses.append(float(total.detach()))
            gradients = torch.autograd.grad(total, parameters)
            norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients))
            scale = min(1.0, settings.max_grad_norm / (norm + 1e-6))
            step += 1
            with torch.no_grad():
                for p, g, a, b in zip(parameters, gradients, first, second, strict=True):
                    a.mul_(settings.beta1).add_(g * scale, alpha=1 - settings.beta1)
                    b.mul_(settings.beta2).add_((g * scale) ** 2, alpha=1 - settings.beta2)
                    p.mul_(1 - settings.learning_rate * settings.weight_decay)
                    upward = a / (1 - settings.beta1**step)
                    spread = (b / (1 - settings.beta2**step)).sqrt() + 1e-8
                    p.sub_(settings.learning_rate * upward / spread)
    return losses


@pytest.mark.parametrize(
    ("changes", "temperature"),
    [
        ({}, 1.0),
        ({"epochs": 2, "minibatches": 3, "weight_decay": 0.1}, 1.0),
        ({"aggregation": "sequence_mean", "clip_high": 0.28}, 1.0),
        ({"old_logprobs": "recomputed", "epochs": 2}, 0.6),
        ({"kl_coefficient": 0.1, "epochs": 2}, 1.3),
    ],
)
def test_losses_equal_those_of_an_independent_update(changes, temperature: float) -> None:
    reference = make_decoder(seed=7)
    learner = make_learner(temperature=temperature, reference=reference, learning_rate=1e-3, **changes)
    sequences = recorded_by(make_decoder(seed=0), make_batch(groups=4), temperature=temperature)
    result = learner.update(sequences, update=1, policy_version=3)
    expected = independent_losses(make_decoder(), reference, sequences, learner.settings, temperature)
    assert len(expected) == learner.settings.epochs * learner.settings.minibatches
    assert np.abs(result.losses - np.array(expected)).max() < 1e-6
    assert result.loss == pytest.approx(result.policy_loss + result.kl_loss)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_any_split_into_passes_gives_the_same_gradient(aggregation: str) -> None:
    sequences = [*make_batch(groups=4), make_sequence(0, 1, reward=1.0, segment=1, turns=1)]
    gradients, results = [], []
    for micro_batch_tokens in (40, 120, 100_000):
        learner = make_learner(
            minibatches=1, micro_batch_tokens=micro_batch_tokens, max_grad_norm=1e9, aggregation=aggregation
        )
        results.append(learner.update(sequences, update=1, policy_version=3))
        gradients.append([p.grad for p in learner.decoder.parameters()])
    for other, result in zip(gradients, results, strict=True):
        for one, two in zip(gradients[0], other, strict=True):
            assert torch.allclose(one, two, atol=1e-6, rtol=1e-5)
        for name in ("loss", "ratio_mean", "clip_fraction", "approx_kl", "overlap", "entropy"):
            assert getattr(result, name) == pytest.approx(getattr(results[0], name), rel=1e-5, abs=1e-6), name
        assert result.statistics.num_tokens == result.num_loss_tokens


def test_same_inputs_give_the_same_bits_in_any_order_of_arrival() -> None:
    sequences = make_batch()
    outcomes = []
    for shuffle in (None, 1, 2):
        arrived = sequences if shuffle is None else random.Random(shuffle).sample(sequences, len(sequences))
        learner = make_learner(epochs=2)
        results = [learner.update(arrived, update=u, policy_version=3) for u in (1, 2)]
        outcomes.append((checksum(learner.weights()), [r.losses.tobytes() for r in results]))
        assert results[0].batch_hash == results[1].batch_hash
    assert outcomes[0] == outcomes[1] == outcomes[2]
    other = make_learner(epochs=2, seed=1)
    assert other.update(sequences, update=1, policy_version=3).losses.tobytes() != outcomes[0][1][0]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -3.0])
def test_nothing_under_the_mask_changes_an_update(poison: float) -> None:
    sequences = make_batch()
    poisoned = [
        dataclasses.replace(
            s,
            behaviour_logprobs=np.where(s.loss_mask, s.behaviour_logprobs, poison).astype(np.float32),
            model_logprobs=np.where(s.loss_mask, s.model_logprobs, poison).astype(np.float32),
            token_policy_version=np.where(s.loss_mask, s.token_policy_version, 99).astype(np.int32),
        )
        for s in sequences
    ]
    outcomes = []
    for given in (sequences, poisoned):
        learner = make_learner(epochs=2)
        result = learner.update(given, update=1, policy_version=3)
        outcomes.append(
            (checksum(learner.weights()), result.losses.tobytes(), result.batch_hash, result.agreement)
        )
    assert outcomes[0] == outcomes[1]


def test_an_unmasked_value_does_change_it() -> None:
    sequences = recorded_by(make_decoder(), make_batch())
    target = sequences[0]
    changed = target.behaviour_logprobs.copy()
    changed[np.flatnonzero(target.loss_mask)[0]] -= 0.01
    results = [
        make_learner().update([s, *sequences[1:]], update=1, policy_version=3)
        for s in (target, dataclasses.replace(target, behaviour_logprobs=changed))
    ]
    assert results[0].losses.tobytes() != results[1].losses.tobytes()


@pytest.mark.parametrize("old_logprobs", ["recorded", "recomputed"])
def test_step_zero_agrees_with_the_sampler(old_logprobs: str) -> None:
    decoder = make_decoder()
    sequences = recorded_by(decoder, make_batch(), temperature=0.7)
    learner = make_learner(decoder, temperature=0.7, minibatches=1, old_logprobs=old_logprobs)
    result = learner.update(sequences, update=1, policy_version=3)
    assert result.agreement.num_tokens == result.num_loss_tokens
    assert 0 < result.agreement.maximum < 1e-5
    assert result.agreement.mean <= result.agreement.maximum
    assert result.ratio_mean == pytest.approx(1.0, abs=1e-5)
    assert result.clip_fraction == 0
    if old_logprobs == "recomputed":
        assert result.ratio_mean == 1.0


def test_agreement_covers_all_minibatches_before_the_first_step() -> None:
    decoder = make_decoder()
    sequences = recorded_by(decoder, make_batch())
    result = make_learner(decoder, minibatches=4, learning_rate=0.1).update(
        sequences, update=1, policy_version=3
    )
    assert result.agreement.num_tokens == result.num_loss_tokens
    assert result.agreement.maximum < 1e-5
    assert result.ratio_mean != pytest.approx(1.0, abs=1e-3)
    for learned in result.learned:
        assert np.allclose(learned.new_logprobs, learned.old_logprobs, atol=1e-5)


def test_agreement_over_the_first_minibatch_alone_changes_nothing_that_is_learned() -> None:
    decoder = make_decoder()
    sequences = recorded_by(decoder, make_batch())
    settings = {"minibatches": 4, "learning_rate": 0.1, "epochs": 2}
    whole = make_learner(decoder, **settings).update(sequences, update=1, policy_version=3)
    learner = make_learner(agreement="first_minibatch", **settings)
    result = learner.update(sequences, update=1, policy_version=3)
    assert result.losses.tolist() == whole.losses.tolist()
    assert [step.hash for step in result.steps] == [step.hash for step in whole.steps]
    assert 0 < result.agreement.num_tokens < result.num_loss_tokens
    assert result.agreement.maximum < 1e-5
    moved = [abs(a.new_logprobs - a.old_logprobs).max() for a in result.learned]
    assert sum(difference < 1e-5 for difference in moved) == result.steps[0].num_trajectories
    # Whatever is made of the starting weights' log-probabilities needs them all.
    for needed in ({"old_logprobs": "recomputed"}, {"decoupled": "all"}):
        learner = make_learner(agreement="first_minibatch", **settings, **needed)
        result = learner.update(sequences, update=1, policy_version=3)
        assert result.agreement.num_tokens == result.num_loss_tokens


def test_a_sampler_that_forgets_the_temperature_shows() -> None:
    decoder = make_decoder()
    sequences = recorded_by(decoder, make_batch(), temperature=1.0)
    result = make_learner(decoder, temperature=0.7).update(sequences, update=1, policy_version=3)
    assert result.agreement.maximum > 0.1


@pytest.mark.parametrize("cap", [1.0, 2.0])
def test_replayed_sequences_count_by_their_capped_importance_and_are_clipped_around_the_start(
    cap: float,
) -> None:
    sequences = recorded_by(make_decoder(5), make_batch())
    again = [
        dataclasses.replace(s, replayed=i % 2 == 0, weight=0.5 if i % 3 == 0 else 1.0)
        for i, s in enumerate(sequences)
    ]
    learner = make_learner(epochs=2, replayed_ratio_cap=cap)
    expected = independent_losses(make_decoder(), None, again, learner.settings, 1.0)
    result = learner.update(again, update=1, policy_version=3)
    assert result.losses == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert any(abs(a - b) > 1e-3 for a, b in zip(expected, make_learner(epochs=2).update(
        sequences, update=1, policy_version=3).losses, strict=True))  # fmt: skip
    for learned, s in zip(result.learned, again, strict=True):
        on = s.loss_mask
        old = learned.new_logprobs if s.replayed else s.behaviour_logprobs
        assert np.array_equal(learned.old_logprobs[on], old[on])


def test_staleness_and_agreement_are_of_what_was_not_replayed() -> None:
    sequences = make_batch(version=1)
    fresh = make_sequence(7, 0, reward=1.0, version=3)
    batch = [dataclasses.replace(s, replayed=True) for s in sequences]
    result = make_learner().update(
        [*batch, fresh, make_sequence(7, 1, version=3)], update=1, policy_version=3
    )
    assert (result.staleness_mean, result.staleness_max) == (0.0, 0)
    num_fresh = int(fresh.loss_mask.sum() + make_sequence(7, 1).loss_mask.sum())
    assert result.agreement.num_tokens == num_fresh < result.num_loss_tokens


def test_importance_is_capped_without_overflow() -> None:
    proximal, behaviour = np.array([0.0, -1.0, -2.0, -1e4]), np.array([-1e4, -1.0, -1.0, 0.0])
    assert importance(proximal, behaviour, 1.5) == pytest.approx([1.5, 1.0, math.exp(-1), 0.0])


def test_stale_tokens_are_counted_and_not_compared() -> None:
    sequences = make_batch()
    stale = dataclasses.replace(
        sequences[0],
        token_policy_version=np.where(sequences[0].loss_mask, 1, -1).astype(np.int32),
    )
    result = make_learner().update([stale, *sequences[1:]], update=1, policy_version=3)
    num_stale = int(stale.loss_mask.sum())
    assert result.agreement.num_tokens == result.num_loss_tokens - num_stale
    assert result.staleness_max == 2
    assert result.staleness_mean == pytest.approx(2 * num_stale / result.num_loss_tokens)


def test_learned_tokens_and_counts() -> None:
    dropped = [make_sequence(9, sample, reward=1.0) for sample in range(3)]
    sequences = make_batch(groups=2)
    result = make_learner().update([*sequences, *dropped], update=4, policy_version=3)
    assert [group.group_id for group in result.groups] == ["g0", "g1", "g9"]
    assert [group.kept for group in result.groups] == [True, True, False]
    assert result.num_groups_kept == 2
    assert result.num_trajectories == len(sequences)
    assert result.num_tokens == sum(len(s.tokens) for s in sequences)
    assert result.num_loss_tokens == sum(int(s.loss_mask.sum()) for s in sequences)
    assert result.statistics.num_tokens == result.num_loss_tokens
    assert [learned.trajectory_id for learned in result.learned] == [s.trajectory_id for s in sequences]
    for position, (learned, s) in enumerate(zip(result.learned, sequences, strict=True)):
        assert learned.position == position
        assert np.array_equal(learned.loss_mask, s.loss_mask)
        assert np.array_equal(learned.old_logprobs, s.behaviour_logprobs)
        assert np.array_equal(learned.advantages, np.where(s.loss_mask, s.reward - 0.5, 0))
        assert np.array_equal(learned.returns, np.where(s.loss_mask, s.reward, 0))
        assert (learned.new_logprobs[s.loss_mask] < 0).all()
        assert not learned.new_logprobs[~s.loss_mask].any()
    flat = np.concatenate([learned.advantages[learned.loss_mask == 1] for learned in result.learned])
    assert result.advantage_mean == pytest.approx(flat.mean())
    assert result.advantage_std == pytest.approx(flat.std())


def test_no_group_with_signal_takes_no_step() -> None:
    learner = make_learner()
    before = checksum(learner.weights())
    result = learner.update([make_sequence(0, i, reward=1.0) for i in range(4)], update=1, policy_version=3)
    assert checksum(learner.weights()) == before
    assert result.steps == ()
    assert result.learned == ()
    assert [group.reason for group in result.groups] == ["equal_rewards"]
    for name in ("loss", "grad_norm", "ratio_mean", "entropy", "overlap", "num_loss_tokens", "advantage_std"):
        assert getattr(result, name) == 0, name
    assert result.agreement.num_tokens == 0


def test_learning_rate_zero_changes_nothing() -> None:
    learner = make_learner(learning_rate=0.0, epochs=2)
    before = checksum(learner.weights())
    result = learner.update(make_batch(), update=1, policy_version=3)
    assert len(result.taken) == 4
    assert result.grad_norm > 0
    assert checksum(learner.weights()) == before


def test_the_learning_rate_falls_linearly() -> None:
    learner = make_learner(learning_rate=1.0, final_learning_rate_share=0.1)
    assert [learner.learning_rate(u) for u in (1, 10, 99)] == pytest.approx([1.0, 0.1, 0.1])
    assert learner.learning_rate(4) - learner.learning_rate(5) == pytest.approx(0.1)
    assert learner.update(make_batch(), update=10, policy_version=3).learning_rate == pytest.approx(0.1)
    ended = make_learner(learning_rate=1.0, final_learning_rate_share=0.0)
    before = checksum(ended.weights())
    ended.update(make_batch(), update=10, policy_version=3)
    assert checksum(ended.weights()) == before


def test_gradients_are_clipped() -> None:
    learner = make_learner(minibatches=1, max_grad_norm=0.01)
    result = learner.update(make_batch(), update=1, policy_version=3)
    assert result.grad_norm > 0.1
    clipped = math.sqrt(sum(float((p.grad**2).sum()) for p in learner.decoder.parameters()))
    assert clipped == pytest.approx(0.01, rel=1e-3)


def test_training_makes_the_rewarded_token_likelier() -> None:
    decoder = make_decoder()
    learner = make_learner(decoder, learning_rate=3e-3, epochs=1, minibatches=1)
    sequences = make_batch()
    good = [s for s in sequences if s.reward > 0]

    def likelihood() -> float:
        with torch.no_grad():
            return float(
                sum(plain_logprobs(decoder, s)[torch.from_numpy(s.loss_mask[1:])].sum() for s in good)
            )

    before = likelihood()
    for update in range(1, 6):
        learner.update(recorded_by(decoder, sequences), update=update, policy_version=3)
    assert likelihood() > before + 1


def test_a_reference_is_measured_and_pulls() -> None:
    decoder, sequences = make_decoder(), make_batch()
    twin = make_learner(decoder, reference=make_decoder(), minibatches=1).update(
        sequences, update=1, policy_version=3
    )
    assert twin.reference_kl == pytest.approx(0.0, abs=1e-9)
    far = make_learner(reference=make_decoder(seed=3), kl_coefficient=0.5, minibatches=1).update(
        sequences, update=1, policy_version=3
    )
    assert far.reference_kl is not None
    assert far.reference_kl > 0.1
    assert far.kl_loss == pytest.approx(0.5 * far.reference_kl)
    assert make_learner().update(sequences, update=1, policy_version=3).reference_kl is None


def spoiled(sequence):
    logprobs = sequence.behaviour_logprobs.copy()
    logprobs[np.flatnonzero(sequence.loss_mask)[-1]] = math.nan
    return dataclasses.replace(sequence, behaviour_logprobs=logprobs)


def test_a_non_finite_log_probability_skips_its_step_and_is_named() -> None:
    sequences = make_batch()
    sequences[2] = spoiled(sequences[2])
    learner = make_learner(minibatches=3)
    result = learner.update(sequences, update=1, policy_version=3)
    assert result.skipped_steps == 1
    assert result.skipped_trajectories == ("0.2.0",)
    assert len(result.losses) == 2
    assert np.isfinite(result.losses).all()
    assert np.isfinite(result.grad_norms).all()
    assert math.isfinite(result.ratio_mean)
    assert all(torch.isfinite(p).all() for p in learner.decoder.parameters())
    assert result.agreement.num_tokens == result.num_loss_tokens - 1


def test_a_skipped_step_leaves_the_weights_alone() -> None:
    sequences = make_batch()
    sequences[2] = spoiled(sequences[2])
    learner = make_learner(minibatches=1)
    before = checksum(learner.weights())
    result = learner.update(sequences, update=1, policy_version=3)
    assert (result.skipped_steps, len(result.taken)) == (1, 0)
    assert checksum(learner.weights()) == before
    assert learner.optimizer_steps == 0


def test_a_non_finite_gradient_names_the_whole_step() -> None:
    learner = make_learner(minibatches=1)
    learner.decoder.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    before = checksum(learner.weights())
    result = learner.update(make_batch(groups=1), update=1, policy_version=3)
    assert result.skipped_trajectories == ("0.0.0", "0.1.0", "0.2.0", "0.3.0")
    assert checksum(learner.weights()) == before


def test_too_many_skips_in_a_row_stop_the_run_and_name_the_trajectories() -> None:
    learner = make_learner(minibatches=1, max_skipped_in_a_row=3)
    bad = [spoiled(s) if s.trajectory_id == "0.2.0" else s for s in make_batch()]
    learner.update(bad, update=1, policy_version=3)
    learner.update(bad, update=2, policy_version=3)
    learner.update(make_batch(), update=3, policy_version=3)
    for update in (4, 5):
        learner.update(bad, update=update, policy_version=3)
    with pytest.raises(NonFiniteError, match=r"0\.2\.0") as caught:
        learner.update(bad, update=6, policy_version=3)
    assert "0.1.0" not in str(caught.value)
    assert learner.update_number == 5


def test_giving_up_carries_the_update_as_far_as_it_came() -> None:
    learner = make_learner(minibatches=4, epochs=2, max_skipped_in_a_row=1)
    bad = [spoiled(s) if s.trajectory_id == "0.2.0" else s for s in make_batch()]
    with pytest.raises(NonFiniteError) as caught:
        learner.update(bad, update=7, policy_version=3)
    result = caught.value.result
    assert (result.update, result.policy_version, result.skipped_steps) == (7, 3, 1)
    assert [step.skipped for step in result.steps] == [False] * len(result.taken) + [True]
    assert result.skipped_trajectories == ("0.2.0",)
    assert len(result.learned) == len(bad)
    assert result.agreement.num_tokens == result.num_loss_tokens - 1


def test_impossible_input_is_refused() -> None:
    learner, one = make_learner(), make_sequence(0, 0)
    with pytest.raises(LearnerError, match="no sequences"):
        learner.update([], update=1, policy_version=3)
    with pytest.raises(LearnerError, match="twice"):
        learner.update([one, one], update=1, policy_version=3)
    with pytest.raises(LearnerError, match="version 3"):
        learner.update(make_batch(), update=1, policy_version=2)
    with pytest.raises(LearnerError, match="temperature"):
        make_learner(temperature=0.0)
    with pytest.raises(LearnerError, match="reference"):
        make_learner(kl_coefficient=0.1)


@pytest.mark.parametrize(
    ("shape", "message"),
    [({"vocab_size": 39}, "vocabulary of 39 .* 40"), ({"max_context_tokens": 95}, "context of 95 .* 96")],
)
def test_a_reference_that_cannot_score_the_policy_is_refused_at_once(shape, message: str) -> None:
    with pytest.raises(LearnerError, match=message):
        make_learner(reference=make_decoder(**shape))
    make_learner(reference=make_decoder(max_context_tokens=97))
