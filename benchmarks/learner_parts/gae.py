"""Generalised advantages of a million action tokens: ours against a loop in Python and against TorchRL's.

Trajectories are as ragged as those of agents (log-normal lengths). Ours takes them end to end. The loop is the recursion as
one writes it down, over lists of floats. TorchRL is given a padded grid and both of its implementations, and the better
counts; laying out its grid is not timed. Its vectorised one takes memory in proportion to tokens times length, so it is
given a few rows at a time. Which of the two is better is tried on a tenth of the tokens. Each is the best of several turns,
taken in turn, on one thread, in float64. All results are compared.

The last line is JSON: tokens, seconds of each, ``gae_over_loop`` and ``gae_over_torchrl`` (times as fast; TorchRL's is null
where it is not installed). Ends with 1 where the first is below 10 or the second below 1.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray

from hotpot.learner.estimators.gae import ActionValues, token_gae

TOKENS = int(os.environ.get("TOKENS", "1000000"))
TURNS = int(os.environ.get("TURNS", "5"))
# TorchRL holds gamma in float32; these and their product are the same numbers there, so the results can be compared.
GAMMA, LAM = 127 / 128, 15 / 16
VECTORISED_ROWS = 64

Estimate = Callable[[], NDArray[np.float64]]


def make_actions(tokens: int, seed: int = 0) -> ActionValues:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(np.maximum(rng.lognormal(5.0, 0.8, tokens // 8 + 2), 1), 512).astype(np.int64)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]
    lengths[-1] -= lengths.sum() - tokens
    ends = np.zeros(len(lengths))
    return ActionValues(
        rewards=rng.normal(size=tokens), values=rng.normal(size=tokens), lengths=lengths, final_values=ends
    )


def loop(actions: ActionValues) -> NDArray[np.float64]:
    rewards, values = actions.rewards.tolist(), actions.values.tolist()
    out: list[float] = [0.0] * len(rewards)
    begin = 0
    for length, final in zip(actions.lengths.tolist(), actions.final_values.tolist(), strict=True):
        following, advantage = final, 0.0
        for place in range(begin + length - 1, begin - 1, -1):
            delta = rewards[place] + GAMMA * following - values[place]
            advantage = delta + GAMMA * LAM * advantage
            following, out[place] = values[place], advantage
        begin += length
    return np.array(out)


def torchrl_estimates(actions: ActionValues) -> dict[str, Estimate]:
    if find_spec("torchrl") is None:
        return {}
    from torchrl.objectives.value import functional

    mask = np.arange(actions.lengths.max()) < actions.lengths[:, None]

    def lay(values: NDArray[np.float64]) -> torch.Tensor:
        grid = np.zeros(mask.shape)
        grid[mask] = values
        return torch.from_numpy(grid)[..., None]

    values, following, rewards = lay(actions.values), lay(actions.following), lay(actions.rewards)
    done = lay(actions.last.astype(np.float64)) > 0
    done[:, -1] = True  # a row's padding is one trajectory of its own

    def estimate(name: str, rows: int) -> Estimate:
        def run() -> NDArray[np.float64]:
            parts = [
                getattr(functional, name)(
                    GAMMA, LAM, values[at], following[at], rewards[at], done=done[at], terminated=done[at]
                )[0]
                for at in (slice(begin, begin + rows) for begin in range(0, len(mask), rows))
            ]
            found: NDArray[np.float64] = torch.cat(parts)[..., 0].numpy()
            return found[mask]

        return run

    return {
        "torchrl, loop over time": estimate("generalized_advantage_estimate", len(mask)),
        "torchrl, vectorised": estimate("vec_generalized_advantage_estimate", VECTORISED_ROWS),
    }


def measure(actions: ActionValues, estimates: dict[str, Estimate], turns: int) -> dict[str, float]:
    """Return the least seconds of each; raise AssertionError where results differ."""
    expected = loop(actions)
    best = dict.fromkeys(estimates, float("inf"))
    for _ in range(turns):
        for name, run in estimates.items():
            before = time.perf_counter()
            found = run()
            best[name] = min(best[name], time.perf_counter() - before)
            # TorchRL's vectorised form takes powers of gamma * lam in float32.
            close = 1e-5 if name.startswith("torchrl") else 1e-9
            np.testing.assert_allclose(found, expected, rtol=0, atol=close, err_msg=name)
    return best


def show(actions: ActionValues, seconds: dict[str, float]) -> None:
    print(f"{len(actions.rewards):,} action tokens of {len(actions.lengths):,} trajectories")
    for name, spent in seconds.items():
        print(f"  {name:26} {spent * 1e3:10.1f} ms")


def main() -> int:
    torch.set_num_threads(1)
    actions, few = make_actions(TOKENS), make_actions(max(TOKENS // 10, 1))
    trial = measure(few, torchrl_estimates(few), 1)
    if trial:
        show(few, trial)
    theirs = min(trial, key=lambda name: trial[name], default="")
    estimates: dict[str, Estimate] = {
        "hotpot": lambda: token_gae(actions, gamma=GAMMA, lam=LAM),
        "loop": lambda: loop(actions),
    }
    estimates |= {name: run for name, run in torchrl_estimates(actions).items() if name == theirs}
    seconds = measure(actions, estimates, TURNS)
    show(actions, seconds)
    line = {
        "tokens": TOKENS,
        "seconds": {name: round(spent, 6) for name, spent in seconds.items()},
        "gae_over_loop": round(seconds["loop"] / seconds["hotpot"], 2),
        "gae_over_torchrl": round(seconds[theirs] / seconds["hotpot"], 2) if theirs else None,
    }
    print(json.dumps(line))
    slow = seconds["loop"] < 10 * seconds["hotpot"] or (bool(theirs) and seconds[theirs] < seconds["hotpot"])
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
