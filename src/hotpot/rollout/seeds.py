"""Seeds of an episode's random numbers, as pure functions of the run's seed and what the episode is run for.

Neither depends on the attempt, nor on the number of an evaluation: a try again meets the same chances, and evaluations
of two policies differ by the policy alone.
"""

from hotpot.ids import sha256_hex
from hotpot.rollout.tasks import EpisodePlan
from hotpot.types import Purpose


def environment_seed(seed: int, plan: EpisodePlan) -> int:
    """Return the seed of an episode's environment: the same for all samples and attempts of one task issue."""
    return _hashed(f"environment\n{seed}\n{plan.task.split}\n{plan.issue}")


def sampling_seed(seed: int, purpose: Purpose) -> int:
    """Return the seed in an episode's sample keys, below 2**60 for evaluations.

    Training samples with the run's seed, each kind of evaluation with a hash of it and its purpose, so that equal
    issue numbers share no random number.
    """
    return seed if purpose is Purpose.TRAINING else _hashed(f"sampling\n{seed}\n{purpose}")


def _hashed(text: str) -> int:
    return int(sha256_hex(text)[:15], 16)
