"""The same numbers as the real packages on shared inputs: TorchRL (GAE, V-trace), TRL (GRPO, RLOO), CleanRL's formulas (PPO).

Every remaining difference is named where it is compared, and undone there, so that what is left is 1e-6.
"""

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hotpot.learner.estimators.advantages import Member, group_advantages
from hotpot.learner.estimators.gae import ActionValues, token_gae
from hotpot.learner.estimators.normalization import normalize
from hotpot.learner.estimators.vtrace import vtrace
from hotpot.learner.losses.aggregation import token_weights
from hotpot.learner.losses.policy_loss import LossInput, LossSettings, policy_loss

pytestmark = [
    pytest.mark.slow,
    # What the other packages warn of at import is theirs.
    pytest.mark.filterwarnings("ignore"),
]
CLOSE = {"rtol": 0, "atol": 1e-6}
SIZES = (9, 1, 30, 17, 4)


def package(name: str) -> ModuleType:
    return pytest.importorskip(
        name, reason=f"{name} is not installed; `make test-slow` installs the extra 'parity'"
    )


def ragged(seed: int) -> tuple[ActionValues, np.ndarray, np.ndarray]:
    """Trajectories of action tokens end to end, the log-ratio of each token, and where each one lies on a grid."""
    rng = np.random.default_rng(seed)
    size = sum(SIZES)
    actions = ActionValues(
        rewards=rng.normal(size=size),
        values=rng.normal(size=size),
        lengths=np.array(SIZES),
        # 0: the episode ended there. Else a limit cut it, and what follows has a value.
        final_values=np.array([0.0, 0.0, 1.3, 0.0, -0.7]),
    )
    return actions, rng.normal(0, 0.8, size), np.arange(max(SIZES)) < np.array(SIZES)[:, None]


def on_grid(values: np.ndarray, mask: np.ndarray) -> torch.Tensor:
    """``values`` over action tokens as TorchRL wants them, [trajectory, time, 1]; padding is never read."""
    grid = np.full(mask.shape, 7.0)
    grid[mask] = values
    return torch.from_numpy(grid)[..., None]


def ends(actions: ActionValues, mask: np.ndarray) -> dict[str, torch.Tensor]:
    """TorchRL's view of the ends: ``done`` at each last token and in the padding, ``terminated`` where nothing follows."""
    done = torch.from_numpy(~mask)[..., None].clone()
    terminated = done.clone()
    for row, size in enumerate(actions.lengths):
        done[row, size - 1] = True
        terminated[row, size - 1] = bool(actions.final_values[row] == 0)
    return {"done": done, "terminated": terminated}


@pytest.mark.parametrize("name", ["generalized_advantage_estimate", "vec_generalized_advantage_estimate"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (0.9, 0.0)])
def test_gae_is_torchrl_s(name: str, gamma: float, lam: float) -> None:
    functional = package("torchrl.objectives.value.functional")
    if name.startswith("vec") and lam == 0:
        pytest.skip("TorchRL's vectorised form raises IndexError where gamma * lam is 0")
    for seed in range(5):
        actions, _, mask = ragged(seed)
        advantages, targets = getattr(functional, name)(
            gamma,
            lam,
            on_grid(actions.values, mask),
            on_grid(actions.following, mask),
            on_grid(actions.rewards, mask),
            **ends(actions, mask),
        )
        found = token_gae(actions, gamma=gamma, lam=lam)
        np.testing.assert_allclose(found, advantages[..., 0].numpy()[mask], **CLOSE)
        np.testing.assert_allclose(found + actions.values, targets[..., 0].numpy()[mask], **CLOSE)


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 0.9)])
def test_vtrace_is_torchrl_s(rho_bar: float, c_bar: float) -> None:
    functional = package("torchrl.objectives.value.functional")
    gamma = 31 / 32  # TorchRL holds it in float32, which rounds 0.97
    for seed in range(5):
        actions, log_ratio, mask = ragged(seed)
        log_pi = np.random.default_rng(seed).normal(size=len(log_ratio))
        advantages, targets = functional.vtrace_advantage_estimate(
            gamma,
            on_grid(log_pi, mask),
            on_grid(log_pi - log_ratio, mask),
            on_grid(actions.values, mask),
            on_grid(actions.following, mask),
            on_grid(actions.rewards, mask),
            rho_thresh=torch.tensor(rho_bar, dtype=torch.float64),
            c_thresh=torch.tensor(c_bar, dtype=torch.float64),
            **ends(actions, mask),
        )
        # TorchRL has no lambda in c: it is 1.
        found = vtrace(actions, log_ratio, gamma=gamma, rho_bar=rho_bar, c_bar=c_bar)
        np.testing.assert_allclose(found.targets, targets[..., 0].numpy()[mask], **CLOSE)
        np.testing.assert_allclose(found.advantages, advantages[..., 0].numpy()[mask], **CLOSE)


