"""The weights of a remote engine on this side: a copy nobody else can reach, the folder a server loads, the probes' answers.

Owns two copies of the policy, one serving and one to be published, and the folders of both. Publishing always copies first:
what an optimiser changes meanwhile is noticed by the checksum and refused. Knows no server.
"""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hotpot.engine.remote.probes import Probed
from hotpot.errors import EngineError
from hotpot.models import Policy, Weights, checksum, next_token_logprobs, save_served
from hotpot.types import VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """One set of weights: version, checksum, the name a server gives it, the folder, and the policy that computes it."""

    policy_version: int
    checksum: str
    label: str
    folder: Path
    policy: Policy

    def span(self, length: int) -> VersionSpan:
        """Return ``length`` tokens that these weights sampled."""
        return VersionSpan(policy_version=self.policy_version, checksum=self.checksum, length=length)


class WeightStore:
    """Makes :class:`Served` weights. ``name`` sets the labels of this engine apart from others'."""

    def __init__(self, policy: Policy, *, name: str) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="hotpot-engine-"))
        self._name = name
        self._copies = [_twin(policy), _twin(policy)]
        self._count = 0

    def make(self, weights: Weights, policy_version: int) -> Served:
        """Return a copy of ``weights``, with its folder written. At most the copy made before this one stays usable.

        Raises :class:`EngineError` where the weights do not fit, or change while they are copied.
        """
        number = self._count + 1
        policy = self._copies[number % 2]
        found = checksum(weights)
        _load(policy, weights)
        copied = checksum({name: tensor for name, tensor in policy.state_dict().items() if name in weights})
        if copied != found:
            raise EngineError(
                f"the weights changed while they were copied for policy version {policy_version} (checksum {found}, then "
                f"{copied}); publish between optimiser steps"
            )
        folder = self.root / f"weights-{number:06d}"
        save_served(folder, policy)
        shutil.rmtree(self.root / f"weights-{number - 2:06d}", ignore_errors=True)
        self._count = number
        return Served(
            policy_version=policy_version,
            checksum=found,
            label=f"{self._name}-{policy_version}-{found[:12]}",
            folder=folder,
            policy=policy,
        )

    def take_back(self) -> None:
        """Let the next :meth:`make` use the place of the last one, which nobody serves."""
        self._count -= 1

    def close(self) -> None:
        """Delete the folders."""
        shutil.rmtree(self.root, ignore_errors=True)


def score(
    served: Served,
    former: Served | None,
    prompt: NDArray[np.int32],
    tokens: tuple[int, ...],
    said: tuple[float, ...],
) -> Probed:
    """Return a probe's tokens with what the weights, and the former ones, say of them."""
    context = np.concatenate([prompt, np.array(tokens, dtype=np.int32)])
    places = np.arange(len(prompt) - 1, len(context) - 1)
    rows = next_token_logprobs(served.policy, context)[places].astype(np.float64)
    picked = (np.arange(len(tokens)), np.array(tokens))
    before = (
        None if former is None else next_token_logprobs(former.policy, context)[places].astype(np.float64)
    )
    return Probed(
        said=np.array(said, dtype=np.float64),
        own=rows[picked],
        best=rows.max(axis=-1),
        former=None if before is None else before[picked],
    )


def _twin(policy: Policy) -> Policy:
    twin = policy.duplicate()
    twin.precision = next(iter(twin.state_dict().values())).dtype
    twin.gradient_checkpointing = False
    return twin.requires_grad_(requires_grad=False)


def _load(policy: Policy, weights: Weights) -> None:
    state = policy.state_dict()
    names = {name for name, _ in policy.named_parameters()}
    missing, unexpected = sorted(names - weights.keys()), sorted(weights.keys() - state.keys())
    misshapen = sorted(
        name for name in state.keys() & weights.keys() if state[name].shape != weights[name].shape
    )
    if missing or unexpected or misshapen:
        raise EngineError(
            f"the weights do not fit the engine's model: missing {missing[:3]}, unexpected {unexpected[:3]}, of another shape "
            f"{misshapen[:3]}; publish those of the same model"
        )
    for name, tensor in weights.items():
        state[name].copy_(tensor.detach())
