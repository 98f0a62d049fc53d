"""Every choice of estimator and loss in the recipe, through a whole update, against one written down anew in float64."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import make_decoder, make_sequence

from hotpot.config import Recipe
from hotpot.config.sections import LearnerSection
from hotpot.experience import TrainingSequence
from hotpot.learner import Learner
from hotpot.learner.update.shaping import RunningScales
from hotpot.models import Decoder

TEMPERATURE = 1.25
VERSION = 3
CHOICES: list[dict[str, Any]] = [
    {"advantages": "group_normalized"},
    {"advantages": "rloo"},
    {"advantages": "reinforce_pp"},
    {"advantages": "reinforce_pp", "kl_in": "reward", "kl_coefficient": 0.3, "kl_estimator": "k1"},
    {"advantages": "reinforce_pp", "reward_normalization": "group"},
    {"kl_in": "reward", "kl_coefficient": 0.3, "kl_estimator": "k1"},
    {"advantages": "rloo", "kl_in": "reward", "kl_coefficient": 0.3, "kl_estimator": "k2"},
    {"reward_normalization": "group"},
    {"reward_normalization": "batch"},
    {"reward_normalization": "running"},
    {"advantage_normalization": "batch"},
    {"advantage_normalization": "running"},
    {"aggregation": "fixed_length", "aggregation_tokens": 20},
    {"ratio": "sequence", "clip_low": 0.01, "clip_high": 0.02},
    {"clip_dual": 1.05},
    {"decoupled": "stale", "importance_cap": 1.1},
    {"decoupled": "all", "importance_cap": 1.1},
    {"kl_coefficient": 0.2, "kl_estimator": "k2"},
    {"entropy_coefficient": 0.1},
]


def collected(sampler: Decoder) -> list[TrainingSequence]:
    """Three groups with signal, one trajectory in two segments, versions mixed, as ``sampler`` would have recorded them."""
    parts = [
        make_sequence(
            issue, sample, reward=sample % 2 + 0.3 * issue, turns=1 + sample % 3, version=2 + sample % 2
        )
        for issue in range(3)
        for sample in range(4)
    ]
    parts.append(make_sequence(1, 2, reward=0.3, segment=1, seed=5, version=2))
    return [
        dataclasses.replace(
            part,
            behaviour_logprobs=scores(sampler, part)[0].detach().numpy().astype(np.float32) * part.loss_mask,
        )
        for part in parts
    ]


def scores(decoder: Decoder, part: TrainingSequence) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each token and entropy of the distribution it came from, float64 [n]; 0 for the first."""
    tokens = torch.from_numpy(part.tokens.astype(np.int64))[None]
    logits = decoder.logits(decoder(tokens, torch.arange(tokens.shape[1])[None]))[0, :-1].double()
    spread = (logits / TEMPERATURE).log_softmax(-1)
    zero = torch.zeros(1, dtype=torch.float64)
    said = spread.gather(-1, tokens[0, 1:, None])[:, 0]
    return torch.cat([zero, said]), torch.cat([zero, -(spread.exp() * spread).sum(-1)])