# TRL: real trainers around a model of a few hundred weights.


def make_trainer(folder: Path, kind: str, rewards: Callable[..., list[float]], **settings: Any) -> Any:
    trl, datasets, transformers = package("trl"), package("datasets"), package("transformers")
    tokenizers = package("tokenizers")
    words = {word: number for number, word in enumerate(["<pad>", "<end>", *"abcdefgh"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    prefix = kind.upper()
    arguments = getattr(trl, f"{prefix}Config")(
        output_dir=str(folder), use_cpu=True, report_to=[], num_generations=4, per_device_train_batch_size=8,
        max_completion_length=6, save_strategy="no", disable_tqdm=True, **settings,
    )  # fmt: skip
    # With a KL term TRL loads the reference from where the model lies.
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    return getattr(trl, f"{prefix}Trainer")(
        model=str(folder / "model"),
        reward_funcs=rewards,
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": "a b"}, {"prompt": "c d e"}]),
        processing_class=tokenizer,
    )


def trl_advantages(folder: Path, kind: str, rewards: np.ndarray, **settings: Any) -> np.ndarray:
    trainer = make_trainer(folder, kind, lambda **_: rewards.tolist(), **settings)
    trainer.model.train()
    inputs = [{"prompt": "a b"}] * 4 + [{"prompt": "c d e"}] * 4
    return trainer._generate_and_score_completions(inputs)["advantages"].numpy()


def own_advantages(rewards: np.ndarray, baseline: Any) -> np.ndarray:
    members = [
        Member(trajectory_id=str(number), group_id=f"g{number // 4}", reward=reward)
        for number, reward in enumerate(rewards.tolist())
    ]
    found = group_advantages(members, baseline).by_trajectory
    return np.array([found[str(number)] for number in range(len(rewards))])


@pytest.fixture
def rewards() -> np.ndarray:
    """Two groups of four, in float32 as TRL holds them."""
    return np.random.default_rng(3).normal(0, 2, 8).astype(np.float32).astype(np.float64)


def test_unnormalised_group_advantages_are_trl_s(tmp_path: Path, rewards: np.ndarray) -> None:
    expected = trl_advantages(tmp_path, "grpo", rewards, scale_rewards="none")
    np.testing.assert_allclose(own_advantages(rewards, "group_mean"), expected, **CLOSE)


def test_normalised_group_advantages_are_trl_s(tmp_path: Path, rewards: np.ndarray) -> None:
    expected = trl_advantages(tmp_path, "grpo", rewards, scale_rewards="group")
    # TRL divides by the *sample's* deviation plus 1e-4, we by the population's and nothing: equal rewards are a rule of
    # their own here (hotpot.learner.signal), so no small number has to hold them down.
    population = rewards.reshape(2, 4).std(axis=1).repeat(4)
    sample = rewards.reshape(2, 4).std(axis=1, ddof=1).repeat(4)
    found = own_advantages(rewards, "group_normalized") * population / (sample + 1e-4)
    np.testing.assert_allclose(found, expected, **CLOSE)


def test_batch_normalised_group_advantages_are_trl_s(tmp_path: Path, rewards: np.ndarray) -> None:
    expected = trl_advantages(tmp_path, "grpo", rewards, scale_rewards="batch")
    # TRL divides by the deviation of the *rewards* of the batch (sample's, plus 1e-4), and centres within groups.
    scaled, _ = normalize(rewards, "batch", groups=np.zeros(8, dtype=np.int64))
    found = own_advantages(scaled, "group_mean") * rewards.std() / (rewards.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(found, expected, **CLOSE)


def test_leave_one_out_advantages_are_trl_s(tmp_path: Path, rewards: np.ndarray) -> None:
    expected = trl_advantages(tmp_path, "rloo", rewards, beta=0.0)
    np.testing.assert_allclose(own_advantages(rewards, "rloo"), expected, **CLOSE)


def test_equal_rewards_are_zero_with_both(tmp_path: Path) -> None:
    rewards = np.full(8, 0.1 + 0.2, dtype=np.float32).astype(np.float64)
    assert not own_advantages(rewards, "group_normalized").any()
    np.testing.assert_allclose(trl_advantages(tmp_path, "grpo", rewards, scale_rewards="group"), 0, atol=1e-3)


GRPO_CASES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"loss_type": "grpo"}, "sequence_mean", {}),
    ({"loss_type": "bnpo"}, "token_mean", {}),
    ({"loss_type": "dapo", "epsilon_high": 0.28}, "token_mean", {"clip_high": 0.28}),
    ({"loss_type": "dr_grpo"}, "fixed_length", {}),
    # By default TRL multiplies the KL by the ratio (arXiv:2512.02556); ours is GRPO's own (arXiv:2402.03300, equation 3).
    (
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
        "sequence_mean",
        {"kl_coefficient": 0.04},
    ),
    ({"loss_type": "grpo", "delta": 1.5}, "sequence_mean", {"clip_dual": 1.5}),
    ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, "sequence_mean", {"ratio": "sequence"}),
    ({"loss_type": "bnpo", "entropy_coef": 0.1}, "token_mean", {"entropy_coefficient": 0.1}),
]


