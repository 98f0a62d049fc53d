"""In which precision a learner multiplies matrices: what was asked for, and what the device is good at.

Owns the choice and how it is spelled on the record. The products themselves are :class:`hotpot.models.Decoder`'s, under
torch's autocast: weights, moments, norms, the residual stream, the output head and everything behind it stay float32.

``auto`` is settled once, when a run begins: its checkpoints say what it came to, and a resume keeps to that.
"""

from typing import Literal

import torch

Precision = Literal["float32", "bfloat16"]
"""What matrix products of a learner's passes are computed in."""

DTYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
"""What torch calls a processor's instructions for products of bfloat16: those of x86, then those of ARM."""


def native_bfloat16(device: str = "cpu") -> bool:
    """Return whether ``device`` ("cpu" or "cuda") has instructions for products of bfloat16; without, they are emulated."""
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in _INSTRUCTIONS)


def settle(asked: Literal["float32", "bfloat16", "auto"], device: str = "cpu") -> Precision:
    """Return what ``asked`` comes to on ``device``."""
    if asked == "auto":
        return "bfloat16" if native_bfloat16(device) else "float32"
    return asked


def spelled(precision: Precision, device: str = "cpu") -> str:
    """Return ``precision`` as events say it: with a word where ``device`` has no instructions for it."""
    emulated = precision == "bfloat16" and not native_bfloat16(device)
    return f"{precision}, emulated" if emulated else precision
