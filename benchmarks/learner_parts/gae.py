"""Generalised advantages of a million action tokens: ours against a loop in Python and against TorchRL's.

Trajectories are as ragged as those of agents (log-normal lengths). Ours takes them end to end. The loop is the recursion as
one writes it down, over lists of floats. TorchRL is given both layouts it knows (a padded grid, and all trajectories end to
end with ``done`` flags) with both of its implementations, and the best counts; laying out its grid is not timed. Each is
the best of several turns, taken in turn, on one thread, in float64. All results are compared.

The last line is JSON: tokens, seconds of each, ``gae_over_loop`` and ``gae_over_torchrl`` (times as fast; TorchRL's is null
where it is not installed).
"""

import json
import os
import time
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray

from hotpot.learner.gae import ActionValues, token_gae

TOKENS = int(os.environ.get("TOKENS", "1000000"))
TURNS = int(os.environ.get("TURNS", "5"))
# TorchRL holds gamma in float32; these and their product are the same numbers there, so the results can be compared.
GAMMA, LAM = 127 / 128, 15 / 16

Estimate = Callable[[], NDArray[np.float64]]


def make_actions(tokens: int, seed: int = 0) -> ActionValues:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(np.maximum(rng.lognormal(5.0, 0.8, tokens // 8 + 2), 1), 2000).astype(np.int64)
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
        print("TorchRL is not installed: `pip install -c constraints.txt -e '.[bench]'`")
        return {}
    from torchrl.objectives.value import functional

    mask = np.arange(actions.lengths.max()) < actions.lengths[:, None]
    forms = {
        "loop": functional.generalized_advantage_estimate,
        "vectorised": functional.vec_generalized_advantage_estimate,
    }

    def estimate(name: str, *, padded: bool) -> Estimate:
        def lay(values: NDArray[np.float64]) -> torch.Tensor:
            if not padded:
                return torch.from_numpy(values)[None, :, None]
            grid = np.zeros(mask.shape)
            grid[mask] = values
            return torch.from_numpy(grid)[..., None]

        values, following, rewards = lay(actions.values), lay(actions.following), lay(actions.rewards)
        done = lay(actions.last.astype(np.float64)) > 0
        if padded:
            # A row's padding is one trajectory of its own: one per padding token would take 130 GiB, vectorised.
            done[:, -1] = True

        def run() -> NDArray[np.float64]:
            found = forms[name](GAMMA, LAM, values, following, rewards, done=done, terminated=done)[0]
            flat = found[..., 0].numpy()
            return flat[mask] if padded else flat[0]

        return run

    # Its loop over a million steps end to end takes minutes and cannot be the best.
    return {
        "torchrl, loop over a padded grid": estimate("loop", padded=True),
        "torchrl, vectorised, padded grid": estimate("vectorised", padded=True),
        "torchrl, vectorised, end to end": estimate("vectorised", padded=False),
    }


def measure(estimates: dict[str, Estimate]) -> dict[str, float]:
    best = dict.fromkeys(estimates, float("inf"))
    for _ in range(TURNS):
        for name, run in estimates.items():
            before = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - before)
    return best


def main() -> None:
    torch.set_num_threads(1)
    actions = make_actions(TOKENS)
    estimates: dict[str, Estimate] = {
        "hotpot": lambda: token_gae(actions, gamma=GAMMA, lam=LAM),
        "loop": lambda: loop(actions),
    }
    estimates |= torchrl_estimates(actions)
    expected = estimates["loop"]()
    for name, run in estimates.items():
        # TorchRL's vectorised form takes powers of gamma * lam in float32.
        close = 1e-5 if name.startswith("torchrl") else 1e-9
        np.testing.assert_allclose(run(), expected, rtol=0, atol=close, err_msg=name)
    seconds = measure(estimates)
    print(f"{TOKENS:,} action tokens of {len(actions.lengths):,} trajectories, the best of {TURNS} turns")
    for name, spent in seconds.items():
        print(f"{name:36} {spent * 1e3:10.1f} ms")
    theirs = [spent for name, spent in seconds.items() if name.startswith("torchrl")]
    ours = seconds["hotpot"]
    line = {
        "tokens": TOKENS,
        "seconds": {name: round(spent, 6) for name, spent in seconds.items()},
        "gae_over_loop": round(seconds["loop"] / ours, 2),
        "gae_over_torchrl": round(min(theirs) / ours, 2) if theirs else None,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
