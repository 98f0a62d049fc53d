"""Value loss, explained variance and normalisation: by hand, against CleanRL's published formula, and under masks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotpot.learner.estimators.normalization import standardize
from hotpot.learner.losses.value_loss import ValueLossInput, explained_variance, value_loss


def draw(seed: int, size: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    names = ("new_values", "old_values", "returns")
    arrays = {name: torch.from_numpy(rng.normal(size=size)) for name in names}
    return arrays | {
        "weights": torch.from_numpy(rng.random(size)),
        "mask": torch.from_numpy(rng.random(size) < 0.7),
    }


def cleanrl(new: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float) -> torch.Tensor:
    """The formula of CleanRL's documentation of ppo.py ("clipped value loss"), per element, mean left to the caller."""
    unclipped = (new - returns) ** 2
    clipped = (old + torch.clamp(new - old, -clip, clip) - returns) ** 2
    return 0.5 * torch.max(unclipped, clipped)


@given(seed=st.integers(0, 10_000), size=st.integers(1, 40), clip=st.sampled_from([0.0, 0.05, 0.2, 5.0]))
@settings(max_examples=80, deadline=None)
def test_it_is_the_published_formula_weighted_and_masked(seed: int, size: int, clip: float) -> None:
    case = draw(seed, size)
    new = case["new_values"].clone().requires_grad_()
    output = value_loss(ValueLossInput(**{**case, "new_values": new}), clip=clip)
    output.loss.backward()
    mine = case["new_values"].clone().requires_grad_()
    each = cleanrl(mine, case["old_values"], case["returns"], clip if clip else np.inf)
    expected = (each * case["weights"])[case["mask"]].sum()
    expected.backward()
    assert float(output.loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    assert torch.allclose(new.grad, mine.grad, atol=1e-12)
    assert torch.allclose(output.token_losses, torch.where(case["mask"], each.detach(), 0.0))


def test_a_clipped_value_has_no_gradient_and_is_counted() -> None:
    new = torch.tensor([0.9, 0.1], dtype=torch.float64, requires_grad=True)
    zeros, ones = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    output = value_loss(
        ValueLossInput(new_values=new, old_values=zeros, returns=ones, weights=ones, mask=ones.bool()),
        clip=0.2,
    )
    output.loss.backward()
    assert output.clipped == 1
    assert new.grad[0] == 0
    assert new.grad[1] == pytest.approx(-0.9)


@pytest.mark.parametrize("garbage", [1e30, float("nan"), float("inf")])
def test_masked_values_change_nothing_by_a_bit(garbage: float) -> None:
    case = draw(3, 30)
    outcomes = []
    for filled in (False, True):
        arrays = {
            name: torch.where(case["mask"], array, garbage) if filled and name != "mask" else array
            for name, array in case.items()
        }
        new = arrays["new_values"].clone().requires_grad_()
        output = value_loss(ValueLossInput(**{**arrays, "new_values": new}), clip=0.2)
        output.loss.backward()
        shown = explained_variance(arrays["new_values"], arrays["returns"], arrays["mask"])
        scaled = torch.from_numpy(standardize(arrays["returns"].numpy(), arrays["mask"].numpy()))
        outcomes.append((output.loss.detach(), new.grad, output.token_losses, scaled, torch.tensor(shown)))
    for one, two in zip(*outcomes, strict=True):
        assert one.numpy().tobytes() == two.numpy().tobytes()


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    everything = torch.ones(4, dtype=torch.bool)
    assert explained_variance(returns + 3, returns, everything) == 1.0
    assert explained_variance(torch.full_like(returns, 0.5), returns, everything) == 0.0
    assert explained_variance(1 - returns, returns, everything) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones_like(returns), everything) is None
    assert explained_variance(returns, returns, ~everything) is None


def test_returns_that_differ_by_rounding_have_nothing_to_explain() -> None:
    returns = torch.tensor([1.0, 1.0 + 2**-52, 1.0], dtype=torch.float64)
    assert explained_variance(torch.zeros_like(returns), returns, torch.ones(3, dtype=torch.bool)) is None


def test_normalising_leaves_mean_0_and_deviation_1_and_takes_rounding_for_nothing() -> None:
    mask = np.array([True, True, True, False])
    values = np.array([1.0, 2.0, 3.0, 99.0])
    assert standardize(values, mask).tolist() == pytest.approx([-(1.5**0.5), 0.0, 1.5**0.5, 0.0])
    assert standardize(1e-3 * values, mask).tolist() == pytest.approx([-(1.5**0.5), 0.0, 1.5**0.5, 0.0])
    assert standardize(7 + 1e-7 * values, mask).tolist() == [0.0] * 4
    assert standardize(values, ~mask).tolist() == [0.0] * 4
    assert standardize(values, np.zeros(4, np.bool_)).tolist() == [0.0] * 4
    odd = standardize(np.array([1.0, 3.0, np.nan, np.nan]), mask)
    assert odd[:2].tolist() == [-1.0, 1.0]
    assert np.isnan(odd[2])
    assert odd[3] == 0.0
