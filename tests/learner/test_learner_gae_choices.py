"""A critic beside the other choices of the recipe: KL in the reward, scales, terms of the loss, evidence, refusals."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from learner_cases import batch_of, make_batch, make_decoder, make_sequence
from test_learner_critic import awake, make_learner

from hotpot.config import Recipe
from hotpot.config.sections import LearnerSection
from hotpot.experience import TrainingSequence
from hotpot.learner import Learner
from hotpot.learner.batches.budget import PassBudget
from hotpot.learner.faults.norm_watch import MIN_NORMS
from hotpot.learner.scores import reference
from hotpot.learner.scores.critic import Critic
from hotpot.learner.scores.kl_reward import compare
from hotpot.learner.update import gradients
from hotpot.models import checksum

KINDS = ["head", "separate"]


def learner_with(kind: str = "head", **settings) -> Learner:
    section = LearnerSection(
        **{"advantages": "gae", "critic": kind, "minibatches": 1, "learning_rate": 1e-3, **settings}
    )
    learner = Learner(
        make_decoder(), section, total_updates=5, seed=0, temperature=1.0, reference=make_decoder(seed=7)
    )
    assert learner.critic is not None
    awake(learner.critic)
    return learner


def segmented() -> list[TrainingSequence]:
    """Two trajectories, one of them in two segments with rewards on its steps, one with its reward at the end."""
    first = [make_sequence(0, 0, reward=1.5), make_sequence(0, 0, reward=1.5, segment=1, seed=4)]
    earned = []
    for part, reward in zip(first, (0.5, 1.0), strict=True):
        rewards = np.zeros(len(part.tokens))
        rewards[np.flatnonzero(part.loss_mask)[-1]] = reward
        earned.append(dataclasses.replace(part, rewards=rewards))
    return [*earned, make_sequence(0, 1, reward=-0.5)]


@pytest.mark.parametrize(
    ("old", "temperature", "asked"), [("recorded", 0.7, 1), ("recomputed", 1.0, 1), ("recomputed", 0.7, 2)]
)
def test_a_reference_that_the_reward_asked_is_asked_no_more(monkeypatch, old, temperature, asked) -> None:
    """Only where the reward compares raw models at another temperature has the update's figure an answer of its own."""
    sequences, calls = make_batch(), []
    sequences = [dataclasses.replace(s, reward=1.0) if s.group_id == "g1" else s for s in sequences]
    true = reference.reference_logprobs

    def counted(*given, **told):
        calls.append(given[2])
        return true(*given, **told)

    for place in ("update.steps", "scores.kl_reward"):
        monkeypatch.setattr(f"hotpot.learner.{place}.reference_logprobs", counted)
    figures = {}
    for kl_in in ("reward", "loss"):
        calls.clear()
        section = LearnerSection(
            kl_in=kl_in, kl_coefficient=1e-9, old_logprobs=old, learning_rate=0.0, minibatches=2
        )
        learner = Learner(
            make_decoder(), section, total_updates=5, seed=0, temperature=temperature, reference=make_decoder(seed=7)
        )  # fmt: skip
        result = learner.update(sequences, update=1, policy_version=3)
        assert result.num_trajectories == 8, "a group without signal is compared, and not learned from"
        figures[kl_in] = result.reference_kl
        assert len(calls) == (asked if kl_in == "reward" else 1)
    assert figures["reward"] == pytest.approx(figures["loss"], rel=1e-5)
    assert figures["reward"] > 0.01


@pytest.mark.parametrize("level", ["token", "step"])
def test_a_kl_in_the_reward_is_paid_by_each_token_before_values_are_compared(level: str) -> None:
    parts = segmented()
    learner = learner_with(
        gae_level=level, gae_lambda=1.0, kl_in="reward", kl_coefficient=0.3, kl_estimator="k1"
    )
    paid = compare(make_decoder(seed=7), parts, learner.settings, 1.0, PassBudget(16384)).divergences
    result = learner.update(parts, update=1, policy_version=3)
    free = learner_with(gae_level=level).update(parts, update=1, policy_version=3)
    rows = {(row.trajectory_id, row.segment): row for row in result.learned}
    for part, before in zip(parts, free.learned, strict=True):
        row = rows[part.trajectory_id, part.segment]
        own, mask = paid[part.trajectory_id, part.segment], part.loss_mask
        # Lambda 1 and no discount: a token's advantage loses what it and all after it in the segment pay (behind that
        # stands a value), a step's what its first token does.
        to_go = np.cumsum(own[::-1])[::-1]
        if level == "step":
            places = np.flatnonzero(mask)
            step = np.cumsum(np.diff(places, prepend=places[0]) > 1)
            begins = np.array([np.flatnonzero(step == number)[0] for number in step])
            to_go = to_go[begins]
        np.testing.assert_allclose(row.advantages[mask], before.advantages[mask] - 0.3 * to_go, atol=1e-5)
        assert not row.advantages[~mask].any()
    assert result.kl_loss == 0
    assert result.reference_kl is not None


