"""Environments that answer late: latency by a known law, really waited for, so that two topologies meet the same one.

Owns the laws and the wrapper. Knows no topology. A wait is a pure function of (law, task, the episode's seed, number of the
call), so an episode waits as long whoever runs it, in whatever order, and again when it is run again.

:data:`ORDER_DESK` and :data:`COIN` are specs of their own: ``env.kind = "hotpot.testing.latency:ORDER_DESK"`` finds one, in
every process of a run, and parameter ``latency`` says how it waits. Its tasks and rewards are those of the environment
inside; its version is another.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hotpot.envs import Environment, EnvironmentSpec
from hotpot.envs.order_desk import SPEC as ORDER_DESK_SPEC
from hotpot.envs.order_desk import OrderDeskParams
from hotpot.ids import sha256_hex
from hotpot.testing.coin import SPEC as COIN_SPEC
from hotpot.testing.coin import CoinParams
from hotpot.types import Action, Observation, StepResult, Task

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_GRAINS = 2**53


class Latency(BaseModel):
    """A law of waiting. All kinds have the same mean, so that they can be compared."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: Literal["fixed", "exponential", "lognormal"] = "fixed"
    """``fixed``: always mean_s. ``exponential``: memoryless. ``lognormal``: a long tail, as of tool servers and sandboxes."""
    mean_s: NonNegative = 0.0
    """Mean of a wait, in seconds, before longest_s cuts it."""
    sigma: NonNegative = 1.0
    """``lognormal``: standard deviation of the wait's logarithm; at 1.5 the longest hundredth is ten times the mean."""
    longest_s: NonNegative = 0.0
    """Longest wait, in seconds; 0 sets no bound."""
    at_reset: bool = True
    """Whether the reset waits too."""
    seed: int = 0
    """Another seed, other waits by the same law."""

    def seconds(self, task_id: str, seed: int, call: int) -> float:
        """Return how long call number ``call`` (0 is the reset) of an episode waits. ``seed`` is what it was reset with."""
        if self.kind == "fixed":
            drawn = self.mean_s
        else:
            hashed = sha256_hex(f"latency\n{self.seed}\n{task_id}\n{seed}\n{call}")
            share = (int(hashed[:16], 16) % _GRAINS + 0.5) / _GRAINS  # inside (0, 1), never an end
            drawn = self.mean_s * self._quantile(share)
        return min(drawn, self.longest_s) if self.longest_s else drawn

    def _quantile(self, share: float) -> float:
        """Return the law's quantile at a mean of 1."""
        if self.kind == "exponential":
            return -math.log1p(-share)
        return math.exp(self.sigma * NormalDist().inv_cdf(share) - self.sigma**2 / 2)


class DelayedEnvironment(Environment):
    """An environment that waits before each call, as ``latency`` says, in the thread that calls."""

    def __init__(
        self, inner: Environment, latency: Latency, *, wait: Callable[[float], None] = time.sleep
    ) -> None:
        self._inner, self._latency, self._wait = inner, latency, wait
        self._task_id, self._seed, self._calls = "", 0, 0

    def reset(self, task: Task, seed: int) -> Observation:
        """Wait, then reset."""
        self._task_id, self._seed, self._calls = task.task_id, seed, 0
        if self._latency.at_reset:
            self._wait_for_call()
        return self._inner.reset(task, seed)

    def step(self, action: Action) -> StepResult:
        """Wait, then take the step."""
        self._calls += 1
        self._wait_for_call()
        return self._inner.step(action)

    def close(self) -> None:
        """Close at once."""
        self._inner.close()

    def _wait_for_call(self) -> None:
        seconds = self._latency.seconds(self._task_id, self._seed, self._calls)
        if seconds:
            self._wait(seconds)


class DelayedOrderDeskParams(OrderDeskParams):
    """Parameters of the order desk, and how it waits."""

    latency: Latency = Latency()
    """The law of waiting."""


class DelayedCoinParams(CoinParams):
    """Parameters of the coin, and how it waits."""

    latency: Latency = Latency()
    """The law of waiting."""


def delayed(
    spec: EnvironmentSpec[Any], params: type[BaseModel], make: Callable[[Any], Environment]
) -> EnvironmentSpec[Any]:
    """Return ``spec`` with waiting around it.

    ``params``: a subclass of its parameters with a field ``latency``; ``make``: a top-level function of this module or of
    the spec's package that wraps what ``spec.make`` returns in :class:`DelayedEnvironment`.
    """
    rewarded = spec.reward_params
    if rewarded is None:
        rewarded = tuple(spec.params.model_fields)
    shares = (*spec.shares, __name__)
    return replace(spec, params=params, make=make, reward_params=rewarded, shares=shares)


def make_order_desk(params: DelayedOrderDeskParams) -> Environment:
    """Return an order desk that waits."""
    return DelayedEnvironment(ORDER_DESK_SPEC.make(params), params.latency)


def make_coin(params: DelayedCoinParams) -> Environment:
    """Return a coin that waits."""
    return DelayedEnvironment(COIN_SPEC.make(params), params.latency)


ORDER_DESK: EnvironmentSpec[Any] = delayed(ORDER_DESK_SPEC, DelayedOrderDeskParams, make_order_desk)
"""``order_desk`` with latency; not installed under an entry point."""

COIN: EnvironmentSpec[Any] = delayed(COIN_SPEC, DelayedCoinParams, make_coin)
"""``coin`` with latency; not installed under an entry point."""
