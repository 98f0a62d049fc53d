"""The losses, against loops in float64 and against changes under the mask."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.learner.losses.aggregation import token_weights
from hotpot.learner.losses.divergence import k3
from hotpot.learner.losses.policy_loss import LossInput, LossSettings, LossStatistics, entropy, policy_loss

SETTINGS = LossSettings(clip_low=0.2, clip_high=0.3, kl_coefficient=0.05)
ARRAYS = ("new_logprobs", "old_logprobs", "advantages", "reference_logprobs")


def random_arrays(seed: int, shape: tuple[int, int] = (4, 7)) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    new = -rng.exponential(1.0, shape)
    return {
        "new_logprobs": new,
        "old_logprobs": new + rng.normal(0, 0.4, shape),
        "advantages": rng.normal(size=shape) * (rng.random(shape) < 0.9),
        "reference_logprobs": new + rng.normal(0, 0.4, shape),
        "mask": rng.random(shape) < 0.6,
        "owners": np.sort(rng.integers(0, shape[0], shape[0])),
    }


def evaluate(arrays: dict[str, np.ndarray], aggregation: str, loss_settings: LossSettings = SETTINGS):
    """Return the loss's output and the gradient with respect to the new log-probabilities."""
    mask = torch.from_numpy(arrays["mask"])
    tensors = {name: torch.from_numpy(arrays[name].copy()) for name in ARRAYS}
    tensors["new_logprobs"].requires_grad_()
    weights = token_weights(mask, torch.from_numpy(arrays["owners"]), aggregation)
    output = policy_loss(LossInput(**tensors, weights=weights, mask=mask), loss_settings)
    output.loss.backward()
    return output, tensors["new_logprobs"].grad


def brute_force(arrays: dict[str, np.ndarray], aggregation: str) -> dict[str, float]:
    """The loss and its statistics by loops over Python floats."""
    per_owner: dict[int, list[tuple[float, float]]] = {}
    sums = dict.fromkeys(("ratio", "clipped", "approx_kl", "overlap", "reference_kl"), 0.0)
    num = 0
    for row, owner in enumerate(arrays["owners"]):
        for column in range(arrays["mask"].shape[1]):
            if not arrays["mask"][row, column]:
                continue
            new, old, advantage, reference = (float(arrays[name][row, column]) for name in ARRAYS)
            ratio = math.exp(new - old)
            clipped = min(max(ratio, 1 - SETTINGS.clip_low), 1 + SETTINGS.clip_high)
            policy = -min(ratio * advantage, clipped * advantage)
            divergence = math.exp(reference - new) - 1 - (reference - new)
            per_owner.setdefault(int(owner), []).append((policy, SETTINGS.kl_coefficient * divergence))
            num += 1
            sums["ratio"] += ratio
            sums["clipped"] += clipped * advantage < ratio * advantage
            sums["approx_kl"] += ratio - 1 - math.log(ratio)
            sums["overlap"] += min(1.0, ratio)
            sums["reference_kl"] += divergence
    everything = [pair for pairs in per_owner.values() for pair in pairs]
    averages = []
    for term in (0, 1):
        if aggregation == "token_mean":
            averages.append(sum(pair[term] for pair in everything) / max(num, 1))
        else:
            means = [sum(pair[term] for pair in pairs) / len(pairs) for pairs in per_owner.values()]
            averages.append(sum(means) / max(len(means), 1))
    return {"policy_loss": averages[0], "kl_loss": averages[1], "num_tokens": num, **sums}


@given(st.integers(0, 2**32 - 1), st.sampled_from(["token_mean", "sequence_mean"]))
def test_against_loops(seed: int, aggregation: str) -> None:
    arrays = random_arrays(seed)
    output, _ = evaluate(arrays, aggregation)
    expected = brute_force(arrays, aggregation)
    assert float(output.policy_loss) == pytest.approx(expected["policy_loss"], abs=1e-12)
    assert float(output.kl_loss) == pytest.approx(expected["kl_loss"], abs=1e-12)
    assert float(output.loss.detach()) == pytest.approx(
        expected["policy_loss"] + expected["kl_loss"], abs=1e-12
    )
    for name in ("num_tokens", "ratio", "clipped", "approx_kl", "overlap", "reference_kl"):
        assert getattr(output.statistics, name) == pytest.approx(expected[name], abs=1e-9), name


@given(st.integers(0, 2**32 - 1), st.sampled_from(["token_mean", "sequence_mean"]))
@settings(max_examples=25)
def test_gradient_against_finite_differences(seed: int, aggregation: str) -> None:
    arrays = random_arrays(seed, (2, 4))
    _, gradient = evaluate(arrays, aggregation)
    step = 1e-6
    for index in np.ndindex(2, 4):
        ratio = math.exp(arrays["new_logprobs"][index] - arrays["old_logprobs"][index])
        if min(abs(ratio - 0.8), abs(ratio - 1.3)) < 1e-4:
            continue  # the loss has a kink there
        moved = []
        for sign in (1, -1):
            changed = {name: array.copy() for name, array in arrays.items()}
            changed["new_logprobs"][index] += sign * step
            found = brute_force(changed, aggregation)
            moved.append(found["policy_loss"] + found["kl_loss"])
        assert float(gradient[index]) == pytest.approx((moved[0] - moved[1]) / (2 * step), abs=1e-6)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["token_mean", "sequence_mean"]),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e300, -7.5]),
)
def test_nothing_under_the_mask_changes_anything(seed: int, aggregation: str, poison: float) -> None:
    arrays = random_arrays(seed)
    poisoned = dict(arrays)
    for name in ARRAYS:
        poisoned[name] = np.where(arrays["mask"], arrays[name], poison)
    (before, gradient), (after, poisoned_gradient) = (evaluate(a, aggregation) for a in (arrays, poisoned))
    assert float(before.loss.detach()) == float(after.loss.detach())
    assert torch.equal(gradient, poisoned_gradient)
    assert torch.equal(before.token_losses, after.token_losses)
    assert before.statistics == after.statistics
    assert not gradient[~torch.from_numpy(arrays["mask"])].any()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("name", ARRAYS)