def test_scales_change_the_advantages_and_leave_the_returns() -> None:
    plain = learner_with().update(make_batch(), update=1, policy_version=3)
    flat = np.concatenate([row.advantages[row.loss_mask.astype(bool)] for row in plain.learned])
    for how in ("batch", "running"):
        found = learner_with(advantage_normalization=how).update(make_batch(), update=1, policy_version=3)
        assert (found.advantage_mean, found.advantage_std) == pytest.approx((0, 1), abs=1e-9)
        for before, after in zip(plain.learned, found.learned, strict=True):
            mask = before.loss_mask.astype(bool)
            assert after.returns.tobytes() == before.returns.tobytes()
            scaled = (before.advantages[mask] - flat.mean()) / flat.std()
            np.testing.assert_allclose(after.advantages[mask], scaled, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_sum_of_its_terms(kind: str) -> None:
    learner = learner_with(kind, entropy_coefficient=0.01, kl_coefficient=0.1, value_coefficient=0.7)
    result = learner.update(make_batch(), update=1, policy_version=3)
    terms = result.policy_losses + result.kl_losses + result.entropy_losses + 0.7 * result.value_losses
    assert terms.tobytes() == result.losses.tobytes()
    assert result.entropy_losses.max() < 0 < min(result.kl_losses.min(), result.value_losses.min())


def test_passes_of_any_size_give_the_same_gradient() -> None:
    found = [
        learner_with("separate", micro_batch_tokens=tokens, packing=packing).update(
            make_batch(), update=1, policy_version=3
        )
        for tokens, packing in ((48, "padded"), (4096, "padded"), (4096, "packed"))
    ]
    for other in found[1:]:
        assert other.loss == pytest.approx(found[0].loss, abs=1e-6)
        assert other.value_loss == pytest.approx(found[0].value_loss, abs=1e-6)
        assert other.grad_norm == pytest.approx(found[0].grad_norm, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, 1e200])
