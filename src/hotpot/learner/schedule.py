"""The learning rate of an update: a pure function of its place in the run.

Owns the curve. Holds no state, so a resume and a replay have nothing to lose: what the rate hangs on stands in the recipe
and, with every update, in ``total_updates`` and ``lost_updates``.

::

    rate ▲      ____            warm-up: (place + 1) / (warmup_updates + 1) of the peak, the peak at place warmup_updates
         │    /      ‾‾──__     then down to final_learning_rate_share of it at the last update,
         │  /              ‾‾   in a straight line or along half a cosine (SGDR, arXiv:1608.03983, equation 5)
         └──────────────────► place

In torch's words: ``LinearLR(start_factor=1 / (W + 1), total_iters=W)``, at milestone W followed by
``LinearLR(end_factor=share, total_iters=D)`` or ``CosineAnnealingLR(T_max=D, eta_min=share * peak)``, stepped once an
update. Tests hold the two to each other.
"""

import math

from hotpot.config.sections import LearnerSection


def learning_rates(settings: LearnerSection, place: int, total_updates: int) -> tuple[float, float]:
    """Return the rates of the policy and of the critic's own weights at ``place`` (0 is the first of ``total_updates``).

    Both follow one curve; behind the last update the rate stays what it was there.
    """
    rate = settings.learning_rate * _share(settings, max(place, 0), total_updates)
    if settings.critic_learning_rate is None or settings.learning_rate == 0:
        return rate, rate
    return rate, settings.critic_learning_rate * (rate / settings.learning_rate)


def _share(settings: LearnerSection, place: int, total_updates: int) -> float:
    """Return the share of its peak that the rate has at ``place``."""
    warmup, last = settings.warmup_updates, settings.final_learning_rate_share
    if place < warmup:
        return (place + 1) / (warmup + 1)
    progress = min((place - warmup) / max(total_updates - 1 - warmup, 1), 1.0)
    if settings.schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return 1 - (1 - last) * progress
