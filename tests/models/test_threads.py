"""The choice of thread counts, with work whose cost is made up."""

import pytest
import torch

from hotpot.models import threads as module
from hotpot.models.threads import MARGIN, measure_threads


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _pid: set(range(4)))


def choose(monkeypatch: pytest.MonkeyPatch, costs: dict[int, float]) -> tuple[int, list[int]]:
    """Return the choice for a work of ``costs`` seconds by thread count, and the counts it ran with."""
    now, ran = [0.0], []

    def work() -> None:
        ran.append(torch.get_num_threads())
        now[0] += costs[ran[-1]]

    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    before = torch.get_num_threads()
    best, seconds = measure_threads(work)
    assert torch.get_num_threads() == before
    assert set(seconds) == {1, 2, 4}
    return best, ran


def test_the_fastest_wins_where_it_is_worth_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, {1: 1.0, 2: 0.6, 4: 0.3})[0] == 4


def test_a_small_gain_is_not_worth_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, {1: 1.0, 2: 1.01 / MARGIN, 4: 1.01 / MARGIN})[0] == 1


def test_a_hopeless_count_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    best, ran = choose(monkeypatch, {1: 0.01, 2: 30.0, 4: 30.0})
    assert best == 1
    assert ran.count(2) == ran.count(4) == 1
