"""Work for whoever learns the coin policy: groups of made-up trajectories that differ from update to update."""

import numpy as np

from hotpot.experience import TrainingSequence
from hotpot.learner import Member
from hotpot.topology.learning.protocol import Work


def make_work(update: int, *, groups: int = 3, members: int = 4, policy_version: int = 0) -> Work:
    """Return an update whose trajectories follow from its number; every fourth has no step rewards, one group a peer."""
    rng = np.random.default_rng(update)
    found = []
    for number in range(groups * members):
        size = int(rng.integers(12, 40))
        mask = np.arange(size) >= rng.integers(4, 9)
        logprobs = np.where(mask, -rng.random(size) - 0.1, 0).astype(np.float32)
        rewards = np.zeros(size)
        rewards[-1] = rng.random()
        found.append(
            TrainingSequence(
                trajectory_id=f"t{update}-{number}",
                group_id=f"g{update}-{number // members}",
                segment=0,
                tokens=rng.integers(1, 60, size).astype(np.int32),
                loss_mask=mask,
                behaviour_logprobs=logprobs,
                model_logprobs=logprobs,
                token_policy_version=np.where(mask, 0, -1).astype(np.int32),
                reward=float(rewards[-1]),
                rewards=rewards if number % 4 else None,
                truncated=number % 5 == 0,
            )
        )
    peer = Member(trajectory_id=f"p{update}", group_id=f"g{update}-0", reward=0.25)
    return Work(update=update, policy_version=policy_version, sequences=found, peers=[peer])
