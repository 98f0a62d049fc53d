"""Elementwise parts of a layer: values and derivatives of the plain formula, in every layout, twice from one pass."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from hotpot.models.elementwise import rms_norm, rotate, swiglu

EPS = 1e-5


def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def plain_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def angles(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    half = draw(seed, *shape[:-1], shape[-1] // 2)
    both = torch.cat([half, half], dim=-1)
    return both.cos(), both.sin()


def agree(ours: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Compare value and gradient with the formula in float64; taken again they have the same bits."""
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    exact = [one.detach().double().requires_grad_() for one in inputs]
    out, expected = ours(*leaves), plain(*exact)
    into = draw(99, *out.shape)
    found = torch.autograd.grad(out, leaves, into, retain_graph=True)
    again = torch.autograd.grad(out, leaves, into)
    wanted = torch.autograd.grad(expected, exact, into.double())
    for one, other in zip((out, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(
            one.double(), other, rtol=3e-6, atol=3e-6 * float(other.detach().abs().max())
        )
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@given(st.integers(0, 999), st.sampled_from([0.1, 1.0, 30.0, 120.0]))
def test_swiglu(seed: int, scale: float) -> None:
    agree(swiglu, lambda g, u: F.silu(g) * u, draw(seed, 3, 5, 8, scale=scale), draw(seed + 1, 3, 5, 8))


@given(st.integers(0, 999), st.sampled_from([1e-4, 1.0, 100.0]), st.booleans())
def test_rms_norm(seed: int, scale: float, turned: bool) -> None:
    x = draw(seed, 3, 4, 6, scale=scale)
    agree(lambda a, w: rms_norm(a.transpose(0, 1) if turned else a, w, EPS),
          lambda a, w: plain_norm(a.transpose(0, 1) if turned else a, w), x, draw(seed + 1, 6))  # fmt: skip


@given(st.integers(0, 999), st.booleans())
def test_rotation(seed: int, turned: bool) -> None:
    cos, sin = angles(seed, 2, 1, 5, 8)

    def heads(x: Tensor) -> Tensor:
        return x.transpose(1, 2) if turned else x

    x = draw(seed + 1, 2, 5, 3, 8) if turned else draw(seed + 1, 2, 3, 5, 8)
    agree(
        lambda a: rotate(heads(a), (cos, sin)),
        lambda a: plain_rotation(heads(a), cos.double(), sin.double()),
        x,
    )


def test_the_value_of_a_norm_has_the_bits_of_torchs_own() -> None:
    """The engine takes torch's, the learner this one."""
    x, weight = draw(1, 64, 128), draw(2, 128)
    assert torch.equal(rms_norm(x, weight, EPS), F.rms_norm(x, (128,), weight, EPS))


def test_a_weight_that_does_not_learn_gets_no_gradient() -> None:
    x, weight = draw(1, 4, 8).requires_grad_(), draw(2, 8)
    rms_norm(x, weight, EPS).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is None
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_the_plain_formula(dtype: torch.dtype) -> None:
    gate, up, cos_sin = draw(1, 4, 8).to(dtype), draw(2, 4, 8).to(dtype), angles(3, 1, 1, 4, 8)
    assert torch.equal(swiglu(gate, up), F.silu(gate) * up)
    x = gate.view(1, 1, 4, 8)
    assert rotate(x, cos_sin).dtype == dtype
    torch.testing.assert_close(rotate(x, cos_sin), plain_rotation(x, *cos_sin).to(dtype))
