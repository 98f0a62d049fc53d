"""The reward function of ``stock_count``, in a package of its own so that it has a version of its own."""

from hotpot.types import Reward


def judge(answer: str, free: int) -> tuple[Reward, ...]:
    """Return the reward by component: 1 for the right number."""
    return (Reward(name="right", value=float(answer.strip() == str(free))),)
