"""What of a machine decides the last bits of a sum: the build of torch, and the processor's instructions it uses."""

import torch


def arithmetic() -> dict[str, str]:
    """Return ``torch`` (version of the build) and ``cpu_capability`` (such as AVX2): equal ones round alike."""
    return {"torch": torch.__version__, "cpu_capability": torch.backends.cpu.get_cpu_capability()}