def scaled(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / values.std()


def advantages_anew(
    parts: Sequence[TrainingSequence], reference: Decoder, s: LearnerSection
) -> list[np.ndarray]:
    """The advantages of each part's loss tokens."""
    order = sorted({(p.group_id, p.trajectory_id) for p in parts})
    reward = {p.trajectory_id: p.reward for p in parts}
    paid: dict[tuple[str, int], np.ndarray] = {}
    for p in parts:
        mask = p.loss_mask
        apart = p.behaviour_logprobs[mask] - scores(reference, p)[0].detach().numpy()[mask]
        kl = {"k1": apart, "k2": apart**2 / 2, "k3": np.exp(-apart) - 1 + apart}[s.kl_estimator]
        paid[p.trajectory_id, p.segment] = kl * (s.kl_coefficient if s.kl_in == "reward" else 0)
    by_token = s.advantages == "reinforce_pp"
    if not by_token:
        reward = {t: r - sum(v.sum() for (u, _), v in paid.items() if u == t) for t, r in reward.items()}
    values, groups = np.array([reward[t] for _, t in order]), np.array([g for g, _ in order])
    if s.reward_normalization in {"batch", "running"}:
        values = scaled(values)
    for group in set(groups):
        own = values[groups == group]
        if s.reward_normalization == "group" or s.advantages == "group_normalized":
            own = scaled(own)
        if s.advantages == "rloo":
            own = np.array([value - np.delete(own, n).mean() for n, value in enumerate(own)])
        elif not by_token:
            own = own - own.mean()
        values[groups == group] = own
    of = {trajectory: value for (_, trajectory), value in zip(order, values, strict=True)}
    out = []
    for p in parts:
        mine, later = (
            paid[p.trajectory_id, p.segment],
            [v.sum() for (t, segment), v in paid.items() if t == p.trajectory_id and segment > p.segment],
        )
        to_go = np.array([mine[n:].sum() for n in range(len(mine))]) + sum(later)
        out.append(of[p.trajectory_id] - (to_go if by_token else 0 * mine))
    flat = np.concatenate(out)
    if by_token or s.advantage_normalization != "none":
        return [(gain - flat.mean()) / flat.std() for gain in out]
    return out


def loss_anew(
    parts: Sequence[TrainingSequence], policy: Decoder, reference: Decoder, s: LearnerSection
) -> float:
    """The loss of the first optimiser step, over all parts."""
    total, num = 0.0, sum(int(p.loss_mask.sum()) for p in parts)
    owners = len({p.trajectory_id for p in parts})
    for p, gain in zip(parts, advantages_anew(parts, reference, s), strict=True):
        mask = p.loss_mask
        new, spread = (values.detach().numpy()[mask] for values in scores(policy, p))
        recorded = p.behaviour_logprobs[mask].astype(np.float64)
        versions = p.token_policy_version[mask]
        apart = {"replayed": versions < 0, "stale": versions < VERSION, "all": versions >= 0}[s.decoupled]
        logs = new - np.where(apart, new, recorded)
        if s.ratio == "sequence":
            logs = np.full_like(logs, logs.mean())
        ratio = np.exp(logs)
        objective = np.minimum(ratio * gain, ratio.clip(1 - s.clip_low, 1 + s.clip_high) * gain)
        if s.clip_dual:
            objective = np.where(gain < 0, np.maximum(objective, s.clip_dual * gain), objective)
        term = -objective - s.entropy_coefficient * spread
        if s.kl_in == "loss":
            r = scores(reference, p)[0].detach().numpy()[mask] - new
            term += s.kl_coefficient * {"k2": r**2 / 2, "k3": np.exp(r) - 1 - r}[s.kl_estimator]
        weight = np.where(apart, np.minimum(np.exp(new - recorded), s.importance_cap), 1.0)
        fixed = s.aggregation == "fixed_length"
        total += (term * weight).sum() / (owners * s.aggregation_tokens if fixed else num)
    return float(total)


def learner_with(**choice: Any) -> Learner:
    return Learner(
        make_decoder(),
        LearnerSection(minibatches=1, **choice),
        total_updates=5,
        seed=0,
        temperature=TEMPERATURE,
        reference=make_decoder(seed=7),
    )


@pytest.fixture(scope="module")
def parts() -> list[TrainingSequence]:
    return collected(make_decoder(seed=1))


@pytest.mark.parametrize("choice", [{}, *CHOICES], ids=str)
def test_each_choice_is_what_it_says(choice: dict[str, Any], parts: list[TrainingSequence]) -> None:
    learner = learner_with(**choice)
    result = learner.update(parts, update=1, policy_version=VERSION)
    gains = advantages_anew(parts, make_decoder(seed=7), learner.settings)
    learned = {(row.trajectory_id, row.segment): row for row in result.learned}
    for part, gain in zip(parts, gains, strict=True):
        row = learned[part.trajectory_id, part.segment]
        np.testing.assert_allclose(row.advantages[part.loss_mask], gain, atol=1e-5)
        assert not row.advantages[~part.loss_mask].any()
    expected = loss_anew(parts, make_decoder(), make_decoder(seed=7), learner.settings)
    assert result.loss == pytest.approx(expected, abs=1e-5)
    if choice:
        plain = learner_with().update(parts, update=1, policy_version=VERSION)
        assert abs(plain.loss - result.loss) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("choice", [{}, *CHOICES], ids=str)
def test_what_stands_under_the_mask_changes_nothing_and_every_action_token_something(
    choice: dict[str, Any], parts: list[TrainingSequence]
) -> None:
    def outcome(sequences: list[TrainingSequence]) -> tuple[float, float, str]:
        result = learner_with(**choice).update(sequences, update=1, policy_version=VERSION)
        return result.loss, result.grad_norm, result.batch_hash

    before = outcome(parts)
    junk = [
        dataclasses.replace(
            p,
            behaviour_logprobs=np.where(p.loss_mask, p.behaviour_logprobs, np.nan).astype(np.float32),
            model_logprobs=np.where(p.loss_mask, p.model_logprobs, np.inf).astype(np.float32),
            token_policy_version=np.where(p.loss_mask, p.token_policy_version, -99).astype(np.int32),
        )
        for p in parts
    ]
    assert outcome(junk) == before
    target = parts[5]
    for place in np.flatnonzero(target.loss_mask):
        logprobs, tokens = target.behaviour_logprobs.copy(), target.tokens.copy()
        logprobs[place] -= 0.05
        tokens[place] = 1 + tokens[place] % 38
        for changes in ({"behaviour_logprobs": logprobs}, {"tokens": tokens}):
            changed = [dataclasses.replace(target, **changes) if p is target else p for p in parts]
            after = outcome(changed)
            assert after[2] != before[2]
            if "tokens" in changes:
                assert after[:2] != before[:2]


def test_running_scales_go_on_after_a_checkpoint(tmp_path, parts: list[TrainingSequence]) -> None:
    choice = {"reward_normalization": "running", "advantage_normalization": "running"}
    first, second = learner_with(**choice), learner_with(**choice)
    first.update(parts, update=1, policy_version=VERSION)
    assert first.scales.reward.count == 12
    assert first.scales.advantage.count == sum(int(p.loss_mask.sum()) for p in parts)
    first.save(tmp_path, {})
    second.load(tmp_path)
    assert second.scales == first.scales != RunningScales()
    assert RunningScales.from_dict(json.loads(json.dumps(first.scales.to_dict()))) == first.scales
    again = [learner.update(parts, update=2, policy_version=VERSION) for learner in (first, second)]
    assert again[0].batch_hash == again[1].batch_hash
    assert again[0].loss == again[1].loss
    assert second.scales.reward.count == 24


def test_any_split_into_passes_gives_the_same_gradient_with_the_ratio_of_sequences(
    parts: list[TrainingSequence],
) -> None:
    found = [
        learner_with(
            ratio="sequence", entropy_coefficient=0.1, micro_batch_tokens=tokens, packing=packing
        ).update(parts, update=1, policy_version=VERSION)
        for tokens, packing in ((48, "padded"), (4096, "padded"), (4096, "packed"))
    ]
    for other in found[1:]:
        assert other.loss == pytest.approx(found[0].loss, abs=1e-6)
        assert other.grad_norm == pytest.approx(found[0].grad_norm, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_dual": 0.9}, "a value above 1"),
        ({"aggregation": "fixed_length"}, "aggregation_tokens = 0"),
        ({"aggregation_tokens": 9}, "exactly where aggregation"),
        ({"importance_cap": 3.0}, "replayed_ratio_cap"),
        ({"kl_in": "reward"}, "set the coefficient"),
        ({"kl_estimator": "k1", "kl_coefficient": 0.1}, "'k2' or 'k3'"),
        ({"advantages": "group_normalized", "reward_normalization": "batch"}, "is undone by"),
        ({"advantages": "reinforce_pp", "advantage_normalization": "batch"}, "normalised by itself"),
        ({"advantages": "rloo", "advantage_normalization": "group"}, "advantages = 'group_normalized'"),
    ],
)
def test_combinations_without_sense_are_refused_with_a_remedy(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LearnerSection(**settings)


def test_what_a_choice_needs_of_the_rest_of_the_recipe() -> None:
    kl = {"kl_in": "reward", "kl_coefficient": 0.1}
    with pytest.raises(ValueError, match=r"replay\.share = 0\.2 with learner\.kl_in"):
        Recipe(learner=kl, replay={"share": 0.2})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"behind a cut the reference lacks context"):
        Recipe(learner=kl | {"segment_tokens": 128, "old_logprobs": "recomputed"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 2"):
        Recipe(rollout={"samples_per_task": 1})  # type: ignore[arg-type]
    Recipe(rollout={"samples_per_task": 1}, learner={"advantages": "reinforce_pp"})  # type: ignore[arg-type]