@pytest.mark.parametrize(
    ("theirs", "aggregation", "ours"), GRPO_CASES, ids=[str(case[0]) for case in GRPO_CASES]
)
def test_grpo_losses_and_gradients_are_trl_s(
    tmp_path: Path, theirs: dict[str, Any], aggregation: Any, ours: dict[str, Any]
) -> None:
    trainer = make_trainer(tmp_path, "grpo", lambda **_: [0.0] * 8, **theirs)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rng = np.random.default_rng(11)
    shape = (5, 6)
    new = torch.from_numpy(-rng.exponential(1.0, shape)).requires_grad_()
    entropies = torch.from_numpy(rng.exponential(1.0, shape)).requires_grad_()
    old = new.detach() + torch.from_numpy(rng.normal(0, 0.4, shape))
    reference = new.detach() + torch.from_numpy(rng.normal(0, 0.4, shape))
    advantages = torch.from_numpy(rng.normal(size=5))
    mask = torch.from_numpy(np.arange(6) < np.array([6, 2, 1, 5, 3])[:, None])
    tools = torch.from_numpy(rng.random(shape) < 0.8) | (torch.arange(6) == 0)

    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (new, entropies, None)
    ids = torch.zeros(shape, dtype=torch.int64)
    sampled = mask & tools
    expected = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": torch.ones(5, 1, dtype=torch.int64),
            "completion_ids": ids,
            "completion_mask": mask.long(),
            "tool_mask": tools.long(),
            "advantages": advantages,
            "old_per_token_logps": old,
            "ref_per_token_logps": reference,
            # TRL counts the items of a whole accumulation window; here it is this one batch.
            "num_items_in_batch": sampled.sum(),
        },
    )
    gradients = torch.autograd.grad(expected, [new, entropies], allow_unused=True, materialize_grads=True)

    rows = torch.arange(5)
    weights = token_weights(sampled, rows, aggregation, fixed_length=6)
    found = policy_loss(
        LossInput(
            new_logprobs=new,
            old_logprobs=old,
            advantages=advantages[:, None].expand(shape),
            weights=weights,
            mask=sampled,
            reference_logprobs=reference,
            sequences=rows[:, None].expand(shape),
            entropy=entropies,
        ),
        LossSettings(**{"clip_low": 0.2, "clip_high": 0.2, **ours}),
    )
    own = torch.autograd.grad(found.loss, [new, entropies], allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(found.loss, expected, **CLOSE)
    for mine, other in zip(own, gradients, strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)


# CleanRL: its formulas as published in its documentation of ppo.py (docs.cleanrl.dev/rl-algorithms/ppo), written anew.


def cleanrl_ppo(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, **s: Any) -> SimpleNamespace:
    """The clipped objective as a maximum of two losses, its KL estimates and clip fraction; advantages normalised per
    minibatch by the sample's deviation plus 1e-8."""
    ratio = (new - old).exp()
    scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clip = s["clip"]
    losses = torch.max(-scaled * ratio, -scaled * ratio.clamp(1 - clip, 1 + clip))
    return SimpleNamespace(
        loss=losses.mean() - s["entropy_coefficient"] * s["entropy"].mean(),
        approx_kl=((ratio - 1) - (new - old)).mean(),
        clip_fraction=((ratio - 1.0).abs() > clip).double().mean(),
    )


def test_ppo_is_cleanrl_s() -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        size = 64
        new = torch.from_numpy(-rng.exponential(1.0, size)).requires_grad_()
        old = new.detach() + torch.from_numpy(rng.normal(0, 0.3, size))
        advantages = rng.normal(2, 3, size)
        entropy = torch.from_numpy(rng.exponential(1.0, size))
        expected = cleanrl_ppo(
            new, old, torch.from_numpy(advantages), clip=0.2, entropy_coefficient=0.01, entropy=entropy
        )
        [their_gradient] = torch.autograd.grad(expected.loss, new)

        # CleanRL's deviation is the sample's, ours the population's; it adds 1e-8 to it.
        scaled, _ = normalize(advantages, "batch", groups=np.zeros(size, dtype=np.int64))
        scaled *= advantages.std() / (advantages.std(ddof=1) + 1e-8)
        # All of CleanRL's entries are action tokens. Ours stand among others under a mask, which nothing may be read of.
        mask = torch.from_numpy(np.repeat([True, False], size))

        def padded(values: torch.Tensor) -> torch.Tensor:
            return torch.cat([values, torch.full_like(values, math.nan)])

        found = policy_loss(
            LossInput(
                new_logprobs=padded(new),
                old_logprobs=padded(old),
                advantages=padded(torch.from_numpy(scaled)),
                weights=token_weights(mask[None], torch.zeros(1, dtype=torch.int64), "token_mean")[0],
                mask=mask,
                entropy=padded(entropy),
            ),
            LossSettings(clip_low=0.2, clip_high=0.2, entropy_coefficient=0.01),
        )
        [own_gradient] = torch.autograd.grad(found.loss, new)
        torch.testing.assert_close(found.loss, expected.loss, **CLOSE)
        torch.testing.assert_close(own_gradient, their_gradient, **CLOSE)
        assert found.statistics.approx_kl / size == pytest.approx(float(expected.approx_kl), abs=1e-6)
        # CleanRL counts every ratio outside the range, ours those where the clip is what counts.
        assert found.statistics.clipped / size <= float(expected.clip_fraction)