def test_every_unmasked_value_counts(aggregation: str, name: str) -> None:
    arrays = random_arrays(5)
    arrays["old_logprobs"] = arrays["new_logprobs"] + 0.05  # inside the clip range, so that no token is flat
    arrays["advantages"] = np.where(arrays["advantages"] == 0, 1.0, arrays["advantages"])
    before, gradient = evaluate(arrays, aggregation)
    for index in zip(*np.nonzero(arrays["mask"]), strict=True):
        changed = {key: array.copy() for key, array in arrays.items()}
        changed[name][index] += 0.01
        after, changed_gradient = evaluate(changed, aggregation)
        assert float(before.loss.detach()) != float(after.loss.detach())
        assert not torch.equal(gradient, changed_gradient)


def test_on_policy_the_ratio_is_one_and_the_gradient_is_the_policy_gradient() -> None:
    arrays = random_arrays(1)
    arrays["old_logprobs"] = arrays["new_logprobs"]
    output, gradient = evaluate(arrays, "token_mean", LossSettings(clip_low=0.2, clip_high=0.2))
    num = int(arrays["mask"].sum())
    assert output.statistics.ratio == num
    assert output.statistics.overlap == num
    assert output.statistics.clipped == 0
    assert output.statistics.approx_kl == 0
    expected = np.where(arrays["mask"], -arrays["advantages"] / num, 0)
    assert np.allclose(gradient.numpy(), expected, atol=1e-15)


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "clipped"),
    [
        (1.5, 2.0, 2.6, True),  # 1.3 * 2
        (1.25, 2.0, 2.5, False),
        (1.5, -2.0, -3.0, False),  # a worse action made likelier is not excused
        (0.5, -2.0, -1.6, True),  # 0.8 * -2
        (0.5, 2.0, 1.0, False),
    ],
)
def test_the_clip_is_asymmetric_and_pessimistic(ratio, advantage, surrogate, clipped) -> None:
    arrays = {name: np.zeros((1, 1)) for name in ARRAYS}
    arrays |= {"mask": np.ones((1, 1), dtype=bool), "owners": np.zeros(1, dtype=np.int64)}
    arrays["new_logprobs"][:] = math.log(ratio)
    arrays["advantages"][:] = advantage
    output, gradient = evaluate(arrays, "token_mean", LossSettings(clip_low=0.2, clip_high=0.3))
    assert float(output.policy_loss) == pytest.approx(-surrogate)
    assert output.statistics.clipped == clipped
    assert (float(gradient) == 0) == clipped


def test_an_overflowing_ratio_that_is_clipped_has_gradient_zero() -> None:
    arrays = {name: np.zeros((1, 1)) for name in ARRAYS}
    arrays |= {"mask": np.ones((1, 1), dtype=bool), "owners": np.zeros(1, dtype=np.int64)}
    arrays["old_logprobs"][:] = -5000.0
    arrays["advantages"][:] = 1.0
    output, gradient = evaluate(arrays, "token_mean", LossSettings(clip_low=0.2, clip_high=0.3))
    assert float(output.loss.detach()) == pytest.approx(-1.3)
    assert float(gradient) == 0.0


def test_a_fully_masked_input_gives_zero() -> None:
    arrays = random_arrays(2)
    arrays["mask"] = np.zeros_like(arrays["mask"])
    for aggregation in ("token_mean", "sequence_mean"):
        output, gradient = evaluate(arrays, aggregation)
        assert float(output.loss.detach()) == 0.0
        assert not gradient.any()
        assert output.statistics == LossStatistics()


def test_k3_is_unbiased_for_the_divergence() -> None:
    q, p = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    exact = float((q * np.log(q / p)).sum())
    estimate = k3(torch.from_numpy(np.log(p / q)))
    assert float((torch.from_numpy(q) * estimate).sum()) == pytest.approx(exact)
    assert (estimate >= 0).all()


def test_entropy_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, -math.inf, -math.inf, -math.inf]], dtype=torch.float64)
    assert entropy(logits.log_softmax(-1)).tolist() == pytest.approx([math.log(4), 0.0])


def test_segments_of_one_trajectory_share_its_weight() -> None:
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    weights = token_weights(mask, torch.tensor([0, 0, 1]), "sequence_mean")
    assert weights.flatten().tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 0, 1 / 4, 1 / 4])
    assert token_weights(mask, torch.tensor([0, 0, 1]), "token_mean").flatten().tolist() == pytest.approx(
        [0.2, 0.2, 0.2, 0, 0.2, 0.2]
    )
