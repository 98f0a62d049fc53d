"""The reward function of ``order_desk``, by component; versioned apart from the environment.

Sparse: only the answer is rewarded, and only if it is exactly right.
"""

import re
from dataclasses import dataclass

from hotpot.types import Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an answer is worth. ``success`` is the verdict on the whole task."""

    rewards: tuple[Reward, ...]
    success: bool


def judge(answer: str, total: int) -> Verdict:
    """Judge the answered text against the right total (a whole number)."""
    text = answer.strip()
    right = re.fullmatch(r"[0-9]{1,12}", text) is not None and int(text) == total
    return Verdict(rewards=(Reward(name="correct", value=1.0 if right else 0.0),), success=right)
