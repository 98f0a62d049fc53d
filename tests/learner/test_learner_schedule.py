"""The learning rate: torch's own schedules over a whole run, and what it was before there was a choice."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from hotpot.config.load import build_recipe
from hotpot.config.sections import LearnerSection
from hotpot.errors import RecipeError
from hotpot.learner.schedule import learning_rates

PEAK = 3e-4


def torchs(settings: LearnerSection, total: int) -> list[float]:
    """The rates of ``total`` updates as torch's schedulers step them."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    warmup, share = settings.warmup_updates, settings.final_learning_rate_share
    length = max(total - 1 - warmup, 1)
    fall = (
        CosineAnnealingLR(optimizer, T_max=length, eta_min=share * PEAK)
        if settings.schedule == "cosine"
        else LinearLR(optimizer, start_factor=1.0, end_factor=share, total_iters=length)
    )
    rise = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=max(warmup, 1))
    scheduler = SequentialLR(optimizer, [rise, fall], milestones=[warmup]) if warmup else fall
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_the_rates_of_a_run_are_torchs(schedule: str, warmup: int, share: float) -> None:
    settings = LearnerSection(
        learning_rate=PEAK, schedule=schedule, warmup_updates=warmup, final_learning_rate_share=share
    )
    for total in (warmup + 1, warmup + 2, 40):
        own = [learning_rates(settings, place, total)[0] for place in range(total)]
        assert own == pytest.approx(torchs(settings, total), rel=1e-12, abs=1e-12 * PEAK)


@given(place=st.integers(-3, 80), total=st.integers(1, 60), share=st.floats(0, 1))
def test_by_default_the_rate_is_the_straight_line_it_always_was(place: int, total: int, share: float) -> None:
    settings = LearnerSection(final_learning_rate_share=share)
    progress = min(max(place, 0) / max(total - 1, 1), 1.0)
    assert learning_rates(settings, place, total)[0] == settings.learning_rate * (1 - (1 - share) * progress)


@given(
    schedule=st.sampled_from(["linear", "cosine"]),
    warmup=st.integers(0, 10),
    total=st.integers(11, 50),
    share=st.floats(0, 1),
)
def test_it_rises_to_the_peak_and_falls_to_the_share(schedule, warmup: int, total: int, share: float) -> None:
    settings = LearnerSection(
        learning_rate=PEAK, schedule=schedule, warmup_updates=warmup, final_learning_rate_share=share
    )
    rates = [learning_rates(settings, place, total)[0] for place in range(total + 5)]
    assert rates[warmup] == max(rates) == PEAK
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    if total - 1 > warmup:
        assert rates[total - 1 :] == pytest.approx([share * PEAK] * 6, rel=1e-12, abs=1e-15 * PEAK)


def test_the_critics_rate_follows_the_same_curve() -> None:
    settings = LearnerSection(
        advantages="gae", critic="separate", critic_learning_rate=2e-3, learning_rate=PEAK, schedule="cosine",
        warmup_updates=3, final_learning_rate_share=0.1,
    )  # fmt: skip
    for place in range(20):
        policy, critic = learning_rates(settings, place, 20)
        assert critic == pytest.approx(policy * 2e-3 / PEAK)


def test_a_warm_up_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"warmup_updates = 60 .* topology.updates = 60"):
        build_recipe({}, ["learner.warmup_updates=60"], origin="test")
