"""What a decoder layer computes element by element, each with a derivative written by hand.

Owns three functions and their derivatives. Each keeps less for the gradient, or takes fewer passes over memory, than
what automatic differentiation makes of the same formula; they are a quarter of a small decoder's learning. Knows no
module. Where a type is not float32 (bfloat16 under autocast) the plain formula is used.

Invariant: values and gradients are those of the plain formula up to float32 rounding; what is saved is never changed, so a
gradient may be taken twice. Derivatives of derivatives are not there.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812 - the name torch's own documentation uses

from hotpot.models.rotary import rotate as plain_rotate

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of the angles, float32 ``[B, 1, T, head_dim]``, both halves of the last axis alike."""


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(``gate``) * ``up``, float ``[...]`` (arXiv:2002.05202)."""
    if gate.dtype != torch.float32 or up.dtype != torch.float32:
        return F.silu(gate) * up
    out: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x`` float ``[..., size]`` over its root mean square, times ``weight`` float ``[size]`` (arXiv:1910.07467)."""
    if x.dtype != torch.float32 or weight.dtype != torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply the rotary embedding (halves convention, arXiv:2104.09864) to ``x`` float ``[B, heads, T, head_dim]``."""
    cos, sin = rotary
    if x.dtype == torch.float32:
        out: Tensor = _Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
        return out
    return plain_rotate(x, rotary)


class _SwiGLU(torch.autograd.Function):
    """With s = sigmoid(g) and a = g s: silu'(g) = s + a (1 - s). The sigmoid is taken once, forward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        sigmoid = torch.sigmoid(gate)
        active = gate * sigmoid
        ctx.save_for_backward(sigmoid, active, up)
        return active * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, Tensor]:
        sigmoid, active, up = ctx.saved_tensors
        slope = torch.addcmul(active, active, sigmoid, value=-1).add_(sigmoid)
        return slope.mul_(up).mul_(given), active * given


class _RMSNorm(torch.autograd.Function):
    """With y = x r, r = 1 / rms(x): dx = r (w d - y mean(w d y)), dw = sum(d y)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        size = x.shape[-1]
        scale = torch.linalg.vecdot(x, x).div_(size).add_(ctx.eps).rsqrt_().unsqueeze(-1)
        unit = x * scale
        along = given * unit
        mean = torch.mv(along.reshape(-1, size), weight).div_(size).view_as(scale)
        dw = along.reshape(-1, size).sum(dim=0) if ctx.needs_input_grad[1] else None
        dx = torch.mul(given, weight, out=along).addcmul_(unit, mean, value=-1).mul_(scale)
        return dx, dw, None


class _Rotation(torch.autograd.Function):
    """A rotation of (first half, second half) by an angle each; its derivative is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(given, cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-direction)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=direction)
    return out
