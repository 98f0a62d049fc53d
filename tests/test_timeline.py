"""The timeline's totals add up, and belong to whom they should."""

import pytest

from hotpot import timeline as module
from hotpot.timeline import Timeline


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_time_belongs_to_the_innermost_span_and_adds_up(clock: Clock) -> None:
    timeline = Timeline(keep_slices=True)
    clock.now += 1
    with timeline.span("a"):
        clock.now += 2
        with timeline.span("b"):
            clock.now += 4
        clock.now += 8
    clock.now += 16
    totals = timeline.totals()
    assert totals == {"other": 17, "a": 10, "b": 4}
    assert sum(totals.values()) == timeline.elapsed_s
    assert [(s.name, s.start_s, s.length_s, s.depth) for s in timeline.slices] == [
        ("b", 3, 4, 1),
        ("a", 1, 14, 0),
    ]


def test_a_whole_span_keeps_what_is_inside(clock: Clock) -> None:
    timeline = Timeline(keep_slices=True)
    with timeline.span("evaluate", whole=True):
        clock.now += 1
        with timeline.span("generate"):
            clock.now += 2
            with timeline.span("inner", whole=True):
                clock.now += 4
    with timeline.span("generate"):
        clock.now += 8
    assert timeline.totals() == {"other": 0, "evaluate": 7, "generate": 8}
    assert {s.name for s in timeline.slices} == {"evaluate", "generate", "inner"}


def test_an_error_closes_the_span(clock: Clock) -> None:
    timeline = Timeline()

    def work() -> None:
        with timeline.span("a"):
            clock.now += 1
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        work()
    clock.now += 2
    assert timeline.totals() == {"other": 2, "a": 1}


def test_start_forgets_and_slices_are_bounded(clock: Clock) -> None:
    timeline = Timeline(keep_slices=True, max_slices=1)
    for _ in range(3):
        with timeline.span("a"):
            clock.now += 1
    assert len(timeline.slices) == 1
    assert timeline.dropped_slices == 2
    timeline.start()
    assert timeline.totals() == {"other": 0}
    assert timeline.slices == []


def test_whoever_watches_sees_that_it_moves_and_where_it_is() -> None:
    timeline = Timeline()
    with timeline.span("a"), timeline.span("b"):
        assert timeline.open_spans == ("a", "b")
        assert timeline.moves == 2
        timeline.totals()
    assert (timeline.open_spans, timeline.moves) == ((), 4)