def test_a_value_that_breaks_the_loss_names_its_token(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make_learner(minibatches=1)
    (member,) = [m for m in batch_of(make_batch()).sequences if m.sequence.trajectory_id == "1.2.0"]
    real = Critic.values

    def values(self, micro, hidden):
        spoiled = torch.from_numpy(micro.flat == member.start + 2)
        return real(self, micro, hidden).double().masked_fill(spoiled, bad)

    monkeypatch.setattr(Critic, "values", values)
    before = checksum(learner.weights())
    (step,) = learner.update(make_batch(), update=1, policy_version=3).steps
    assert step.finding is not None
    assert (step.finding.reason, step.finding.trajectories) == ("non_finite_loss", ("1.2.0",))
    (token,) = step.finding.tokens
    assert (token.term, token.cause) == ("value", "new_value" if math.isnan(bad) else "overflow")
    assert token.position == member.loss_positions[2]
    assert (token.old_value, token.returns) == (0.0, member.sequence.reward)
    assert checksum(learner.weights()) == before


def test_a_separate_critic_whose_gradient_alone_is_not_finite_names_who_it_came_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bad = [m for m in batch_of(make_batch()).sequences if m.sequence.trajectory_id == "0.1.0"]
    real = Critic.values

    def values(self, micro, hidden):
        found = real(self, micro, hidden)
        factor = torch.ones(len(micro.flat))
        factor[torch.from_numpy(np.isin(micro.flat, np.arange(bad[0].start, bad[0].stop)))] = math.inf
        if found.requires_grad:
            found.register_hook(lambda gradient: gradient * factor)
        return found

    monkeypatch.setattr(Critic, "values", values)
    learner = make_learner("separate", minibatches=1)
    before = checksum(learner.weights())
    (step,) = learner.update(make_batch(), update=1, policy_version=3).steps
    assert step.finding is not None
    assert (step.finding.reason, step.finding.trajectories) == ("non_finite_gradient", ("0.1.0",))
    assert step.finding.network == "critic"
    assert math.isfinite(step.grad_norm)
    assert checksum(learner.weights()) == before


@pytest.mark.parametrize("skip", [False, True])
def test_a_separate_critic_that_explodes_is_told_of_by_its_own_norms(
    skip: bool, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    learner = make_learner("separate", minibatches=1, critic_extra_epochs=1, skip_exploding=skip)
    for update in range(1, MIN_NORMS // 2 + 1):
        calm = learner.update(make_batch(), update=update, policy_version=3)
        assert [step.finding for step in calm.steps] == [None, None]
        assert len(calm.critic_grad_norms) == 2
    (member,) = [m for m in batch_of(make_batch()).sequences if m.sequence.trajectory_id == "0.1.0"]
    real = Critic.values

    def values(self, micro, hidden):
        found = real(self, micro, hidden)
        factor = torch.ones(len(micro.flat))
        factor[torch.from_numpy(np.isin(micro.flat, np.arange(member.start, member.stop)))] = 1e5
        if found.requires_grad:
            found.register_hook(lambda gradient: gradient * factor)
        return found

    monkeypatch.setattr(Critic, "values", values)
    learner.save(tmp_path, {})
    again = make_learner("separate", minibatches=1, critic_extra_epochs=1, skip_exploding=skip)
    again.load(tmp_path)
    before, number = checksum(learner.weights()), MIN_NORMS // 2 + 1
    result = learner.update(make_batch(), update=number, policy_version=3)
    for step in result.steps:
        assert step.finding is not None
        assert step.finding.network == "critic"
        assert (step.finding.reason, step.finding.trajectories) == ("exploding_gradient", ("0.1.0",))
        assert step.finding.grad_norm == step.critic_grad_norm > 10 * step.finding.median_norm
    assert (checksum(learner.weights()) == before) is skip
    counted = (
        len(result.taken),
        len(result.taken_by_critic),
        result.skipped_steps,
        result.skipped_critic_steps,
    )
    assert counted == ((0, 0, 2, 1) if skip else (1, 1, 0, 0))
    assert result.skipped_at == ((0, 1) if skip else ())
    # The norms it is measured against are carried by a checkpoint.
    same = again.update(make_batch(), update=number, policy_version=3)
    assert [s.finding.median_norm for s in same.steps if s.finding] == [
        s.finding.median_norm for s in result.steps if s.finding
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_that_is_told_is_of_all_that_is_clipped_with_the_policy(kind: str) -> None:
    learner = learner_with(kind)
    assert learner.critic is not None
    own = gradients.Gradients(learner.decoder, learner.critic, max_norm=1e-3)
    policy, value = list(learner.decoder.parameters()), list(learner.critic.parameters())
    for parameter in (*policy, *value):
        parameter.grad = torch.ones_like(parameter)
    together = [*policy, *value] if kind == "head" else policy
    norms = own.clip()
    assert norms.policy == pytest.approx(sum(p.numel() for p in together) ** 0.5)
    assert (norms.critic is None) is (kind == "head")
    if norms.critic is not None:
        assert norms.critic == pytest.approx(sum(p.numel() for p in value) ** 0.5)
    for group in [together] if kind == "head" else [policy, value]:
        assert sum(float(p.grad.square().sum()) for p in group) ** 0.5 == pytest.approx(1e-3, rel=1e-3)


def test_a_critic_that_learns_on_alone_breaks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = [0], Critic.values

    def values(self, micro, hidden):
        found = real(self, micro, hidden)
        calls[0] += hidden is None
        return found.masked_fill(torch.arange(len(micro.flat)) == 0, math.nan) if calls[0] == 1 else found

    monkeypatch.setattr(Critic, "values", values)
    learner = make_learner("separate", minibatches=1, critic_extra_epochs=2)
    result = learner.update(make_batch(), update=1, policy_version=3)
    taken, skipped, alone = result.steps
    assert (taken.skipped, taken.epoch, skipped.epoch) == (False, 0, 1)
    assert (alone.skipped, alone.epoch, alone.critic_alone) == (False, 2, True)
    assert (result.skipped_steps, result.skipped_critic_steps, result.skipped_at) == (1, 1, (1,))
    assert result.critic_losses.tolist() == [alone.value_loss]
    assert result.critic_grad_norms.tolist() == [taken.critic_grad_norm, alone.critic_grad_norm]
    assert skipped.finding is not None
    (token,) = skipped.finding.tokens
    assert (token.term, token.cause) == ("value", "new_value")
    assert len(learner._watch.norms) == learner.optimizer_steps == 1


@pytest.mark.parametrize("kind", KINDS)
def test_counters_of_a_checkpoint_hold_scales_and_norms(kind: str, tmp_path) -> None:
    choice = {"advantage_normalization": "running", "learning_rate": 1e-2}
    first, second = learner_with(kind, **choice), learner_with(kind, **choice)
    first.update(make_batch(), update=1, policy_version=3)
    first.save(tmp_path, {})
    second.load(tmp_path)
    again = [one.update(make_batch(), update=2, policy_version=3) for one in (first, second)]
    assert again[0].terms.state == again[1].terms.state
    assert again[0].losses.tobytes() == again[1].losses.tobytes()
    assert again[0].value_losses.tobytes() == again[1].value_losses.tobytes()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantages": "gae"}, "set learner.advantages = 'gae' and learner.critic"),
        ({"critic": "head"}, "set learner.advantages = 'gae' and learner.critic"),
        ({"gae_lambda": 0.9}, "learner.gae_lambda = 0.9 says how a critic learns"),
        ({"value_clip": 0.1}, "learner.value_clip = 0.1 says how a critic learns"),
        ({"advantages": "gae", "critic": "head", "reward_normalization": "batch"}, "advantage_normalization"),
        ({"advantages": "reinforce_pp", "advantage_normalization": "minibatch"}, "normalised by itself"),
    ],
)
def test_combinations_without_sense_are_refused_with_a_remedy(settings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearnerSection(**settings)


def test_what_a_critic_needs_of_the_rest_of_the_recipe() -> None:
    gae = {"advantages": "gae", "critic": "separate"}
    Recipe(rollout={"samples_per_task": 1}, learner=gae)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"set replay\.share = 0"):
        Recipe(learner=gae, replay={"share": 0.2})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"learner\.advantages = 'gae' learns from every group"):
        Recipe(learner=gae, rollout={"refill": "until_signal"})  # type: ignore[arg-type]
