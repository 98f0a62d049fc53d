"""The masked reductions, against loops and against poison under the mask."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotpot.learner import masked

REDUCTIONS = [masked.total, masked.mean, masked.maximum]


def test_by_hand() -> None:
    values = torch.tensor([[1.0, 2.0, 100.0], [6.0, 100.0, 100.0], [100.0, 100.0, 100.0]])
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    assert masked.count(mask) == 3
    assert masked.total(values, mask).item() == 9.0
    assert masked.mean(values, mask).item() == 3.0
    assert masked.maximum(values, mask).item() == 6.0
    assert masked.maximum(-values, mask).item() == -1.0


@given(st.integers(0, 2**32 - 1))
def test_against_loops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, mask = rng.normal(size=(4, 5)), rng.random((4, 5)) < rng.random()
    chosen = [[v for v, m in zip(vs, ms, strict=True) if m] for vs, ms in zip(values, mask, strict=True)]
    flat = [v for row in chosen for v in row]
    tensors = torch.from_numpy(values), torch.from_numpy(mask)
    assert masked.total(*tensors).item() == pytest.approx(sum(flat), abs=1e-12)
    assert masked.mean(*tensors).item() == pytest.approx(sum(flat) / max(len(flat), 1), abs=1e-12)
    assert masked.maximum(*tensors).item() == (max(flat) if flat else 0.0)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_fully_masked_gives_zero_with_zero_gradient(reduce) -> None:
    values = torch.tensor([[math.nan, math.inf], [-math.inf, 3.0]], requires_grad=True)
    out = reduce(values, torch.zeros(2, 2, dtype=torch.bool))
    out.backward()
    assert out.item() == 0.0
    assert torch.equal(values.grad, torch.zeros(2, 2))


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_values_under_the_mask_reach_neither_result_nor_gradient(reduce, poison: float) -> None:
    mask = torch.tensor([[True, False, True], [False, False, True]])
    outcomes = []
    for hidden in (0.0, poison):
        values = torch.tensor([[1.0, hidden, 2.0], [hidden, hidden, 3.0]], requires_grad=True)
        out = reduce(values, mask)
        (gradient,) = torch.autograd.grad(out, values)
        outcomes.append((out.item(), gradient))
    assert outcomes[0][0] == outcomes[1][0]
    assert torch.equal(outcomes[0][1], outcomes[1][1])


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_only_before_arithmetic_keeps_the_gradient_finite(poison: float) -> None:
    mask = torch.tensor([True, False])
    values = torch.tensor([1.0, poison], requires_grad=True)
    masked.total(masked.only(values, mask).exp(), mask).backward()
    assert values.grad.tolist() == [pytest.approx(math.e), 0.0]


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_empty_input(reduce) -> None:
    assert reduce(torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.bool)).item() == 0.0


def test_a_mask_of_another_type_or_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="bool"):
        masked.total(torch.zeros(3), torch.ones(3))
    with pytest.raises(ValueError, match="shaped"):
        masked.total(torch.zeros(3), torch.ones(1, dtype=torch.bool))
