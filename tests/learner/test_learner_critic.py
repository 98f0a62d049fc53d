"""The critic: its values against plain passes, an update with it written down anew, and what it leaves alone."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_cases import make_batch, make_decoder, make_sequence
from test_learner_learner import plain_logprobs, recorded_by

from hotpot.config.sections import LearnerSection
from hotpot.errors import ModelFilesError
from hotpot.experience import Cutting, cut_sequence
from hotpot.learner import Learner
from hotpot.learner.batches.batches import deal
from hotpot.learner.batches.states import piece_states
from hotpot.learner.scores.critic import Critic, state_values
from hotpot.models import checksum

KINDS = ["head", "separate"]


def make_learner(kind: str = "head", seed: int = 0, **settings) -> Learner:
    section = LearnerSection(
        **{
            "learning_rate": 1e-2,
            "minibatches": 2,
            "critic": kind,
            "advantages": "gae",
            "value_clip": 0.2,
            "value_coefficient": 0.5,
            **settings,
        }
    )
    return Learner(make_decoder(seed), section, total_updates=10, seed=0, temperature=1.0)


def plain_values(critic: Critic, policy, tokens: np.ndarray) -> torch.Tensor:
    """The value behind each token, by one unpadded pass: float32 [n]."""
    reader = policy if critic.decoder is None else critic.decoder
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    return critic.head(reader(ids, torch.arange(ids.shape[1])[None]))[0, :, 0]


def awake(critic: Critic) -> Critic:
    """The critic with a head that says something."""
    with torch.no_grad():
        critic.head.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(3))
        critic.head.bias.fill_(0.25)
    return critic


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_values_are_those_of_plain_passes(kind, packing) -> None:
    policy = make_decoder()
    critic = awake(Critic(policy, kind))
    whole = [dataclasses.replace(s, truncated=i % 2 == 0) for i, s in enumerate(make_batch())]
    long = dataclasses.replace(make_sequence(9, turns=12), truncated=True)
    pieces = [*whole, *cut_sequence(long, Cutting(segment_tokens=64, overlap=16))]
    states = piece_states(pieces, "token")
    found = state_values(critic, policy, states, max_tokens=160, packing=packing)
    assert sum(state.final for state in states) == len(whole) / 2 + 1
    for state, values in zip(states, found, strict=True):
        with torch.no_grad():
            behind = plain_values(critic, policy, state.piece.tokens).double().numpy()
        places = [*(state.places - 1).tolist(), *([len(state.piece.tokens) - 1] if state.final else [])]
        assert np.abs(values - behind[places]).max() < 1e-5


def test_a_new_critic_says_nothing_and_shares_no_weights() -> None:
    policy = make_decoder()
    for kind in KINDS:
        found = state_values(
            Critic(policy, kind),
            policy,
            piece_states(make_batch(), "token"),
            max_tokens=500,
            packing="padded",
        )
        assert all((values == 0).all() for values in found)
    own = Critic(policy, "separate").decoder
    assert own is not None
    assert checksum(own.state_dict()) == checksum(policy.state_dict())
    assert not {p.data_ptr() for p in own.parameters()} & {p.data_ptr() for p in policy.parameters()}


def independent_update(learner: Learner, sequences) -> tuple[list[float], list[float]]:
    """One update with a critic, written down anew: terminal rewards, lambda 1, so the advantage is reward - value."""
    s = learner.settings
    policy, critic = learner.decoder, learner.critic
    assert critic is not None
    groups = [list(policy.parameters()), list(critic.parameters())]
    together = [groups[0] + groups[1]] if s.critic == "head" else groups
    optimizer = torch.optim.AdamW(
        [{"params": groups[0]}, {"params": groups[1], "lr": s.critic_learning_rate or s.learning_rate}],
        lr=s.learning_rate, betas=(s.beta1, s.beta2), weight_decay=s.weight_decay,
    )  # fmt: skip
    batch = learner._batch(sequences, ())[0]
    old = {m.start: plain_values(critic, policy, m.sequence.tokens)[:-1].detach() for m in batch.sequences}
    losses, value_losses = [], []
    for epoch in range(s.epochs):
        for hand in deal(batch, minibatches=s.minibatches, seed=0, update=1, epoch=epoch):
            gains = {
                m.start: (m.sequence.reward - old[m.start])[torch.from_numpy(m.sequence.loss_mask[1:])]
                for m in hand
            }
            pool = torch.cat(list(gains.values()))
            terms, errors = [], []
            for m in hand:
                mask = torch.from_numpy(m.sequence.loss_mask[1:])
                gain = gains[m.start]
                if s.advantage_normalization == "minibatch":
                    gain = (gain - pool.mean()) / pool.std(unbiased=False)
                recorded = torch.from_numpy(m.sequence.behaviour_logprobs[1:])[mask]
                ratio = (plain_logprobs(policy, m.sequence)[mask] - recorded).exp()
                terms.append(
                    -torch.minimum(ratio * gain, ratio.clamp(1 - s.clip_low, 1 + s.clip_high) * gain)
                )
                new, before = plain_values(critic, policy, m.sequence.tokens)[:-1][mask], old[m.start][mask]
                bounded = before + (new - before).clamp(-s.value_clip, s.value_clip)
                errors.append(
                    0.5 * torch.maximum((new - m.sequence.reward) ** 2, (bounded - m.sequence.reward) ** 2)
                )
            value = torch.cat(errors).mean()
            total = torch.cat(terms).mean() + s.value_coefficient * value
            losses.append(float(total.detach()))
            value_losses.append(float(value.detach()))
            optimizer.zero_grad()
            total.backward()
            for parameters in together:
                torch.nn.utils.clip_grad_norm_(parameters, s.max_grad_norm)
            optimizer.step()
    return losses, value_losses


@pytest.mark.parametrize(
    "changes",
    [
        {"critic": "head"},
        {"critic": "separate", "critic_learning_rate": 3e-3, "epochs": 2},
        {
            "critic": "head",
            "advantage_normalization": "minibatch",
            "value_clip": 0.02,
            "epochs": 2,
            "minibatches": 3,
        },
    ],
)
def test_losses_equal_those_of_an_independent_update(changes) -> None:
    learner, other = (
        make_learner(learning_rate=1e-3, **{"kind": changes["critic"], **changes}) for _ in range(2)
    )
    for one in (learner, other):
        assert one.critic is not None
        awake(one.critic)
    sequences = recorded_by(make_decoder(), make_batch(groups=4))
    result = learner.update(sequences, update=1, policy_version=3)
    losses, value_losses = independent_update(other, sequences)
    assert len(losses) == learner.settings.epochs * learner.settings.minibatches
    assert np.abs(result.losses - losses).max() < 1e-5
    assert [step.value_loss for step in result.steps] == pytest.approx(value_losses, abs=1e-5)
    assert result.value_loss == pytest.approx(np.mean(value_losses), abs=1e-5)
    for learned in result.learned:
        reward = next(s.reward for s in sequences if s.trajectory_id == learned.trajectory_id)
        assert np.array_equal(learned.returns, np.where(learned.loss_mask, reward, 0).astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_groups_without_signal_are_learned_and_explained_better_and_better(kind) -> None:
    # One group fails and one succeeds as a whole: no group baseline would learn a thing from them.
    sequences = [
        make_sequence(issue, sample, reward=float(issue)) for issue in range(2) for sample in range(4)
    ]
    learner = make_learner(kind, epochs=4, value_clip=0.0)
    results = [learner.update(sequences, update=u, policy_version=3) for u in range(1, 7)]
    assert all(group.kept for group in results[0].groups)
    assert results[0].explained_variance == pytest.approx(0.0, abs=1e-6)
    assert (results[-1].explained_variance or 0) > 0.8
    assert (results[-1].value_loss or 1) < 0.3 * (results[0].value_loss or 0)
    assert results[-1].advantage_std < results[0].advantage_std


def test_without_a_critic_there_are_no_figures_of_one() -> None:
    section = LearnerSection(learning_rate=1e-2, minibatches=2)
    learner = Learner(make_decoder(), section, total_updates=10, seed=0, temperature=1.0)
    result = learner.update(make_batch(), update=1, policy_version=3)
    assert (result.value_loss, result.explained_variance, learner.critic) == (None, None, None)


def test_a_value_that_is_not_finite_skips_the_step_and_names_the_trajectory() -> None:
    learner = make_learner(minibatches=1, epochs=1)
    sequences = make_batch()
    bad = dataclasses.replace(sequences[3], rewards=np.full(len(sequences[3].tokens), np.nan))
    before = checksum(learner.weights())
    result = learner.update([*sequences[:3], bad, *sequences[4:]], update=1, policy_version=3)
    assert result.skipped_trajectories == (bad.trajectory_id,)
    assert checksum(learner.weights()) == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_continues_bit_by_bit(kind, tmp_path: Path) -> None:
    straight, resumed = make_learner(kind), make_learner(kind, seed=5)
    straight.update(make_batch(), update=1, policy_version=3)
    straight.save(tmp_path, {"tokenizer.json": b"{}"})
    resumed.update(make_batch(groups=2), update=1, policy_version=3)
    resumed.load(tmp_path)
    one, two = (learner.update(make_batch(), update=2, policy_version=3) for learner in (straight, resumed))
    assert one.losses.tobytes() == two.losses.tobytes()
    assert one.batch_hash == two.batch_hash
    for left, right in zip(straight.critic.parameters(), resumed.critic.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(("written", "asked"), [("head", "none"), ("none", "separate"), ("separate", "head")])
def test_a_checkpoint_with_another_critic_is_refused_whole(written: str, asked: str, tmp_path: Path) -> None:
    def learner(kind: str, seed: int) -> Learner:
        section = LearnerSection() if kind == "none" else LearnerSection(critic=kind, advantages="gae")
        return Learner(make_decoder(seed), section, total_updates=10, seed=0, temperature=1.0)

    learner(written, 0).save(tmp_path, {"tokenizer.json": b"{}"})
    other = learner(asked, 5)
    before = checksum(other.weights())
    with pytest.raises(ModelFilesError, match=r"learner\.critic"):
        other.load(tmp_path)
    assert checksum(other.weights()) == before


def test_overlapping_pieces_learn_from_the_merged_estimate() -> None:
    sequences = [
        dataclasses.replace(make_sequence(0, sample, reward=float(sample), turns=12)) for sample in range(2)
    ]
    hashes, results = set(), {}
    for merge in ("mean", "nearest_centre", "last"):
        learner = make_learner(
            segment_tokens=64, segment_overlap=32, old_logprobs="recomputed", advantage_merge=merge
        )
        assert learner.critic is not None
        awake(learner.critic)
        results[merge] = learner.update(sequences, update=1, policy_version=3)
        hashes.add(results[merge].batch_hash)
    assert len(hashes) == 3
    for learned in zip(*(result.learned for result in results.values()), strict=True):
        assert all(math.isfinite(value) for one in learned for value in one.advantages)


def test_further_epochs_are_the_critics_alone(tmp_path: Path) -> None:
    plain, further = (
        make_learner("separate", value_clip=0.0),
        make_learner("separate", value_clip=0.0, critic_extra_epochs=3),
    )
    one, two = (learner.update(make_batch(), update=1, policy_version=3) for learner in (plain, further))
    assert one.losses.tobytes() == two.losses.tobytes()
    assert checksum(plain.weights()) == checksum(further.weights())
    assert further.optimizer_steps == plain.optimizer_steps == 2
    assert not torch.equal(plain.critic.head.weight, further.critic.head.weight)
    further.save(tmp_path, {"tokenizer.json": b"{}"})
    resumed = make_learner("separate", seed=5, value_clip=0.0, critic_extra_epochs=3)
    resumed.load(tmp_path)
    one, two = (learner.update(make_batch(), update=2, policy_version=3) for learner in (further, resumed))
    assert one.losses.tobytes() == two.losses.tobytes()
    assert torch.equal(further.critic.head.weight, resumed.critic.head.weight)
